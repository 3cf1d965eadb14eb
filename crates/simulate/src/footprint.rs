//! The memory of ranks under a framework: the engine's own, plus what the framework adds.

use kintsugi_model::compute_type;
use kintsugi_plan::{Pass, Plan};
use kintsugi_rank::RankMemory;
use kintsugi_spec::Activation;

use crate::Prediction;

/// Bytes at the peak of the fullest rank.
pub fn memory_of(plan: &Plan, prediction: &Prediction) -> f64 {
    memory_by_stage(plan, prediction).into_iter().fold(0.0, f64::max)
}

/// Bytes at the peak of a rank of each stage.
pub fn memory_by_stage(plan: &Plan, prediction: &Prediction) -> Vec<f64> {
    prediction.stages.iter().enumerate().map(|(i, memory)| stage_bytes(plan, i, memory)).collect()
}

fn stage_bytes(plan: &Plan, stage: usize, memory: &RankMemory) -> f64 {
    let framework = &plan.framework;
    let more = memory.activations as f64 * (framework.kept - 1.0);
    let logits = plan.rows() as f64 * plan.model.padded_vocab(plan.mesh.tp) as f64 / plan.mesh.tp as f64;
    let head = if stage + 1 == plan.mesh.pp { logits * framework.logit_bytes } else { 0.0 };
    let parameters = memory.weights as f64 / compute_type(plan.precision.compute).bytes() as f64;
    let gradients = framework.parameter_bytes * parameters;
    memory.total as f64
        + more
        + gradients
        + head
        + gathered(plan, stage)
        + temporary(plan)
        + framework.reserve
}

/// The temporary memory of the gradient of the first MLP product.
fn temporary(plan: &Plan) -> f64 {
    let model = &plan.model;
    let matrices = if model.activation == Activation::Swiglu { 2 } else { 1 };
    let elements = matrices * model.ffn * model.hidden / plan.mesh.tp;
    plan.framework.temporary * elements as f64
}

/// Activations of all rows that layers keep in 16 bits, for every micro-batch in flight.
fn gathered(plan: &Plan, stage: usize) -> f64 {
    if !plan.sequence_parallel {
        return 0.0;
    }
    let tensor = 2.0 * (plan.rows() * plan.model.hidden) as f64;
    plan.framework.gathered * tensor * layers_in_flight(plan, stage) as f64
}

/// The largest number of a stage's layers that have run forward but not yet backward, counted per micro-batch.
fn layers_in_flight(plan: &Plan, stage: usize) -> usize {
    let (mut now, mut most) = (0, 0);
    for pass in plan.passes(stage) {
        let layers = plan.pipeline.layers[pass.chunk()];
        match pass {
            Pass::Forward { .. } => now += layers,
            Pass::Backward { .. } | Pass::BackwardInput { .. } => now -= layers,
            Pass::BackwardWeight { .. } => {}
        }
        most = most.max(now);
    }
    most
}
