//! Steps between being enqueued and being known: when each began and ended, on a device that runs later.

use std::time::Instant;

use kintsugi_rank::{Decided, Snapshot};

/// A moment, by the clock and by the card's meter, where there is one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub at: Instant,
    pub joules: Option<f64>,
}

/// A step that was enqueued and may not have run yet.
pub(crate) struct Flight {
    /// 0-based.
    pub step: u64,
    /// The global batch that it reads.
    pub batch: u64,
    /// When the host began to enqueue it.
    pub begun: Moment,
    pub snapshot: Snapshot,
}

/// A step that has run.
pub(crate) struct Landed {
    /// 0-based.
    pub step: u64,
    /// The global batch that it read.
    pub batch: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// Joules that it took, where there is a meter.
    pub joules: Option<f64>,
    pub decided: Decided,
}

impl Flight {
    /// Waits until the step has run. `last` is when the one before it had, and is now when this one had.
    pub fn land(self, last: &mut Option<Moment>, now: impl FnOnce() -> Moment) -> Landed {
        let decided = self.snapshot.wait();
        let ended = now();
        let (seconds, joules) = since(self.begun, *last, ended);
        *last = Some(ended);
        Landed { step: self.step, batch: self.batch, seconds, joules, decided }
    }
}

/// Seconds and joules of a step. One that was enqueued while the step before it was running begins when that one ends,
/// so steps that follow each other take as long, in sum, as all of them together.
fn since(begun: Moment, last: Option<Moment>, ended: Moment) -> (f64, Option<f64>) {
    let begun = last.filter(|last| last.at > begun.at).unwrap_or(begun);
    let joules = begun.joules.zip(ended.joules).map(|(before, after)| after - before);
    (ended.at.duration_since(begun.at).as_secs_f64(), joules)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn steps_that_overlap_take_the_time_between_their_ends() {
        let zero = Instant::now();
        let moment = |seconds| Moment {
            at: zero + Duration::from_secs(seconds),
            joules: Some(100.0 * seconds as f64),
        };
        // The second is enqueued while the first runs; before the third there is a pause of four seconds.
        let mut last = None;
        let times = [(0, 5), (1, 8), (12, 14)].map(|(begun, ended)| {
            let taken = since(moment(begun), last, moment(ended));
            last = Some(moment(ended));
            taken
        });
        assert_eq!(times, [(5.0, Some(500.0)), (3.0, Some(300.0)), (2.0, Some(200.0))]);
    }
}
