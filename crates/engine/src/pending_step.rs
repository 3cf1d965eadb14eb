//! In-flight steps: steps that the host has enqueued on a device that runs asynchronously, and when each began and ended.

use std::time::Instant;

use kintsugi_rank::{PendingStepResult, StepResult};

/// A point in time, and the reading of the GPU's energy meter if there is one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timestamp {
    pub at: Instant,
    pub joules: Option<f64>,
}

/// A step that was enqueued and may not have run yet.
pub(crate) struct PendingStep {
    /// 0-based.
    pub step: u64,
    /// The global batch that it reads.
    pub batch: u64,
    /// When the host began to enqueue it.
    pub begun: Timestamp,
    /// How often the host waited for the device while it enqueued the step; `None` on a CPU.
    pub host_waits: Option<u64>,
    pub result: PendingStepResult,
}

/// A step that has run.
pub(crate) struct FinishedStep {
    /// 0-based.
    pub step: u64,
    /// The global batch that it read.
    pub batch: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// Joules that it took, if there is a meter.
    pub joules: Option<f64>,
    /// As in [`PendingStep`].
    pub host_waits: Option<u64>,
    pub result: StepResult,
}

impl PendingStep {
    /// Waits until the step has run. `last` is the end of the previous step, and is set to the end of this one.
    pub fn wait(self, last: &mut Option<Timestamp>, now: impl FnOnce() -> Timestamp) -> FinishedStep {
        let result = self.result.wait();
        let ended = now();
        let (seconds, joules) = since(self.begun, *last, ended);
        *last = Some(ended);
        let PendingStep { step, batch, host_waits, .. } = self;
        FinishedStep { step, batch, seconds, joules, host_waits, result }
    }
}

/// Seconds and joules of a step. A step that is enqueued while the previous one runs begins when the previous one ends,
/// so the times of consecutive steps add up to the time of the whole run.
fn since(begun: Timestamp, last: Option<Timestamp>, ended: Timestamp) -> (f64, Option<f64>) {
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
        let moment = |seconds| Timestamp {
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
