//! The memory of ranks under a framework: what this engine plans, and what the framework adds.
//!
//! Tensors that live for some ops are in `framework_tensors`. Here is what does not depend on the op.

use kintsugi_model::compute_type;
use kintsugi_plan::{AttentionKind, Block, Pass, Plan, Recompute};
use kintsugi_rank::RankMemory;
use kintsugi_spec::Fusion;

use crate::Prediction;
use crate::predict::framework_peaks;

impl Prediction {
    /// The prediction of a plan with the memory of its framework, if it names one.
    #[must_use]
    pub fn under_framework(mut self, plan: &Plan) -> Self {
        if has_own_memory(plan) {
            let peaks = framework_peaks(plan, self.device, self.coverage);
            let stages = peaks.into_iter().enumerate();
            self.stages = stages.map(|(stage, memory)| under_framework(plan, stage, memory)).collect();
        }
        self
    }
}

/// Bytes at the peak of the fullest rank, as [`memory_by_stage`] counts them.
pub fn memory_of(plan: &Plan, prediction: &Prediction) -> f64 {
    memory_by_stage(plan, prediction).into_iter().fold(0.0, f64::max)
}

/// Bytes of tensors at the peak of a rank of each stage under the plan's framework, and its fixed reserve. This is what
/// published memory is compared with; the share that the allocator reserves on top is in `reserved`.
pub fn memory_by_stage(plan: &Plan, prediction: &Prediction) -> Vec<f64> {
    let stages = prediction.clone().under_framework(plan).stages;
    stages.iter().map(|memory| memory.total as f64 + plan.framework.reserve).collect()
}

/// Whether the plan's framework allocates memory in its own way. Then `reserved` is not that of this engine's arena.
pub fn has_own_memory(plan: &Plan) -> bool {
    let framework = &plan.framework;
    let more = [framework.reserve, framework.allocator, framework.logit_bytes, framework.parameter_bytes];
    let also = [framework.bucket_bytes, framework.layer_gradients];
    framework.preset.is_some()
        || more.iter().chain(&also).any(|&bytes| bytes > 0.0)
        || framework.attention_again > 0.0
        || framework.kernels.accumulation != Fusion::Fused
        || !framework.keeps.is_empty()
        || kept(plan).total_cmp(&1.0).is_ne()
}

fn under_framework(plan: &Plan, stage: usize, memory: RankMemory) -> RankMemory {
    let peak = Peak {
        total: memory.total,
        activations: memory.activations,
        parameters: stage_parameters(plan, stage),
        layers_in_flight: layers_in_flight(plan, stage),
    };
    let more = Addition::new(plan, &peak);
    RankMemory {
        gradients: memory.gradients + more.gradients as u64,
        activations: memory.activations.saturating_add_signed(more.activations as i64),
        communication: memory.communication + more.communication as u64,
        total: memory.total.saturating_add_signed(more.total() as i64),
        reserved: more.reserved(plan, &peak),
        ..memory
    }
}

/// What a stage's rank holds at its peak, with the tensors that the framework holds for some ops.
pub(crate) struct Peak {
    /// All bytes.
    pub total: u64,
    /// Bytes of activations.
    pub activations: u64,
    /// Parameters of the rank.
    pub parameters: usize,
    /// The largest number of layers that have run forward but not yet backward, counted per micro-batch.
    pub layers_in_flight: usize,
}

/// The bytes that a framework adds to a peak, by category.
pub(crate) struct Addition {
    gradients: f64,
    activations: f64,
    communication: f64,
}

impl Addition {
    pub(crate) fn new(plan: &Plan, peak: &Peak) -> Self {
        let (framework, parameters) = (&plan.framework, peak.parameters as f64);
        let buckets = if plan.mesh.replicas() > 1 { framework.bucket_bytes } else { 0.0 };
        let layer = if framework.layer_gradients > 0.0 { layer_parameters(plan) as f64 } else { 0.0 };
        Addition {
            gradients: (framework.parameter_bytes * parameters + framework.layer_gradients * layer).round(),
            activations: (kept_activations(plan, peak) - peak.activations as f64).round(),
            communication: (buckets * parameters).round(),
        }
    }

    fn total(&self) -> f64 {
        self.gradients + self.activations + self.communication
    }

    /// What the allocator reserves for a rank with this peak.
    pub(crate) fn reserved(&self, plan: &Plan, peak: &Peak) -> u64 {
        let tensors = peak.total as f64 + self.total();
        (tensors * (1.0 + plan.framework.allocator) + plan.framework.reserve) as u64
    }
}

/// The activations that the framework keeps, as a multiple of this engine's.
fn kept(plan: &Plan) -> f64 {
    let framework = &plan.framework;
    if plan.mesh.tp() > 1 { framework.kept_tp.unwrap_or(framework.kept) } else { framework.kept }
}

/// The activations that the framework keeps.
fn kept_activations(plan: &Plan, peak: &Peak) -> f64 {
    kept(plan) * (peak.activations as f64 - dropped_scores(plan, peak.layers_in_flight)).max(0.0)
}

/// The attention scores that this engine keeps, but a framework that repeats attention in the backward does not.
fn dropped_scores(plan: &Plan, layers_in_flight: usize) -> f64 {
    let keeps = plan.memory.attention == AttentionKind::Plain && plan.memory.recompute == Recompute::None;
    if !keeps || plan.framework.attention_again <= 0.0 {
        return 0.0;
    }
    let scores = plan.rows() * plan.batch.sequence * plan.model.heads / plan.mesh.tp() * layers_in_flight;
    (scores * compute_type(plan.precision.compute).bytes()) as f64
}

/// The parameters of a rank's part of one layer.
fn layer_parameters(plan: &Plan) -> usize {
    let units = plan.block_units(Block::Layer(0));
    let placed = units.into_iter().flat_map(|unit| plan.layout(unit).placed);
    placed.map(|placed| placed.range.len()).sum()
}

/// The parameters that a rank of a stage holds.
pub(crate) fn stage_parameters(plan: &Plan, stage: usize) -> usize {
    let placed = plan.stage_units(stage).into_iter().flat_map(|unit| plan.layout(unit).placed);
    placed.map(|placed| placed.range.len()).sum::<usize>() / plan.sharding.weights
}

/// The largest number of a stage's layers that have run forward but not yet backward, counted per micro-batch.
pub(crate) fn layers_in_flight(plan: &Plan, stage: usize) -> usize {
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
