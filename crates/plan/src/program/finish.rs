//! The end of a step: tied copies, global norm and loss, update, and the gathering of updated weights.

use crate::{Direction, Group, MatrixOp, Op, Phase, PhaseKind, Plan, StepOp, Transfer, Unit};

/// What follows the last pass of a training step.
pub(super) fn step(plan: &Plan, stage: usize, tail: &mut Vec<Op>) {
    if plan.holds_tied_copy(stage) && !plan.is_frozen(Unit::Table) {
        let (unit, phase) = (Unit::Table, Phase::plain(Group::Tied, PhaseKind::Sum));
        tail.extend(Op::start_and_wait(Transfer::Reduce { unit, phase }));
    }
    tail.push(Op::Step(StepOp::Measure));
    sums(plan, tail);
    tail.extend([Op::Step(StepOp::Clip), Op::Step(StepOp::Update)]);
    matrices(plan, stage, tail);
    tail.extend(plan.averages_weights().then_some(Op::Step(StepOp::Average)));
    refresh(plan, stage, tail);
}

/// Sums squared norm and loss over all ranks, one axis at a time.
pub(super) fn sums(plan: &Plan, tail: &mut Vec<Op>) {
    tail.extend(plan.norm_axes().into_iter().flat_map(|axis| Op::start_and_wait(Transfer::Norm { axis })));
}

/// The layers of each round go to their owners, who orthogonalize the matrices, and back.
fn matrices(plan: &Plan, stage: usize, tail: &mut Vec<Op>) {
    let groups = plan.owner_groups();
    for round in plan.matrix_rounds(stage) {
        let first = round[0];
        let exchange = |&over: &Group, direction| {
            Op::start_and_wait(Transfer::Exchange { unit: first, over, direction })
        };
        let each = |kind| round.iter().map(move |&unit| Op::Matrices { kind, unit });
        tail.push(Op::Matrices { kind: MatrixOp::Begin, unit: first });
        tail.extend(each(MatrixOp::Collect));
        tail.extend(groups.iter().flat_map(|over| exchange(over, Direction::ToOwners)));
        tail.push(Op::Matrices { kind: MatrixOp::Orthogonalize, unit: first });
        tail.extend(groups.iter().rev().flat_map(|over| exchange(over, Direction::FromOwners)));
        tail.extend(each(MatrixOp::Apply));
        tail.push(Op::Matrices { kind: MatrixOp::End, unit: first });
    }
}

/// After each rank has updated its shard, the ranks that hold the same weights get the other shards of them. With overlap all
/// units are gathered at the same time, phase by phase.
pub(crate) fn refresh(plan: &Plan, stage: usize, tail: &mut Vec<Op>) {
    let (units, phases) = (plan.trained_units(stage), plan.sharding.refreshes());
    let refresh = |unit, phase| Transfer::Refresh { unit, phase };
    if !plan.pipeline.overlap {
        let of_unit = |unit| phases.iter().flat_map(move |&phase| Op::start_and_wait(refresh(unit, phase)));
        return tail.extend(units.into_iter().flat_map(of_unit));
    }
    let start = |unit, phase: Option<&Phase>| phase.map(|&phase| Op::Start(refresh(unit, phase)));
    tail.extend(units.iter().filter_map(|&unit| start(unit, phases.first())));
    for (number, &phase) in phases.iter().enumerate() {
        for &unit in &units {
            tail.push(Op::Wait(refresh(unit, phase)));
            tail.extend(start(unit, phases.get(number + 1)));
        }
    }
}
