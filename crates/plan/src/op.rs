//! Programs as data: the ordered operations of one step on one stage.
//!
//! Every rank of a stage runs the same program. Every transfer between ranks is two ops, start and wait, so overlap
//! is visible in the program. The tensor-parallel collectives inside a block are not ops: they come from the layers.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Transfer;

/// A unit of computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Block {
    /// Maps tokens to the residual stream.
    Embedding,
    /// Transformer layer.
    Layer(usize),
    /// Final norm, output matrix and loss.
    Head,
}

/// Parameters that are gathered, reduced and updated together, in one flat buffer.
///
/// The token table is a unit of its own. If embedding and head are tied across stages, both hold it with the same layout, so
/// their gradient shards match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Unit {
    /// The token table; also the output matrix of a tied model.
    Table,
    /// Learned positions.
    Positions,
    /// The parameters of one layer.
    Layer(usize),
    /// Final norm, and the output matrix of an untied model.
    Head,
}

/// Which part of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BackwardPart {
    /// Input and weight gradients in one.
    Both,
    /// Only the gradient of the input. Saves what the weight part needs.
    Input,
    /// Only the gradients of the weights, from what the input part saved.
    Weight,
    /// Only the gradient of the input, because the weights are frozen. Saves nothing.
    Frozen,
}

/// What a computation does with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Computation {
    /// Runs it and saves the activations for its backward, or only its input with full recomputation.
    Forward,
    /// Runs it and saves nothing: in an evaluation, or if no backward follows.
    Evaluate,
    /// Runs it on new tokens, with the KV cache of the earlier ones (generation).
    Decode,
    /// Runs a layer again from its saved input, before its backward.
    Recompute,
    /// Runs its backward, or a part of it.
    Backward(BackwardPart),
}

impl Computation {
    /// The op that runs this on a block and a micro-batch.
    pub fn on(self, block: Block, micro: usize) -> Op {
        Op::Compute { kind: self, block, micro }
    }
}

/// What a stage does once a step with everything that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StepOp {
    /// Clears the sums of the step (loss, squared norm).
    Begin,
    /// Sums the squares of the gradients that this rank owns.
    Measure,
    /// Computes clip factor, loss scale and learning rate from the global norm, and whether to skip the update.
    Clip,
    /// Updates this rank's states and weights element by element.
    Update,
    /// Adds this rank's weights to their moving average.
    Average,
}

impl StepOp {
    /// All of them, in the order of a step.
    pub const ALL: [StepOp; 5] =
        [StepOp::Begin, StepOp::Measure, StepOp::Clip, StepOp::Update, StepOp::Average];
}

/// What a rank does with the matrices of a round of layers, one for each owner ([`Plan::matrix_rounds`](crate::Plan::rounds)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MatrixOp {
    /// Allocates the buffer of a round.
    Begin,
    /// Adds the gradient of a layer to the momentum, and writes the direction in which the shard would move.
    Collect,
    /// Replaces the directions of the layer that it owns by orthogonal matrices.
    Orthogonalize,
    /// Moves its shard of a layer.
    Apply,
    /// Frees the buffer.
    End,
}

/// One operation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named after their types")]
pub enum Op {
    /// Runs once a step.
    Step(StepOp),
    /// Uploads a micro-batch's tokens (for the embedding), targets (for the head) and, if documents are masked, document
    /// starts (for every layer).
    Load { micro: usize },
    /// Uploads a micro-batch's new tokens and their positions (generation).
    Feed { micro: usize },
    /// Samples the next token of each sample of a micro-batch from the head's logits (generation).
    Choose { micro: usize },
    /// Computes a block on a micro-batch.
    Compute { kind: Computation, block: Block, micro: usize },
    /// Works on the matrices of this layer, or of the round of layers that begins with it.
    Matrices { kind: MatrixOp, unit: Unit },
    /// Frees the gathered weights; the shard stays.
    Release { unit: Unit },
    /// Frees the secondary shard of a unit's weights.
    Discard { unit: Unit },
    /// Starts a transfer. It runs beside the ops up to its wait.
    Start(Transfer),
    /// Waits for a transfer.
    Wait(Transfer),
}

