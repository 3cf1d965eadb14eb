//! From the passes of a schedule to a [`Program`]: each file inserts the ops of one concern.
//!
//! `compute` lowers passes to block computations. Around these, `transfers` inserts the messages between stages,
//! `gather` the gathers of sharded weights, and `reduce` the reductions of gradients. `finish` ends the step. Every
//! insertion is one sweep, so the time is linear in the length of the program. `least` bounds the number of transfers without a
//! program.

mod by_unit;
mod compute;
mod finish;
mod gather;
mod least;
mod reduce;
mod transfers;

use std::ops::Range;

pub(crate) use finish::refresh;

use crate::schedule::{self, Pass};
use crate::{BackwardPart, Block, Computation, Op, Plan, Program, StepOp, Transfer};

/// Where an op is inserted relative to a block computation.
#[derive(Clone, Copy)]
enum Position {
    /// First: a transfer for a later computation starts early.
    Prefetch = 0,
    /// Before it: it needs this.
    Before = 1,
    /// After it: this uses its result.
    After = 3,
}

/// The position of the computation itself.
const COMPUTATION: usize = 2;
const POSITIONS: usize = 4;

/// A pass and its slots.
struct PassSlots {
    pass: Pass,
    slots: Range<usize>,
}

/// A program under construction: a slot for each block computation, and the ops inserted around it.
struct Draft {
    slots: Vec<Op>,
    passes: Vec<PassSlots>,
    /// The inserted ops with their slot and position as one number, in the order of insertion.
    inserted: Vec<(u32, Op)>,
    /// Ops after the last slot.
    tail: Vec<Op>,
}

/// The block whose weights this computation reads.
fn reads_weights(op: Op) -> Option<Block> {
    match op.computation()? {
        Computation::Backward(BackwardPart::Weight) => None,
        Computation::Forward
        | Computation::Evaluate
        | Computation::Decode
        | Computation::Recompute
        | Computation::Backward(BackwardPart::Both | BackwardPart::Input | BackwardPart::Frozen) => {
            op.block()
        }
    }
}

/// The block and micro-batch whose weight gradients this computation adds.
fn writes_gradient(op: Op) -> Option<(Block, usize)> {
    match op {
        Op::Compute {
            kind: Computation::Backward(BackwardPart::Both | BackwardPart::Weight),
            block,
            micro,
        } => Some((block, micro)),
        _ => None,
    }
}

impl Plan {
    /// One training step on a stage.
    pub fn program(&self, stage: usize) -> Program {
        let mut draft = compute::lower(self, self.passes(stage), compute::Mode::Train);
        transfers::insert(self, stage, &mut draft);
        gather::insert(self, stage, &mut draft);
        reduce::insert(self, stage, &mut draft);
        finish::step(self, stage, &mut draft.tail);
        draft.into_program(stage)
    }

    /// The forward of `micro_batches` on a stage, only for the loss, summed over all ranks.
    pub fn evaluation(&self, stage: usize, micro_batches: usize) -> Program {
        let passes =
            schedule::forward_only(self.mesh.pp(), stage, micro_batches, self.pipeline.virtual_stages);
        let mut draft = compute::lower(self, passes, compute::Mode::Evaluate);
        transfers::insert(self, stage, &mut draft);
        gather::insert(self, stage, &mut draft);
        finish::sums(self, &mut draft.tail);
        draft.into_program(stage)
    }

    /// One step of generation on a stage: `micro_batches` of new tokens, and the sampling of the token after each.
    pub fn generation(&self, stage: usize, micro_batches: usize) -> Program {
        let passes =
            schedule::forward_only(self.mesh.pp(), stage, micro_batches, self.pipeline.virtual_stages);
        let mut draft = compute::lower(self, passes, compute::Mode::Generate);
        transfers::insert(self, stage, &mut draft);
        gather::insert(self, stage, &mut draft);
        if self.mesh.pp() > 1 {
            draft.tail.extend(Op::start_and_wait(Transfer::Share));
        }
        draft.into_program(stage)
    }
}

impl Draft {
    fn insert(&mut self, slot: usize, position: Position, op: Op) {
        self.inserted.push(((POSITIONS * slot + position as usize) as u32, op));
    }

    /// Flattens the slots into a list. Ops at the same position keep the order of their insertion.
    fn into_program(self, stage: usize) -> Program {
        let Draft { slots, inserted, tail, .. } = self;
        // The next index for each position: first the counts, then the offsets.
        let mut next = vec![0_u32; POSITIONS * slots.len()];
        for &(position, _) in &inserted {
            next[position as usize] += 1;
        }
        // The order of the ops: the slots are numbered first, then the inserted ops.
        let mut order = vec![0_u32; slots.len() + inserted.len()];
        let mut begin = 0;
        for (slot, positions) in next.chunks_exact_mut(POSITIONS).enumerate() {
            for (position, count) in positions.iter_mut().enumerate() {
                if position == COMPUTATION {
                    order[begin as usize] = slot as u32;
                    begin += 1;
                } else {
                    begin += std::mem::replace(count, begin);
                }
            }
        }
        for (number, &(position, _)) in inserted.iter().enumerate() {
            let at = &mut next[position as usize];
            order[*at as usize] = (slots.len() + number) as u32;
            *at += 1;
        }
        let mut ops = Vec::with_capacity(1 + order.len() + tail.len());
        ops.push(Op::Step(StepOp::Begin));
        ops.extend(order.into_iter().map(|number| {
            let number = number as usize;
            slots.get(number).copied().unwrap_or_else(|| inserted[number - slots.len()].1)
        }));
        ops.extend(tail);
        Program { stage, ops }
    }
}
