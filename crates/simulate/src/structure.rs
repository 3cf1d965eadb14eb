//! The short step that stands for a step of many micro-batches.

use kintsugi_plan::{Plan, ScheduleKind};

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
