//! The end of a step: tied copies, global norm and loss, update, and the gathering of updated weights.

use crate::{Group, Op, Phase, PhaseKind, Plan, Unit};

/// What follows the last pass of a training step.
pub(super) fn step(plan: &Plan, stage: usize, tail: &mut Vec<Op>) {
    if plan.holds_tied_copy(stage) {
        let (unit, phase) = (Unit::Table, Phase::plain(Group::Tied, PhaseKind::Sum));
        tail.extend([Op::ReduceStart { unit, phase }, Op::ReduceWait { unit, phase }]);
    }
    tail.push(Op::Measure);
    sums(plan, tail);
    tail.extend([Op::Clip, Op::Step]);
    refresh(plan, stage, tail);
}

/// Sums squared norm and loss over all ranks, one axis at a time.
pub(super) fn sums(plan: &Plan, tail: &mut Vec<Op>) {
    tail.extend(
        plan.norm_axes().into_iter().flat_map(|axis| [Op::NormStart { axis }, Op::NormWait { axis }]),
    );
}

/// After each rank has updated its shard, the ranks that hold the same weights get the other shards of them. With overlap all
/// units are gathered at the same time, phase by phase.
fn refresh(plan: &Plan, stage: usize, tail: &mut Vec<Op>) {
    let (units, phases) = (plan.stage_units(stage), plan.sharding.refreshes());
    let start = |unit, phase| Op::RefreshStart { unit, phase };
    let wait = |unit, phase| Op::RefreshWait { unit, phase };
    if !plan.pipeline.overlap {
        let of_unit = |unit| phases.iter().flat_map(move |&phase| [start(unit, phase), wait(unit, phase)]);
        return tail.extend(units.into_iter().flat_map(of_unit));
    }
    tail.extend(units.iter().filter_map(|&unit| phases.first().map(|&phase| start(unit, phase))));
    for (number, &phase) in phases.iter().enumerate() {
        for &unit in &units {
            tail.push(wait(unit, phase));
            tail.extend(phases.get(number + 1).map(|&phase| start(unit, phase)));
        }
    }
}
