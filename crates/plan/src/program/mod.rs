//! From the passes of a schedule to a [`Program`]: each file inserts the ops of one concern.
//!
//! `compute` lowers passes to block computations; around these, `transfers` puts the messages between stages,
//! `gather` the sharded weights and `reduce` the gradients; `finish` ends the step. Every insertion is one sweep, so
//! a program takes time in proportion to its length.

mod compute;
mod finish;
mod gather;
mod reduce;
mod transfers;

use std::ops::Range;

use crate::schedule::{self, Pass};
use crate::{Op, Plan, Program};

/// A block computation and what has been put around it.
struct Slot {
    /// Transfers begun early, for later slots.
    starts: Vec<Op>,
    /// What the computation needs.
    needs: Vec<Op>,
    /// The computation.
    op: Op,
    /// What follows from it.
    then: Vec<Op>,
}

/// A pass and its slots.
struct Stretch {
    pass: Pass,
    slots: Range<usize>,
}

/// A program being made.
struct Draft {
    slots: Vec<Slot>,
    stretches: Vec<Stretch>,
    /// What comes after the last slot.
    tail: Vec<Op>,
}

impl Plan {
    /// One training step on a stage.
    pub fn program(&self, stage: usize) -> Program {
        let mut draft = compute::lower(self, self.passes(stage), compute::Mode::Train);
        transfers::insert(self, stage, &mut draft);
        gather::insert(self, &mut draft);
        reduce::insert(self, stage, &mut draft);
        finish::step(self, stage, &mut draft.tail);
        draft.into_program(stage)
    }

    /// The forward of `micro_batches` on a stage, for the loss alone, summed over all ranks.
    pub fn evaluation(&self, stage: usize, micro_batches: usize) -> Program {
        let passes = schedule::forward_only(self.mesh.pp, stage, micro_batches, self.pipeline.virtual_stages);
        let mut draft = compute::lower(self, passes, compute::Mode::Evaluate);
        transfers::insert(self, stage, &mut draft);
        gather::insert(self, &mut draft);
        finish::sums(self, &mut draft.tail);
        draft.into_program(stage)
    }

    /// One step of generation on a stage: `micro_batches` of new tokens, and the choice of the token after each.
    pub fn generation(&self, stage: usize, micro_batches: usize) -> Program {
        let passes = schedule::forward_only(self.mesh.pp, stage, micro_batches, self.pipeline.virtual_stages);
        let mut draft = compute::lower(self, passes, compute::Mode::Generate);
        transfers::insert(self, stage, &mut draft);
        gather::insert(self, &mut draft);
        if self.mesh.pp > 1 {
            draft.tail.extend([Op::ShareStart, Op::ShareWait]);
        }
        draft.into_program(stage)
    }
}

impl Draft {
    fn into_program(self, stage: usize) -> Program {
        let around = |slot: &Slot| slot.starts.len() + slot.needs.len() + 1 + slot.then.len();
        let len = 1 + self.slots.iter().map(around).sum::<usize>() + self.tail.len();
        let mut ops = Vec::with_capacity(len);
        ops.push(Op::Begin);
        for slot in self.slots {
            ops.extend(slot.starts);
            ops.extend(slot.needs);
            ops.push(slot.op);
            ops.extend(slot.then);
        }
        ops.extend(self.tail);
        Program { stage, ops }
    }
}
