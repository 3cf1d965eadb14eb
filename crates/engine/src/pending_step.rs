//! In-flight steps: steps that the host has enqueued on a device that runs asynchronously, and how long each took.

use kintsugi_rank::{PendingStepResult, StepResult};
use kintsugi_tensor::Mark;

use crate::gpu_monitor::{EnergyReading, GpuMonitor};

/// A step that was enqueued and may not have run yet.
pub(crate) struct PendingStep {
    /// 0-based.
    pub step: u64,
    /// The global batch that it reads.
    pub batch: u64,
    pub span: StepSpan,
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

/// Where a step begins and ends, on the clock of its device. The host may look late, because it is still enqueuing the next
/// step; that does not change the times.
pub(crate) struct StepSpan {
    /// Before its first operation. The device reaches this mark when the previous step has ended, or when the host enqueues
    /// it if that is later. So the times of consecutive steps add up to the time of the run, and an evaluation between two
    /// steps belongs to neither.
    pub begun: Mark,
    /// After its last operation.
    pub ended: Mark,
    /// The newest reading of the energy counter when the host began to enqueue the step, if there is a meter.
    pub energy: Option<EnergyReading>,
}

impl StepSpan {
    /// Seconds and joules of the step. Waits until it has run.
    pub fn measure(&self, gpu: Option<&GpuMonitor>) -> (f64, Option<f64>) {
        let seconds = self.ended.since(&self.begun).as_secs_f64();
        let watts = gpu.zip(self.energy).and_then(|(gpu, since)| gpu.watts(since));
        (seconds, watts.map(|watts| watts * seconds))
    }
}
