//! Gradients: summed over tp where sequence parallelism leaves parts of them, then over dp.
//!
//! Once a step, a unit is reduced after its last write (without overlap: after the last pass). For every micro-batch (ZeRO-2 and -3 with little memory), it
//! is reduced after each micro-batch's last write, and at most one whole gradient is under way while the next is made.

use std::collections::{BTreeMap, HashMap};

use super::Draft;
use crate::{Block, Op, Over, Part, Plan, Unit, When};

pub(super) fn insert(plan: &Plan, stage: usize, draft: &mut Draft) {
    let reductions = reductions(plan, stage);
    let every_micro = plan.sharding.gradients > 1 && plan.sharding.reduce == When::MicroBatch;
    let key = |unit, micro| (unit, every_micro.then_some(micro));
    // Without overlap a reduction inside the last pass would keep the stage before from its own.
    let at_the_end = !plan.pipeline.overlap && !every_micro;
    let mut last_write = HashMap::new();
    for (index, slot) in draft.slots.iter().enumerate() {
        if let Some((block, micro)) = writes_gradient(slot.op) {
            for unit in plan.block_units(block) {
                last_write.insert(key(unit, micro), index);
            }
        }
    }
    for index in 0..draft.slots.len() {
        let Some((block, micro)) = writes_gradient(draft.slots[index].op) else { continue };
        for unit in plan.block_units(block).into_iter().filter(|&u| last_write[&key(u, micro)] == index) {
            let Some((last, others)) = reductions[&unit].split_last() else { continue };
            let then = if at_the_end { &mut draft.tail } else { &mut draft.slots[index].then };
            for &over in others {
                then.extend([Op::ReduceStart { unit, over }, Op::ReduceWait { unit, over }]);
            }
            then.push(Op::ReduceStart { unit, over: *last });
            wait_place(plan, draft, unit, index, every_micro).push(Op::ReduceWait { unit, over: *last });
        }
    }
}

/// What each unit of a stage is reduced over, in order. Copies of a tied table are left to the end of the step.
fn reductions(plan: &Plan, stage: usize) -> BTreeMap<Unit, Vec<Over>> {
    let parts = plan.sequence_parallel && plan.mesh.tp > 1;
    let one = |unit: Unit| {
        let tensor = (parts && plan.layout(unit).replicated > 0).then_some(Over::Tensor);
        let data = (plan.mesh.dp > 1).then_some(Over::Data);
        (unit, tensor.into_iter().chain(data).collect())
    };
    plan.stage_units(stage).into_iter().map(one).collect()
}

/// Where to wait for the reduction of `unit` that was started after slot `index`.
fn wait_place<'a>(
    plan: &Plan,
    draft: &'a mut Draft,
    unit: Unit,
    index: usize,
    every_micro: bool,
) -> &'a mut Vec<Op> {
    let Draft { slots, tail, .. } = draft;
    if !plan.pipeline.overlap {
        return if every_micro { &mut slots[index].then } else { tail };
    }
    match slots.get_mut(index + 1) {
        Some(next) if every_micro => {
            let block = writes_gradient(next.op).map(|(block, _)| block);
            let writes_again = block.is_some_and(|block| plan.block_units(block).contains(&unit));
            if writes_again { &mut next.needs } else { &mut next.then }
        }
        _ => tail,
    }
}

/// The block and micro-batch whose weight gradients this computation adds.
fn writes_gradient(op: Op) -> Option<(Block, usize)> {
    match op {
        Op::Backward { block, micro, part: Part::Both | Part::Weight } => Some((block, micro)),
        _ => None,
    }
}
