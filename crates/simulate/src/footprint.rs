//! The memory of the fullest rank under a framework: the engine's own, and what the framework adds to it.

use kintsugi_plan::Plan;
use kintsugi_tensor::Device;

use crate::{Play, predict};

/// Bytes at the peak of the fullest rank.
pub fn memory_of(plan: &Plan, device: Device) -> f64 {
    let framework = &plan.framework;
    let last = plan.mesh.pp - 1;
    let logits = plan.rows() as f64 * plan.model.padded_vocab(plan.mesh.tp) as f64 / plan.mesh.tp as f64;
    let stage = |(stage, memory): (usize, &kintsugi_rank::RankMemory)| {
        let more = memory.activations as f64 * (framework.kept - 1.0);
        let head = if stage == last { logits * framework.logit_bytes } else { 0.0 };
        memory.total as f64 + more + head + framework.reserve
    };
    let prediction = predict(plan, device, Play::Short);
    prediction.stages.iter().enumerate().map(stage).fold(0.0, f64::max)
}
