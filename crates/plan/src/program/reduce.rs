//! Reductions of gradients: over tp if sequence parallelism leaves partial sums, then over dp, part by part.
//!
//! If gradients are reduced once a step, a unit is reduced after its last write (without overlap: after the last pass).
//! If they are reduced for every micro-batch (ZeRO-2 and -3 with little memory), a unit is reduced to its shard after each
//! micro-batch's last write, and at most one whole gradient is being reduced while the next one is computed. With a
//! split backward, a whole gradient exists from a block's input part, which writes the gradients of its norms, to its
//! weight part. The part of dp beyond the gradient's shards is reduced once a step, after the last of them.
//!
//! With overlap, each phase of a reduction runs beside one computation.

use super::by_unit::ByUnit;
use super::{Draft, Position};
use crate::{GradientReductions, Op, Phase, Plan, Transfer, Unit};

pub(super) fn insert(plan: &Plan, stage: usize, draft: &mut Draft) {
    if plan.mesh.replicas() == 1 && !(plan.sequence_parallel && plan.mesh.tp() > 1) {
        return;
    }
    let reductions = reductions(plan, stage);
    let every_micro = plan.sharding.reduces_every_micro_batch();
    let writes = LastWrites::of(plan, stage, draft, every_micro);
    let mut unfinished = Vec::new();
    for index in 0..draft.slots.len() {
        let Some((block, micro)) = super::writes_gradient(draft.slots[index]) else { continue };
        for unit in plan.trained_units_of(block).filter(|&unit| writes.is_last(index, unit, micro)) {
            let Some(GradientReductions { tensor, inner, outer, .. }) = &reductions[unit] else { continue };
            let outer = if writes.ends[unit] == index { outer.as_slice() } else { &[] };
            let phases = [inner.as_slice(), outer].concat();
            if !plan.pipeline.overlap {
                // A reduction inside the last pass would delay the stage before.
                let at_once: Vec<Phase> = tensor.iter().chain(inner).copied().collect();
                for op in at_once.into_iter().flat_map(|phase| start_and_wait(unit, phase)) {
                    if every_micro {
                        draft.insert(index, Position::After, op);
                    } else {
                        draft.tail.push(op);
                    }
                }
                draft.tail.extend(outer.iter().flat_map(|&phase| start_and_wait(unit, phase)));
                continue;
            }
            // The first phase over dp needs the sums over tp.
            let (before, phases) = match tensor {
                Some(tensor) if phases.is_empty() => (None, vec![*tensor]),
                tensor => (*tensor, phases),
            };
            for op in before.into_iter().flat_map(|phase| start_and_wait(unit, phase)) {
                draft.insert(index, Position::After, op);
            }
            // A whole gradient is waited for soon, because it takes memory.
            let soon = every_micro && outer.is_empty();
            unfinished.extend(overlapped(plan, draft, unit, index, &phases, soon));
        }
    }
    finish(&unfinished, &mut draft.tail);
}

fn start_and_wait(unit: Unit, phase: Phase) -> [Op; 2] {
    Op::start_and_wait(Transfer::Reduce { unit, phase })
}

/// Inserts the phases of a reduction after slot `index`, one beside each of the next computations. If one of these writes the
/// unit again, it waits for all phases. Returns the phases that the last slots leave over: the first one is under way. Unless
/// `soon`, the last phase always is.
fn overlapped(
    plan: &Plan,
    draft: &mut Draft,
    unit: Unit,
    index: usize,
    phases: &[Phase],
    soon: bool,
) -> Option<(Unit, Vec<Phase>)> {
    let &first = phases.first()?;
    draft.insert(index, Position::After, Op::Start(Transfer::Reduce { unit, phase: first }));
    let mut written_again = None;
    for (number, &phase) in phases.iter().enumerate() {
        let slot = written_again.unwrap_or(index + 1 + number);
        let next = phases.get(number + 1);
        let Some(&computation) = draft.slots.get(slot).filter(|_| soon || next.is_some()) else {
            return Some((unit, phases[number..].to_vec()));
        };
        let block = super::writes_gradient(computation).map(|(block, _)| block);
        if block.is_some_and(|block| plan.units_of(block).any(|other| other == unit)) {
            written_again = Some(slot);
        }
        let position = if written_again.is_some() { Position::Before } else { Position::After };
        draft.insert(slot, position, Op::Wait(Transfer::Reduce { unit, phase }));
        if let Some(&phase) = next {
            draft.insert(slot, position, Op::Start(Transfer::Reduce { unit, phase }));
        }
    }
    None
}

/// Finishes reductions after the last slot. All of them run at the same time, phase by phase.
fn finish(unfinished: &[(Unit, Vec<Phase>)], tail: &mut Vec<Op>) {
    let rounds = unfinished.iter().map(|(_, phases)| phases.len()).max().unwrap_or(0);
    for round in 0..rounds {
        for (unit, phases) in unfinished {
            let unit = *unit;
            tail.extend(phases.get(round).map(|&phase| Op::Wait(Transfer::Reduce { unit, phase })));
            tail.extend(phases.get(round + 1).map(|&phase| Op::Start(Transfer::Reduce { unit, phase })));
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
    /// The slot that writes each unit last in the step.
    ends: ByUnit<usize>,
}

impl LastWrites {
    fn of(plan: &Plan, stage: usize, draft: &Draft, every_micro: bool) -> Self {
        let rows = if every_micro { plan.micro_batches() } else { 1 };
        let (mut units, mut end) = (ByUnit::all(plan, 0), 0);
        for unit in plan.trained_units(stage) {
            units[unit] = end;
            end += rows;
        }
        let mut writes = LastWrites { units, rows, slots: vec![0; end], ends: ByUnit::all(plan, 0) };
        for (index, &op) in draft.slots.iter().enumerate() {
            let Some((block, micro)) = super::writes_gradient(op) else { continue };
            for unit in plan.trained_units_of(block) {
                let at = writes.at(unit, micro);
                writes.slots[at] = index;
                writes.ends[unit] = index;
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

/// The reductions of each unit of a stage. Copies of a tied table are reduced at the end of the step.
fn reductions(plan: &Plan, stage: usize) -> ByUnit<Option<GradientReductions>> {
    let mut all = ByUnit::all(plan, None);
    for unit in plan.trained_units(stage) {
        let summed_over_tp = || plan.layout(unit).summed_over_tp(plan.sequence_parallel);
        all[unit] = Some(plan.gradient_reductions(stage, unit, summed_over_tp));
    }
    all
}
