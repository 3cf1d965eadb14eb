//! Programs as data: the ordered operations of one step on one stage.
//!
//! Every rank of a stage runs the same program. Every transfer between ranks is two ops, start and wait, so overlap
//! is visible in the program. The tensor-parallel collectives inside a block are not ops: they come from the layers.

use std::fmt;

use kintsugi_spec::{Axis, Group};
use serde::{Deserialize, Serialize};

use crate::Codes;

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
}

/// What a message between stages carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MessageKind {
    /// The input of `block`, from the stage before.
    Activation,
    /// The gradient of `block`'s output, from the stage after.
    Gradient,
}

/// A message between stages. Both ends name it by the receiving block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Message {
    /// What it carries.
    pub kind: MessageKind,
    /// The block on the receiving stage that uses it.
    pub block: Block,
    /// Micro-batch.
    pub micro: usize,
    /// The other stage.
    pub peer: usize,
}

/// One collective of a transfer. A transfer level by level has several, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Phase {
    /// The group.
    pub over: Group,
    /// What it does.
    pub kind: PhaseKind,
    /// The codes that it carries instead of numbers of the tensor's type.
    pub codes: Option<Codes>,
}

impl Phase {
    /// A phase that carries numbers of the tensor's type.
    pub fn plain(over: Group, kind: PhaseKind) -> Self {
        Phase { over, kind, codes: None }
    }
}

/// What a phase does with the piece that the ranks of its group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PhaseKind {
    /// Every rank gets the pieces of all: an all-gather.
    Gather,
    /// Every rank gets its own piece of the sum: a reduce-scatter, or an all-to-all of codes.
    Scatter,
    /// Every rank gets the sum: an all-reduce.
    Sum,
}

/// One operation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named after their types")]
pub enum Op {
    /// Clears the sums of the step (loss, squared norm).
    Begin,
    /// Uploads a micro-batch's tokens (for the embedding), targets (for the head) and, if documents are masked, document
    /// starts (for every layer).
    Load { micro: usize },
    /// Runs a block and saves the activations for its backward, or only its input with full recomputation.
    Forward { block: Block, micro: usize },
    /// Runs a block and saves nothing (evaluation).
    Evaluate { block: Block, micro: usize },
    /// Uploads a micro-batch's new tokens and their positions (generation).
    Feed { micro: usize },
    /// Runs a block on new tokens, with the KV cache of the earlier ones.
    Decode { block: Block, micro: usize },
    /// Samples the next token of each sample of a micro-batch from the head's logits.
    Choose { micro: usize },
    /// Starts sharing the sampled tokens with all stages.
    ShareStart,
    /// Waits until all stages have the sampled tokens.
    ShareWait,
    /// Runs a layer again from its saved input, before its backward.
    Recompute { block: Block, micro: usize },
    /// Runs a block's backward, or a part of it.
    Backward { block: Block, micro: usize, part: BackwardPart },
    /// Starts a phase of gathering a unit's sharded weights.
    GatherStart { unit: Unit, phase: Phase },
    /// Waits for the gathered piece, which after the last phase is the whole.
    GatherWait { unit: Unit, phase: Phase },
    /// Frees the gathered weights; the shard stays.
    Release { unit: Unit },
    /// Frees the secondary shard of a unit's weights.
    Discard { unit: Unit },
    /// Starts a phase of reducing a unit's gradient: over dp everything, over tp what every tensor-parallel rank holds
    /// whole (under sequence parallelism), and over the tied stages the tied token table.
    ReduceStart { unit: Unit, phase: Phase },
    /// Waits for the reduction. If only the gradient's shard is left, adds it to this rank's and frees the whole gradient.
    ReduceWait { unit: Unit, phase: Phase },
    /// Starts sending to another stage.
    SendStart { message: Message },
    /// Waits until the message is received, and frees it.
    SendWait { message: Message },
    /// Allocates a buffer for a message and starts receiving it.
    ReceiveStart { message: Message },
    /// Waits for the message.
    ReceiveWait { message: Message },
    /// Sums the squares of the gradients that this rank owns.
    Measure,
    /// Starts summing squared norm and loss over an axis.
    NormStart { axis: Axis },
    /// Waits for the sums.
    NormWait { axis: Axis },
    /// Computes clip factor, loss scale and learning rate from the global norm, and whether to skip the update.
    Clip,
    /// Updates this rank's states and weights.
    Step,
    /// Starts a phase of gathering a unit's updated weights from their owners.
    RefreshStart { unit: Unit, phase: Phase },
    /// Waits for the updated weights.
    RefreshWait { unit: Unit, phase: Phase },
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

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let what = match self.kind {
            MessageKind::Activation => "input of",
            MessageKind::Gradient => "output gradient of",
        };
        write!(f, "{what} {}, micro-batch {}, stage {}", self.block, self.micro, self.peer)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let kind = match self.kind {
            PhaseKind::Gather => "gather",
            PhaseKind::Scatter => "scatter",
            PhaseKind::Sum => "sum",
        };
        write!(f, "{kind} {}", Way(*self))
    }
}

