//! What plans that run the same programs have in common.

use kintsugi_plan::{Plan, Recompute, ScheduleKind, When};

/// All of a plan that decides its programs, for one model, one choice of prefetch and overlap, and so many micro-batches.
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
    reduce: Option<When>,
    refresh: bool,
}

impl ProgramKey {
    /// The key of the short step that stands for `micro_batches` of a plan.
    pub(crate) fn short(plan: &Plan, micro_batches: usize) -> Self {
        let sharding = &plan.sharding;
        ProgramKey {
            pp: plan.mesh.pp,
            schedule: plan.pipeline.schedule,
            virtual_stages: plan.pipeline.virtual_stages,
            last_layers: plan.last_layers(),
            micro_batches: short_step(plan, micro_batches),
            replicas: plan.mesh.dp > 1,
            tensor_parallel: plan.mesh.tp > 1,
            sequence_parallel: plan.sequence_parallel,
            recompute: plan.memory.recompute == Recompute::Full,
            gather: (sharding.weights > 1).then_some(sharding.gather),
            reduce: (sharding.gradients > 1).then_some(sharding.reduce),
            refresh: sharding.states > 1 && sharding.weights == 1,
        }
    }

    /// The same for programs without the ops that only sum over tensor-parallel ranks.
    pub(crate) fn without_tensor_sums(self) -> Self {
        ProgramKey { tensor_parallel: false, sequence_parallel: false, ..self }
    }
}

/// Micro-batches that fill the pipeline before anything can repeat.
pub(crate) fn filling(plan: &Plan) -> usize {
    if plan.pipeline.schedule == ScheduleKind::Interleaved { 0 } else { plan.mesh.pp }
}

/// Micro-batches of the short step that stands for one with `micro_batches`: those that fill the pipeline, run a period
/// twice and drain it. A step with fewer stands for itself.
pub(crate) fn short_step(plan: &Plan, micro_batches: usize) -> usize {
    let period = plan.period();
    // A gather may be started so many blocks ahead. A micro-batch has at least two blocks of each chunk where its forward
    // and backward are in one period, else one.
    let ahead = if plan.sharding.weights > 1 { plan.pipeline.prefetch } else { 0 };
    let ahead = if period > 1 { ahead / (2 * plan.pipeline.virtual_stages) } else { ahead };
    let short = filling(plan) + 4 * period + ahead / period * period;
    if micro_batches + period < short { micro_batches } else { short }
}
