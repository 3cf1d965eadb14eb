//! Pipeline schedules: which chunk each stage runs, forward or backward, on which micro-batch, in which order.
//!
//! A schedule is independent of blocks, transfers and sharding: those ops follow from its passes (see `program`). Every
//! schedule runs the backwards of a chunk in the order of the micro-batches, so all schedules sum gradients in the same
//! order.

mod gpipe;
mod interleaved;
mod one_f_one_b;
mod zero_bubble;

pub use gpipe::gpipe;
pub use interleaved::{forward_only, interleaved};
pub use one_f_one_b::one_f_one_b;
pub use zero_bubble::zero_bubble;

use crate::{Plan, ScheduleKind};

/// One chunk run on one micro-batch. Chunks are numbered over the whole model: chunk `c` is on stage `c mod pp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the fields are named after what they number")]
pub enum Pass {
    /// The forward.
    Forward { chunk: usize, micro: usize },
    /// The whole backward.
    Backward { chunk: usize, micro: usize },
    /// The backward up to the gradient of the chunk's input: B of arXiv 2401.10241.
    BackwardInput { chunk: usize, micro: usize },
    /// The rest of the backward, the gradients of the weights: W of arXiv 2401.10241.
    BackwardWeight { chunk: usize, micro: usize },
}

impl Pass {
    /// The chunk that is run.
    pub fn chunk(self) -> usize {
        match self {
            Pass::Forward { chunk, .. }
            | Pass::Backward { chunk, .. }
            | Pass::BackwardInput { chunk, .. }
            | Pass::BackwardWeight { chunk, .. } => chunk,
        }
    }
}

impl Plan {
    /// The passes of one training step on a stage, in order.
    pub fn passes(&self, stage: usize) -> Vec<Pass> {
        let (pp, micro_batches) = (self.mesh.pp(), self.micro_batches());
        match self.pipeline.schedule {
            ScheduleKind::GPipe => gpipe(stage, micro_batches),
            ScheduleKind::OneForwardOneBackward => one_f_one_b(pp, stage, micro_batches),
            ScheduleKind::Interleaved => interleaved(pp, stage, micro_batches, self.pipeline.virtual_stages),
            ScheduleKind::ZeroBubble => zero_bubble(pp, stage, micro_batches),
        }
    }
}
