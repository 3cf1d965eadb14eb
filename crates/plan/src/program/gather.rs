//! Sharded weights (ZeRO-3, arXiv 1910.02054): gathered before the blocks that use them, released after.
//!
//! Weights are gathered a few computations ahead. If a unit is used again before its next gather would start, it stays
//! gathered. So no unit is gathered twice without a release in between. A gather level by level starts one computation earlier
//! for each further level, so that each of its phases runs beside a computation.
//!
//! With a secondary shard (hpZ, arXiv 2306.10209), the first gather of a unit in a step fills it by its outer phases. Later
//! gathers need only the inner phases; if only those for a backward may start from it, the others fill it anew. The secondary
//! shard is discarded when the last gather that needs it has read it.

use super::by_unit::ByUnit;
use super::{Draft, Position};
use crate::{Computation, Op, Phase, Plan, SecondaryUse, Sharding, Transfer, Unit, When};

pub(super) fn insert(plan: &Plan, stage: usize, draft: &mut Draft) {
    let sharding = &plan.sharding;
    if sharding.weights == 1 {
        return;
    }
    let (first, later) = (sharding.gathers(), sharding.later_gathers());
    let (ahead, reach) = (ahead(plan), reach(plan));
    let stays = |from: usize, to: usize| sharding.gather == When::Step || to - from <= reach;
    // The last slot that used each gathered unit, and where the secondary shard of each unit was read last.
    let mut whole: ByUnit<Option<usize>> = ByUnit::all(plan, None);
    let mut read: ByUnit<Option<(usize, Position)>> = ByUnit::all(plan, None);
    for index in 0..draft.slots.len() {
        let op = draft.slots[index];
        let Some(block) = super::reads_weights(op) else { continue };
        for unit in plan.units_of(block) {
            let last = whole[unit].replace(index);
            if last.is_some_and(|last| stays(last, index)) {
                continue;
            }
            if let Some(last) = last {
                draft.insert(last, Position::After, Op::Release { unit });
            }
            let fills = last.is_none() || !may_start_from_secondary(sharding, op);
            if fills {
                discard(sharding, draft, unit, read[unit]);
            }
            let phases = if fills { &first } else { &later };
            let starts = gather(draft, unit, index, ahead, phases);
            read[unit] = Some(starts[phases.len() - later.len()]);
        }
    }
    for unit in plan.stage_units(stage) {
        if let Some(last) = whole[unit] {
            draft.insert(last, Position::After, Op::Release { unit });
        }
        discard(sharding, draft, unit, read[unit]);
    }
}

/// How many computations ahead a gather starts.
fn ahead(plan: &Plan) -> usize {
    if plan.pipeline.overlap { plan.pipeline.prefetch } else { 0 }
}

/// Weights that are used again after at most so many computations stay gathered.
fn reach(plan: &Plan) -> usize {
    match ahead(plan) {
        0 => 1,
        ahead => ahead + plan.sharding.later_gathers().len(),
    }
}

/// How often a stage gathers layers in a step of so many micro-batches, at least. Weights that are used again soon stay gathered:
/// some around every turn from a forward to a backward and back, and all of chunks that are no longer than that.
pub(super) fn least_of_layers(plan: &Plan, stage: usize, micro_batches: usize) -> usize {
    let reach = reach(plan);
    let chunks = || plan.pipeline.layers.iter().skip(stage).step_by(plan.mesh.pp());
    if plan.sharding.gather == When::Step || chunks().any(|&layers| layers <= reach) {
        return 0;
    }
    2 * micro_batches * chunks().map(|&layers| layers - reach.div_ceil(2)).sum::<usize>()
}

/// Whether a gather for this computation may start from a secondary shard that is there.
fn may_start_from_secondary(sharding: &Sharding, op: Op) -> bool {
    match sharding.secondary_use {
        SecondaryUse::All => true,
        SecondaryUse::Backward => matches!(op.computation(), Some(Computation::Backward(_))),
    }
}

/// Discards the secondary shard of a unit, if it has one, where it was read last.
fn discard(sharding: &Sharding, draft: &mut Draft, unit: Unit, read: Option<(usize, Position)>) {
    if let Some((slot, position)) = read.filter(|_| sharding.secondary > 1) {
        draft.insert(slot, position, Op::Discard { unit });
    }
}

/// Inserts the phases of a gather for slot `index`. Returns where each of them starts.
fn gather(
    draft: &mut Draft,
    unit: Unit,
    index: usize,
    ahead: usize,
    phases: &[Phase],
) -> Vec<(usize, Position)> {
    let gather = |phase| Transfer::Gather { unit, phase };
    let mut starts = Vec::with_capacity(phases.len());
    for (number, &phase) in phases.iter().enumerate() {
        let start = match ahead {
            0 => (index, Position::Before),
            _ => (index.saturating_sub(ahead + phases.len() - 1 - number), Position::Prefetch),
        };
        if let Some(before) = number.checked_sub(1) {
            draft.insert(start.0, start.1, Op::Wait(gather(phases[before])));
        }
        draft.insert(start.0, start.1, Op::Start(gather(phase)));
        starts.push(start);
    }
    if let Some(&phase) = phases.last() {
        draft.insert(index, Position::Before, Op::Wait(gather(phase)));
    }
    starts
}
