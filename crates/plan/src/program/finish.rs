//! The end of a step: tied copies, global norm and loss, update, and the gathering of updated weights.

use crate::{Group, Op, Plan, Unit};

/// What follows the last pass of a training step.
pub(super) fn step(plan: &Plan, stage: usize, tail: &mut Vec<Op>) {
    if plan.holds_tied_copy(stage) {
        let (unit, over) = (Unit::Table, Group::Tied);
        tail.extend([Op::ReduceStart { unit, over }, Op::ReduceWait { unit, over }]);
    }
    tail.push(Op::Measure);
    sums(plan, tail);
    tail.extend([Op::Clip, Op::Step]);
    if plan.sharding.states > 1 && plan.sharding.weights == 1 {
        refresh(plan, stage, tail);
    }
}

/// Sums squared norm and loss over all ranks, one axis at a time.
pub(super) fn sums(plan: &Plan, tail: &mut Vec<Op>) {
    tail.extend(
        plan.norm_axes().into_iter().flat_map(|axis| [Op::NormStart { axis }, Op::NormWait { axis }]),
    );
}

/// After each rank has updated its shard of the weights, every rank gets the other shards.
fn refresh(plan: &Plan, stage: usize, tail: &mut Vec<Op>) {
    let units = plan.stage_units(stage);
    if plan.pipeline.overlap {
        tail.extend(units.iter().map(|&unit| Op::RefreshStart { unit }));
        tail.extend(units.iter().map(|&unit| Op::RefreshWait { unit }));
    } else {
        tail.extend(units.into_iter().flat_map(|unit| [Op::RefreshStart { unit }, Op::RefreshWait { unit }]));
    }
}
