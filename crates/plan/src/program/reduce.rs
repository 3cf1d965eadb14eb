//! Reductions of gradients: over tp if sequence parallelism leaves partial sums, then over dp.
//!
//! If gradients are reduced once a step, a unit is reduced after its last write (without overlap: after the last pass).
//! If they are reduced for every micro-batch (ZeRO-2 and -3 with little memory), a unit is reduced after each
//! micro-batch's last write, and at most one whole gradient is being reduced while the next one is computed. With a
//! split backward, a whole gradient exists from a block's input part, which writes the gradients of its norms, to its
//! weight part.

use super::by_unit::ByUnit;
use super::{Draft, Place};
use crate::{Group, Op, Plan, Unit, When};

pub(super) fn insert(plan: &Plan, stage: usize, draft: &mut Draft) {
    if plan.mesh.dp == 1 && !(plan.sequence_parallel && plan.mesh.tp > 1) {
        return;
    }
    let reductions = reductions(plan, stage);
    let every_micro = plan.sharding.gradients > 1 && plan.sharding.reduce == When::MicroBatch;
    // Without overlap, a reduction inside the last pass would delay the stage before.
    let at_the_end = !plan.pipeline.overlap && !every_micro;
    let writes = LastWrites::of(plan, stage, draft, every_micro);
    for index in 0..draft.slots.len() {
        let Some((block, micro)) = super::writes_gradient(draft.slots[index]) else { continue };
        for unit in plan.units_of(block).filter(|&unit| writes.is_last(index, unit, micro)) {
            let (others, last) = match reductions[unit] {
                [others, Some(last)] => (others, last),
                [Some(last), None] => (None, last),
                [None, None] => continue,
            };
            let mut then = |op| {
                if at_the_end {
                    draft.tail.push(op);
                } else {
                    draft.insert(index, Place::Then, op);
                }
            };
            if let Some(over) = others {
                then(Op::ReduceStart { unit, over });
                then(Op::ReduceWait { unit, over });
            }
            then(Op::ReduceStart { unit, over: last });
            let wait = Op::ReduceWait { unit, over: last };
            match wait_place(plan, draft, unit, index, every_micro) {
                Some((slot, place)) => draft.insert(slot, place, wait),
                None => draft.tail.push(wait),
            }
        }
    }
}

/// The slot that writes each unit last: in the step, or for each micro-batch.
struct LastWrites {
    /// The slots of each unit.
    units: ByUnit<usize>,
    /// Number of micro-batches that are reduced separately.
    rows: usize,
    slots: Vec<usize>,
}

impl LastWrites {
    fn of(plan: &Plan, stage: usize, draft: &Draft, every_micro: bool) -> Self {
        let rows = if every_micro { plan.micro_batches() } else { 1 };
        let (mut units, mut end) = (ByUnit::all(plan, 0), 0);
        for unit in plan.stage_units(stage) {
            units[unit] = end;
            end += rows;
        }
        let mut writes = LastWrites { units, rows, slots: vec![0; end] };
        for (index, &op) in draft.slots.iter().enumerate() {
            let Some((block, micro)) = super::writes_gradient(op) else { continue };
            for unit in plan.units_of(block) {
                let at = writes.at(unit, micro);
                writes.slots[at] = index;
            }
        }
        writes
    }

    fn is_last(&self, index: usize, unit: Unit, micro: usize) -> bool {
        self.slots[self.at(unit, micro)] == index
    }

    fn at(&self, unit: Unit, micro: usize) -> usize {
        self.units[unit] + if self.rows > 1 { micro } else { 0 }
    }
}

/// The groups over which each unit of a stage is reduced, in order. Copies of a tied table are reduced at the end of
/// the step.
fn reductions(plan: &Plan, stage: usize) -> ByUnit<[Option<Group>; 2]> {
    let mut all = ByUnit::all(plan, [None; 2]);
    for unit in plan.stage_units(stage) {
        let has_replicated = || plan.layout(unit).replicated > 0;
        let [tensor, data, _] = plan.gradient_reductions(stage, unit, has_replicated);
        all[unit] = [tensor, data];
    }
    all
}

/// The slot at which to wait for the reduction of `unit` that started after slot `index`; `None` for the end of the
/// step.
fn wait_place(
    plan: &Plan,
    draft: &Draft,
    unit: Unit,
    index: usize,
    every_micro: bool,
) -> Option<(usize, Place)> {
    if !plan.pipeline.overlap {
        return every_micro.then_some((index, Place::Then));
    }
    let next = draft.slots.get(index + 1).filter(|_| every_micro)?;
    let block = super::writes_gradient(*next).map(|(block, _)| block);
    let writes_again = block.is_some_and(|block| plan.units_of(block).any(|other| other == unit));
    Some((index + 1, if writes_again { Place::Needs } else { Place::Then }))
}
