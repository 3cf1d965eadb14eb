//! The result of a step on the host. The device copies it after the step, when the next step may already be enqueued.

use kintsugi_tensor::Fetch;

use crate::rank::{Rank, STOP};

/// A step's result that is being copied to the host.
#[derive(Debug)]
pub struct PendingStepResult {
    control: Fetch,
    sums: Fetch,
}

/// The result of a step, the same on every rank: loss, norm, learning rate and loss scale, and whether to stop.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    control: Vec<f64>,
    stop: bool,
}

impl Rank {
    /// Enqueues a copy of the result of the newest step. Does not wait. Later steps do not change the copy.
    pub fn fetch_step_result(&self) -> PendingStepResult {
        let (control, sums) = (self.control.view(), self.sums().view());
        PendingStepResult { control: self.backend.fetch(control), sums: self.backend.fetch(sums) }
    }
}

impl PendingStepResult {
    /// Waits until the step has run.
    pub fn wait(self) -> StepResult {
        StepResult { control: self.control.wait(), stop: self.sums.wait()[STOP] > 0.0 }
    }
}

impl StepResult {
    /// An element of the control buffer ([`control`](kintsugi_tensor::ops::control)).
    pub fn control(&self, index: usize) -> f64 {
        self.control[index]
    }

    /// Whether some rank asked to stop in this step.
    pub fn stop_agreed(&self) -> bool {
        self.stop
    }
}