/// The way of a phase: its group, and the codes that it carries.
struct Way(Phase);

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "over {}", self.0.over)?;
        self.0.codes.map_or(Ok(()), |codes| write!(f, " in {}", codes.integer))
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Op::Begin => f.write_str("begin"),
            Op::Load { micro } => write!(f, "load micro-batch {micro}"),
            Op::Forward { block, micro } => write!(f, "forward {block}, micro-batch {micro}"),
            Op::Evaluate { block, micro } => write!(f, "evaluate {block}, micro-batch {micro}"),
            Op::Feed { micro } => write!(f, "feed micro-batch {micro}"),
            Op::Decode { block, micro } => write!(f, "decode {block}, micro-batch {micro}"),
            Op::Choose { micro } => write!(f, "choose the next tokens of micro-batch {micro}"),
            Op::ShareStart => f.write_str("start sharing the chosen tokens"),
            Op::ShareWait => f.write_str("wait for the chosen tokens"),
            Op::Recompute { block, micro } => write!(f, "recompute {block}, micro-batch {micro}"),
            Op::Backward { block, micro, part } => {
                let part = match part {
                    BackwardPart::Both => "backward",
                    BackwardPart::Input => "backward-input",
                    BackwardPart::Weight => "backward-weight",
                };
                write!(f, "{part} {block}, micro-batch {micro}")
            }
            Op::GatherStart { unit, phase } => write!(f, "start gathering {unit} {}", Way(*phase)),
            Op::GatherWait { unit, phase } => write!(f, "wait for gathered {unit} {}", Way(*phase)),
            Op::Release { unit } => write!(f, "release {unit}"),
            Op::Discard { unit } => write!(f, "discard the secondary shard of {unit}"),
            Op::ReduceStart { unit, phase: Phase { over, kind: PhaseKind::Gather, .. } } => {
                write!(f, "start gathering reduced {unit} over {over}")
            }
            Op::ReduceWait { unit, phase: Phase { over, kind: PhaseKind::Gather, .. } } => {
                write!(f, "wait for gathered reduced {unit} over {over}")
            }
            Op::ReduceStart { unit, phase } => write!(f, "start reducing {unit} {}", Way(*phase)),
            Op::ReduceWait { unit, phase } => write!(f, "wait for reduced {unit} {}", Way(*phase)),
            Op::SendStart { message } => write!(f, "start sending {message}"),
            Op::SendWait { message } => write!(f, "wait for sent {message}"),
            Op::ReceiveStart { message } => write!(f, "start receiving {message}"),
            Op::ReceiveWait { message } => write!(f, "wait for received {message}"),
            Op::Measure => f.write_str("measure gradients"),
            Op::NormStart { axis } => write!(f, "start summing the norm over {}", axis.name()),
            Op::NormWait { axis } => write!(f, "wait for the norm over {}", axis.name()),
            Op::Clip => f.write_str("clip"),
            Op::Step => f.write_str("step"),
            Op::RefreshStart { unit, phase } => write!(f, "start refreshing {unit} {}", Way(*phase)),
            Op::RefreshWait { unit, phase } => write!(f, "wait for refreshed {unit} {}", Way(*phase)),
        }
    }
}
