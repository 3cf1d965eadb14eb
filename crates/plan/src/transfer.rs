//! Transfers between ranks: collectives over a group, and messages between stages.

use std::fmt;

use kintsugi_spec::{Axis, Group, Span};
use serde::{Deserialize, Serialize};

use crate::{Block, Codes, Unit};

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

/// Where an exchange of matrices sends them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Direction {
    /// To the owners of the layers.
    ToOwners,
    /// Back to the owners of the shards.
    FromOwners,
}

/// Something that ranks transfer. A program starts it with one op and waits for it with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are named after their types")]
pub enum Transfer {
    /// A phase of gathering a unit's sharded weights. After the last phase they are whole.
    Gather { unit: Unit, phase: Phase },
    /// A phase of reducing a unit's gradient: over dp everything, over tp what every tensor-parallel rank holds whole
    /// (under sequence parallelism), and over the tied stages the tied token table. If only the gradient's shard is left,
    /// its wait adds it to this rank's and frees the whole gradient.
    Reduce { unit: Unit, phase: Phase },
    /// A phase of gathering a unit's updated weights from their owners.
    Refresh { unit: Unit, phase: Phase },
    /// An all-to-all of the shards of a round of layers that begins with this unit, between the owners of the layers.
    Exchange { unit: Unit, over: Group, direction: Direction },
    /// A message to another stage. Its wait frees the buffer.
    Send(Message),
    /// A message from another stage. Its start allocates the buffer.
    Receive(Message),
    /// The sum of squared norm and loss over an axis.
    Norm { axis: Axis },
    /// The sampled tokens, which all stages get (generation).
    Share,
    /// A piece of the states that a rank owns, which goes to the next node, and one that comes from the previous node
    /// ([`Plan::replication`](crate::Plan::replication)).
    Replicate { piece: usize },
}

impl Transfer {
    /// The unit whose weights or gradient it transfers.
    #[inline]
    pub fn unit(self) -> Option<Unit> {
        match self {
            Transfer::Gather { unit, .. }
            | Transfer::Reduce { unit, .. }
            | Transfer::Refresh { unit, .. }
            | Transfer::Exchange { unit, .. } => Some(unit),
            Transfer::Send(_)
            | Transfer::Receive(_)
            | Transfer::Norm { .. }
            | Transfer::Share
            | Transfer::Replicate { .. } => None,
        }
    }

    /// The message between stages that it is.
    #[inline]
    pub fn message(self) -> Option<Message> {
        if let Transfer::Send(message) | Transfer::Receive(message) = self { Some(message) } else { None }
    }

    /// The group of the collective that it is; `None` for messages.
    #[inline]
    pub fn group(self) -> Option<Group> {
        match self {
            Transfer::Gather { phase, .. }
            | Transfer::Reduce { phase, .. }
            | Transfer::Refresh { phase, .. } => Some(phase.over),
            Transfer::Exchange { over, .. } => Some(over),
            Transfer::Norm { axis } => Some(Group::Along(axis, Span::All)),
            Transfer::Share => Some(Group::PIPELINE),
            Transfer::Send(_) | Transfer::Receive(_) | Transfer::Replicate { .. } => None,
        }
    }

    /// Whether other stages take part.
    #[inline]
    pub fn crosses_stages(self) -> bool {
        match self.group() {
            Some(Group::Along(axis, _)) => axis == Axis::Pipeline,
            Some(Group::Tied | Group::Nodes) | None => true,
        }
    }

    /// The same transfer of the first layer, micro-batch, stage and piece.
    #[inline]
    pub(crate) fn any_layer(self) -> Transfer {
        let first =
            |message: Message| Message { block: message.block.any_layer(), micro: 0, peer: 0, ..message };
        match self {
            Transfer::Gather { unit, phase } => Transfer::Gather { unit: unit.any_layer(), phase },
            Transfer::Reduce { unit, phase } => Transfer::Reduce { unit: unit.any_layer(), phase },
            Transfer::Refresh { unit, phase } => Transfer::Refresh { unit: unit.any_layer(), phase },
            Transfer::Exchange { unit, over, direction } => {
                Transfer::Exchange { unit: unit.any_layer(), over, direction }
            }
            Transfer::Send(message) => Transfer::Send(first(message)),
            Transfer::Receive(message) => Transfer::Receive(first(message)),
            Transfer::Replicate { .. } => Transfer::Replicate { piece: 0 },
            Transfer::Norm { .. } | Transfer::Share => self,
        }
    }

    /// The words before it in the names of its ops.
    pub(crate) fn verbs(self) -> Verbs {
        let verbs = |start, wait| Verbs { start, wait };
        match self {
            Transfer::Gather { .. } => verbs("gathering ", "gathered "),
            Transfer::Reduce { phase: Phase { kind: PhaseKind::Gather, .. }, .. } => {
                verbs("gathering reduced ", "gathered reduced ")
            }
            Transfer::Reduce { .. } => verbs("reducing ", "reduced "),
            Transfer::Refresh { .. } => verbs("refreshing ", "refreshed "),
            Transfer::Exchange { .. } => verbs("exchanging ", "exchanged "),
            Transfer::Send(_) => verbs("sending ", "sent "),
            Transfer::Receive(_) => verbs("receiving ", "received "),
            Transfer::Norm { .. } => verbs("summing ", ""),
            Transfer::Share => verbs("sharing ", ""),
            Transfer::Replicate { .. } => verbs("copying ", "copied "),
        }
    }
}

/// The words for the start of a transfer and for the wait for it.
pub(crate) struct Verbs {
    pub start: &'static str,
    pub wait: &'static str,
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
        write!(f, "{kind} {}", OverGroup(*self))
    }
}

/// A phase without its kind: its group, and the codes that it carries.
struct OverGroup(Phase);

impl fmt::Display for OverGroup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "over {}", self.0.over)?;
        self.0.codes.map_or(Ok(()), |codes| write!(f, " in {}", codes.integer))
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            Transfer::Gather { unit, phase }
            | Transfer::Reduce { unit, phase }
            | Transfer::Refresh { unit, phase } => write!(f, "{unit} {}", OverGroup(phase)),
            Transfer::Exchange { unit, over, direction } => {
                let to = match direction {
                    Direction::ToOwners => "to their owners",
                    Direction::FromOwners => "back",
                };
                write!(f, "the round from {unit} {to} over {over}")
            }
            Transfer::Send(message) | Transfer::Receive(message) => message.fmt(f),
            Transfer::Norm { axis } => write!(f, "the norm over {}", axis.name()),
            Transfer::Share => f.write_str("the chosen tokens"),
            Transfer::Replicate { piece } => write!(f, "piece {piece} of the states between nodes"),
        }
    }
}
