//! Watches the ops of a rank: writes them to its flight recorder, and sets the hang timeout of a step.
//!
//! The timeout is `run.hang_factor` times the longest interval between the starts of two consecutive ops in the last steps. The
//! interval includes CPU kernels, and waits for the device or for other ranks. The job hangs if no rank starts an op for that long.

use std::path::Path;
use std::time::{Duration, Instant};

use kintsugi_plan::Op;
use kintsugi_run::FlightRecorder;

/// The shortest limit. A busy machine, or a network that loses packets, may stop a rank for some seconds.
const SHORTEST: Duration = Duration::from_secs(6);

/// The ops of a rank.
pub(crate) struct OpWatch {
    /// `None` if the run writes no files, or none can be written: training does not depend on it.
    recorder: Option<FlightRecorder>,
    hang_factor: u32,
    /// From 1.
    step: u64,
    last: Option<Instant>,
    /// In this step.
    longest: Duration,
    /// In earlier ones: the longest, halved with every step.
    usual: Duration,
}

impl OpWatch {
    /// Watches a rank, which runs at `place`: its host and device. The flight recorder is in the run's folder `out`.
    pub fn new(out: Option<&Path>, rank: usize, place: &str, hang_factor: u64) -> Self {
        OpWatch {
            recorder: out.and_then(|out| FlightRecorder::create(out, rank, place).ok()),
            hang_factor: hang_factor.try_into().unwrap_or(u32::MAX),
            step: 0,
            last: None,
            longest: Duration::ZERO,
            usual: Duration::ZERO,
        }
    }

    /// A step begins, from 0.
    pub fn begin_step(&mut self, step: u64) {
        self.step = step + 1;
    }

    /// An op begins.
    pub fn op(&mut self, op: &Op) {
        let now = Instant::now();
        if let Some(last) = self.last.replace(now) {
            self.longest = self.longest.max(now - last);
        }
        if let Some(recorder) = &mut self.recorder
            && recorder.op(self.step, op).is_err()
        {
            // The disk is full, or the folder has gone.
            self.recorder = None;
        }
    }

    /// The rank does something between two steps whose time does not count.
    pub fn pause(&mut self) {
        self.last = None;
    }

    /// The end of a step. Returns how long the next one may stand still; `None` if only `run.communication_timeout` counts.
    pub fn end_step(&mut self) -> Option<Duration> {
        self.usual = (self.usual / 2).max(std::mem::take(&mut self.longest));
        (self.hang_factor > 0).then(|| self.usual.saturating_mul(self.hang_factor).max(SHORTEST))
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::StepOp;

    use super::*;

    #[test]
    fn a_step_may_stand_still_for_a_multiple_of_its_longest_op() {
        let mut watch = OpWatch::new(None, 0, "here", 20);
        let op = Op::Step(StepOp::Begin);
        assert_eq!(watch.end_step(), Some(SHORTEST));
        watch.begin_step(0);
        watch.op(&op);
        watch.last = watch.last.and_then(|last| last.checked_sub(Duration::from_secs(2)));
        watch.op(&op);
        let limit = watch.end_step().expect("a limit");
        assert!((40..44).contains(&limit.as_secs()), "{limit:?}");
        watch.last = watch.last.and_then(|last| last.checked_sub(Duration::from_secs(100)));
        watch.pause();
        watch.op(&op);
        let limit = watch.end_step().expect("a limit");
        assert!((20..22).contains(&limit.as_secs()), "the pause does not count: {limit:?}");
        assert_eq!(OpWatch::new(None, 0, "here", 0).end_step(), None);
    }
}
