//! Sharded weights (ZeRO-3, arXiv 1910.02054): gathered before the blocks that use them, released after.
//!
//! Weights are gathered a few computations ahead. If a unit is used again before its next gather would start, it stays
//! gathered. So no unit is gathered twice without a release in between.

use super::by_unit::ByUnit;
use super::{Draft, Place};
use crate::{Op, Plan, Unit, When};

pub(super) fn insert(plan: &Plan, stage: usize, draft: &mut Draft) {
    if plan.sharding.weights == 1 {
        return;
    }
    let ahead = if plan.pipeline.overlap { plan.pipeline.prefetch } else { 0 };
    let stays = |from: usize, to: usize| plan.sharding.gather == When::Step || to - from <= ahead + 1;
    // The last slot that used each gathered unit.
    let mut whole: ByUnit<Option<usize>> = ByUnit::all(plan, None);
    for index in 0..draft.slots.len() {
        let Some(block) = super::reads_weights(draft.slots[index]) else { continue };
        for unit in plan.units_of(block) {
            let last = whole[unit].replace(index);
            if last.is_some_and(|last| stays(last, index)) {
                continue;
            }
            if let Some(last) = last {
                draft.insert(last, Place::Then, Op::Release { unit });
            }
            gather(draft, unit, index, ahead);
        }
    }
    for unit in plan.stage_units(stage) {
        if let Some(last) = whole[unit] {
            draft.insert(last, Place::Then, Op::Release { unit });
        }
    }
}

fn gather(draft: &mut Draft, unit: Unit, index: usize, ahead: usize) {
    let start = Op::GatherStart { unit };
    if ahead == 0 {
        draft.insert(index, Place::Needs, start);
    } else {
        draft.insert(index.saturating_sub(ahead), Place::Starts, start);
    }
    draft.insert(index, Place::Needs, Op::GatherWait { unit });
}
