//! The prediction in JSON.

use kintsugi_plan::{Flops, Plan};
use kintsugi_rank::{RankMemory, ReplicationMetrics};
use kintsugi_simulate::{Prediction, TimeRange, Timing, Training};
use serde::Serialize;

use super::speed::Speed;
use crate::describe::CommBytes;

/// What `plan --json` prints. Values that are not predicted are null.
#[derive(Serialize)]
pub struct Answer {
    fits: Option<bool>,
    params: u64,
    /// Fewer if some are frozen.
    trained_params: u64,
    ranks: usize,
    micro_batches: usize,
    flops: Flops,
    step_s: Option<f64>,
    tokens_per_s_per_gpu: Option<f64>,
    model_tflops_per_gpu: Option<f64>,
    hardware_tflops_per_gpu: Option<f64>,
    mfu: Option<f64>,
    bubble: f64,
    memory: Vec<RankMemory>,
    /// What a rank may take from its device: its memory less the headroom.
    available_bytes: Option<u64>,
    comm: CommBytes,
    /// The copying of states between two steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    replication: Option<ReplicationMetrics>,
    energy_j_per_step: Option<f64>,
    power_w_per_gpu: Option<f64>,
    timing: Option<Timing>,
    /// The range of a step's time, and what it comes from.
    range: Option<TimeRange>,
    training: Option<Training>,
    notes: Vec<String>,
}

impl Answer {
    /// The answer for a plan.
    pub fn new(
        plan: &Plan,
        prediction: &Prediction,
        speed: Option<&Speed>,
        bubble: f64,
        fits: Option<bool>,
        notes: Vec<String>,
    ) -> Self {
        let energy = speed.and_then(|speed| speed.consumption);
        Answer {
            fits,
            params: plan.parameter_count(),
            trained_params: plan.trained_parameter_count(),
            ranks: plan.mesh.ranks(),
            micro_batches: plan.micro_batches(),
            flops: plan.flops(),
            step_s: speed.map(|speed| speed.timing.step_s),
            tokens_per_s_per_gpu: speed.map(|speed| speed.tokens),
            model_tflops_per_gpu: speed.map(|speed| speed.model_flops / 1e12),
            hardware_tflops_per_gpu: speed.map(|speed| speed.hardware_flops / 1e12),
            mfu: speed.and_then(|speed| speed.mfu),
            bubble,
            memory: prediction.stages.clone(),
            available_bytes: plan.cluster.device.planned_memory(),
            comm: prediction.figures().comm_bytes,
            replication: prediction.replication.clone(),
            energy_j_per_step: energy.map(|energy| energy.joules),
            power_w_per_gpu: energy.map(|energy| energy.power_w),
            timing: speed.map(|speed| speed.timing),
            range: speed.map(|speed| speed.range),
            training: speed.map(|speed| speed.training),
            notes,
        }
    }
}