impl Op {
    /// Starts a transfer and waits for it at once.
    pub fn start_and_wait(transfer: Transfer) -> [Op; 2] {
        [Op::Start(transfer), Op::Wait(transfer)]
    }

    /// What it computes.
    #[inline]
    pub fn computation(self) -> Option<Computation> {
        if let Op::Compute { kind, .. } = self { Some(kind) } else { None }
    }

    /// The block that it computes.
    #[inline]
    pub fn block(self) -> Option<Block> {
        if let Op::Compute { block, .. } = self { Some(block) } else { None }
    }

    /// The micro-batch that it works on, or whose message it transfers.
    #[inline]
    pub fn micro(self) -> Option<usize> {
        match self {
            Op::Load { micro } | Op::Feed { micro } | Op::Choose { micro } | Op::Compute { micro, .. } => {
                Some(micro)
            }
            Op::Start(transfer) | Op::Wait(transfer) => transfer.message().map(|message| message.micro),
            Op::Step(_) | Op::Matrices { .. } | Op::Release { .. } | Op::Discard { .. } => None,
        }
    }

    /// The unit whose weights or gradient it transfers, updates or frees.
    #[inline]
    pub fn unit(self) -> Option<Unit> {
        match self {
            Op::Matrices { unit, .. } | Op::Release { unit } | Op::Discard { unit } => Some(unit),
            Op::Start(transfer) | Op::Wait(transfer) => transfer.unit(),
            Op::Step(_) | Op::Load { .. } | Op::Feed { .. } | Op::Choose { .. } | Op::Compute { .. } => None,
        }
    }

    /// The transfer that it starts or waits for.
    #[inline]
    pub fn transfer(self) -> Option<Transfer> {
        if let Op::Start(transfer) | Op::Wait(transfer) = self { Some(transfer) } else { None }
    }
}

/// The operations of one step on every rank of one stage, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The stage.
    pub stage: usize,
    /// Its operations.
    pub ops: Vec<Op>,
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Block::Embedding => f.write_str("embedding"),
            Block::Layer(i) => write!(f, "layer {i}"),
            Block::Head => f.write_str("head"),
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Unit::Table => f.write_str("table"),
            Unit::Positions => f.write_str("positions"),
            Unit::Layer(i) => write!(f, "layer.{i}"),
            Unit::Head => f.write_str("head"),
        }
    }
}

impl fmt::Display for Computation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Computation::Forward => "forward",
            Computation::Evaluate => "evaluate",
            Computation::Decode => "decode",
            Computation::Recompute => "recompute",
            Computation::Backward(BackwardPart::Both) => "backward",
            Computation::Backward(BackwardPart::Input) => "backward-input",
            Computation::Backward(BackwardPart::Weight) => "backward-weight",
            Computation::Backward(BackwardPart::Frozen) => "backward-frozen",
        })
    }
}

impl fmt::Display for StepOp {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            StepOp::Begin => "begin",
            StepOp::Measure => "measure gradients",
            StepOp::Clip => "clip",
            StepOp::Update => "step",
            StepOp::Average => "average weights",
        })
    }
}

impl fmt::Display for MatrixOp {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            MatrixOp::Begin => "begin the round from",
            MatrixOp::Collect => "collect the directions of",
            MatrixOp::Orthogonalize => "orthogonalize a layer of the round from",
            MatrixOp::Apply => "update the matrices of",
            MatrixOp::End => "end the round from",
        })
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Op::Step(op) => op.fmt(f),
            Op::Load { micro } => write!(f, "load micro-batch {micro}"),
            Op::Feed { micro } => write!(f, "feed micro-batch {micro}"),
            Op::Choose { micro } => write!(f, "choose the next tokens of micro-batch {micro}"),
            Op::Compute { kind, block, micro } => write!(f, "{kind} {block}, micro-batch {micro}"),
            Op::Matrices { kind, unit } => write!(f, "{kind} {unit}"),
            Op::Release { unit } => write!(f, "release {unit}"),
            Op::Discard { unit } => write!(f, "discard the secondary shard of {unit}"),
            Op::Start(transfer) => write!(f, "start {}{transfer}", transfer.verbs().start),
            Op::Wait(transfer) => write!(f, "wait for {}{transfer}", transfer.verbs().wait),
        }
    }
}
