//! What the host reads of a step: a copy that the device makes when the step has run, while the next one may be
//! enqueued already.

use kintsugi_tensor::Fetch;

use crate::rank::{Rank, STOP};

/// A step's decisions on their way to the host.
#[derive(Debug)]
pub struct Snapshot {
    control: Fetch,
    sums: Fetch,
}

/// What a step has decided, on this rank as on every other.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    control: Vec<f64>,
    stop: bool,
}

impl Rank {
    /// Asks for what the step that was enqueued last decides. Nothing waits, and later steps do not change it.
    pub fn snapshot(&self) -> Snapshot {
        let (control, sums) = (self.control.view(), self.sums().view());
        Snapshot { control: self.backend.fetch(control), sums: self.backend.fetch(sums) }
    }
}

impl Snapshot {
    /// Waits until the step has run.
    pub fn wait(self) -> Decided {
        Decided { control: self.control.wait(), stop: self.sums.wait()[STOP] > 0.0 }
    }
}

impl Decided {
    /// A slot of the control buffer ([`control`](kintsugi_tensor::ops::control)).
    pub fn control(&self, slot: usize) -> f64 {
        self.control[slot]
    }

    /// Whether some rank asked to stop in this step.
    pub fn stop_agreed(&self) -> bool {
        self.stop
    }
}
