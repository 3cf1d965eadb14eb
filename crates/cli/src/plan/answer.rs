//! The prediction as scripts read it.

use kintsugi_plan::{Flops, Plan};
use kintsugi_rank::RankMemory;
use kintsugi_simulate::Prediction;
use serde::Serialize;

use crate::describe::CommBytes;

/// What `plan --json` prints; what is not predicted is null.
#[derive(Serialize)]
pub struct Answer {
    fits: bool,
    params: u64,
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
    comm: CommBytes,
    energy_j_per_step: Option<f64>,
    power_w_per_gpu: Option<f64>,
}

impl Answer {
    /// The answer for a plan.
    pub fn new(plan: &Plan, prediction: &Prediction, bubble: f64, fits: bool) -> Self {
        Answer {
            fits,
            params: plan.parameter_count(),
            ranks: plan.mesh.ranks(),
            micro_batches: plan.micro_batches(),
            flops: plan.flops(),
            step_s: None,
            tokens_per_s_per_gpu: None,
            model_tflops_per_gpu: None,
            hardware_tflops_per_gpu: None,
            mfu: None,
            bubble,
            memory: prediction.stages.clone(),
            comm: prediction.figures().comm_bytes,
            energy_j_per_step: None,
            power_w_per_gpu: None,
        }
    }
}
