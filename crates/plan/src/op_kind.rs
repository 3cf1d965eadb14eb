//! The kind of an op: the op without the numbers of its layer, micro-batch and peer.

use std::fmt;

use crate::{Block, Op, Unit};

/// Ops of one kind run the same kernels and make the same transfers; only the numbers of their layer, micro-batch and peer
/// differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpKind(Op);

impl OpKind {
    /// An op of this kind: the one whose numbers are zero.
    #[inline]
    pub fn op(self) -> Op {
        self.0
    }
}

impl Op {
    /// The kind of this op. A search asks for it for every op of every strategy.
    #[inline]
    pub fn kind(self) -> OpKind {
        OpKind(match self {
            Op::Load { .. } => Op::Load { micro: 0 },
            Op::Feed { .. } => Op::Feed { micro: 0 },
            Op::Choose { .. } => Op::Choose { micro: 0 },
            Op::Compute { kind, block, .. } => kind.on(block.any_layer(), 0),
            Op::Matrices { kind, unit } => Op::Matrices { kind, unit: unit.any_layer() },
            Op::Release { unit } => Op::Release { unit: unit.any_layer() },
            Op::Discard { unit } => Op::Discard { unit: unit.any_layer() },
            Op::Start(transfer) => Op::Start(transfer.any_layer()),
            Op::Wait(transfer) => Op::Wait(transfer.any_layer()),
            Op::Step(_) => self,
        })
    }
}

impl Block {
    /// The first layer for every layer, and the block itself for others.
    #[inline]
    pub(crate) fn any_layer(self) -> Block {
        if let Block::Layer(_) = self { Block::Layer(0) } else { self }
    }
}

impl Unit {
    /// The first layer for every layer, and the unit itself for others.
    #[must_use]
    #[inline]
    pub fn any_layer(self) -> Unit {
        if let Unit::Layer(_) = self { Unit::Layer(0) } else { self }
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.fmt(f)
    }
}
