//! The key of plans that run the same programs.

use kintsugi_plan::{MAX_PARTS, Plan, Quantized, Recompute, ScheduleKind, Span, When};

/// Everything that decides a plan's programs, for plans that differ only in their strategy and number of micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "a key, not a state")]
pub(crate) struct ProgramKey {
    pp: usize,
    schedule: ScheduleKind,
    virtual_stages: usize,
    last_layers: usize,
    micro_batches: usize,
    replicas: bool,
    tensor_parallel: bool,
    sequence_parallel: bool,
    recompute: bool,
    gather: Option<When>,
    reduce: When,
    /// The parts of the data-parallel axis, and how many of them divide weights, secondary shards, gradients and states.
    spans: [Option<Span>; MAX_PARTS],
    weights: usize,
    secondary: usize,
    gradients: usize,
    states: usize,
    quantized: Quantized,
}

impl ProgramKey {
    /// The key of the short step that stands for `micro_batches` of a plan.
    pub(crate) fn short(plan: &Plan, micro_batches: usize) -> Self {
        let sharding = &plan.sharding;
        ProgramKey {
            pp: plan.mesh.pp(),
            schedule: plan.pipeline.schedule,
            virtual_stages: plan.pipeline.virtual_stages,
            last_layers: plan.last_layers(),
            micro_batches: short_step(plan, micro_batches),
            replicas: plan.mesh.dp() > 1,
            tensor_parallel: plan.mesh.tp() > 1,
            sequence_parallel: plan.sequence_parallel,
            recompute: plan.memory.recompute == Recompute::Full,
            gather: (sharding.weights > 1).then_some(sharding.gather),
            reduce: if sharding.gradients > 1 { sharding.reduce } else { When::Step },
            spans: sharding.parts.map(|part| part.map(|part| part.span)),
            weights: sharding.depth(sharding.weights),
            secondary: sharding.depth(sharding.secondary),
            gradients: sharding.depth(sharding.gradients),
            states: sharding.depth(sharding.states),
            quantized: sharding.quantized,
        }
    }

    /// The key without what cannot change the time of a step: sharding gradients that are reduced once a step does not
    /// change the ops.
    pub(crate) fn for_time(self) -> Self {
        let gradients = if self.reduce == When::Step { 0 } else { self.gradients };
        ProgramKey { gradients, ..self }
    }

    /// The key for memory. Sums over tensor-parallel ranks are made in place, so they do not matter.
    pub(crate) fn for_memory(self) -> Self {
        ProgramKey { tensor_parallel: false, sequence_parallel: false, ..self }
    }
}

/// Micro-batches that fill the pipeline before anything can repeat.
pub(crate) fn filling(plan: &Plan) -> usize {
    if plan.pipeline.schedule == ScheduleKind::Interleaved { 0 } else { plan.mesh.pp() }
}

/// Micro-batches of the short step that stands for one with `micro_batches`: those that fill the pipeline, run a period
/// twice and drain it. A step with fewer stands for itself.
pub(crate) fn short_step(plan: &Plan, micro_batches: usize) -> usize {
    let period = plan.period();
    // A gather may start up to `prefetch` blocks ahead. Per chunk, a micro-batch has at least two blocks in a period if
    // its forward and backward are in the same period, else one.
    let phases = plan.sharding.depth(plan.sharding.weights).max(1);
    let ahead = if plan.sharding.weights > 1 { plan.pipeline.prefetch + phases - 1 } else { 0 };
    let ahead = if period > 1 { ahead / (2 * plan.pipeline.virtual_stages) } else { ahead };
    let short = filling(plan) + 4 * period + ahead / period * period;
    if micro_batches + period < short { micro_batches } else { short }
}
