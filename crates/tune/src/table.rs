//! The predictions for one plan, as a row of a scaling or sensitivity table.

use kintsugi_plan::Plan;
use kintsugi_simulate::{Consumption, Timing};
use serde::Serialize;

/// The figures of a plan that people compare.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Ranks.
    pub ranks: usize,
    /// Samples of a step.
    pub global_batch: usize,
    /// Whether it fits, where that is known.
    pub fits: Option<bool>,
    /// The most that a rank takes from its device.
    pub reserved: u64,
    /// Seconds of a step.
    pub step_s: f64,
    /// Tokens per second and rank.
    pub tokens_per_s_per_gpu: f64,
    /// Model TFLOP/s per rank.
    pub model_tflops_per_gpu: f64,
    /// Hardware TFLOP/s per rank.
    pub hardware_tflops_per_gpu: f64,
    /// Model FLOP/s as a share of the device's peak.
    pub mfu: Option<f64>,
    /// The share of the step in which stages wait for each other.
    pub bubble: f64,
    /// Joules of a step, all ranks together.
    pub energy_j_per_step: Option<f64>,
}

/// The figures of a plan whose fullest rank takes `reserved` bytes from its device.
pub fn outcome(plan: &Plan, timing: &Timing, reserved: u64, fits: Option<bool>) -> Outcome {
    let ranks = plan.mesh.ranks();
    let (flops, each) = (plan.flops(), 1.0 / (timing.step_s * ranks as f64));
    Outcome {
        ranks,
        global_batch: plan.batch.global,
        fits,
        reserved,
        step_s: timing.step_s,
        tokens_per_s_per_gpu: plan.tokens_per_step() as f64 * each,
        model_tflops_per_gpu: 1e-12 * flops.model * each,
        hardware_tflops_per_gpu: 1e-12 * flops.hardware * each,
        mfu: plan.mfu(timing.step_s),
        bubble: timing.bubble,
        energy_j_per_step: Consumption::new(plan, timing).map(|used| used.joules),
    }
}

/// Tokens per second and rank, as a share of those of the first row.
pub fn efficiency(first: &Outcome, row: &Outcome) -> f64 {
    row.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu
}
