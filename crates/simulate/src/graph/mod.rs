//! A training step as a flat graph of timed operations.
//!
//! `compile` turns the programs of all stages into nodes. `period` finds the part that repeats in every period of the
//! schedule. `order` merges the nodes of all stages into one order in which every node follows those that it waits for.
//! `evaluate` computes when each node begins and ends. The dependencies do not depend on costs, so one graph serves all
//! plans that run the same programs.

mod compile;
mod evaluate;
mod order;
mod period;
mod prices;

pub(crate) use compile::{Extent, Rows};
pub(crate) use evaluate::{Account, NodeSpan, Spans, evaluate, spans};
pub(crate) use order::Graph;

use kintsugi_plan::StepOp;

/// A timed operation of one stage. An op is one or more nodes: a block may start and await transfers between its
/// kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    /// Runs the ops of a row back to back.
    Run(u16),
    /// Runs an op whose cost depends on everything that the stage holds.
    RunStep(StepOp),
    /// Starts a stage's own transfer. Its end is stored in a slot.
    Start { cost: u16, slot: u32 },
    /// Waits for that transfer.
    Wait { cost: u16, slot: u32 },
    /// Starts sending a message.
    Send { rendezvous: Rendezvous, first: bool },
    /// This side is ready: to receive a message, or for a transfer between stages.
    Join { rendezvous: Rendezvous, first: bool },
    /// Waits until all sides are ready and the data has arrived.
    Arrive { rendezvous: Rendezvous, last: bool },
}

/// A point at which several stages meet: a message between two, the sum of a tied table, a sum over all stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rendezvous {
    /// The activations into chunk `c` have channel `c`. The gradients and the joint operations of a step follow.
    channel: u16,
    /// Distinguishes the messages of a channel.
    micro: u32,
}

/// A node, and the op of the stage's program to which it belongs. A row of several ops has the number of its first op.
#[derive(Clone, Copy, Debug)]
struct Step {
    node: Node,
    op: u32,
}

impl Node {
    /// The same node for a micro-batch that comes `by` later.
    fn later(self, by: u32) -> Node {
        let shift = |at: Rendezvous| Rendezvous { micro: at.micro + by, ..at };
        match self {
            Node::Send { rendezvous, first } => Node::Send { rendezvous: shift(rendezvous), first },
            Node::Join { rendezvous, first } => Node::Join { rendezvous: shift(rendezvous), first },
            Node::Arrive { rendezvous, last } => Node::Arrive { rendezvous: shift(rendezvous), last },
            Node::Run(_) | Node::RunStep(_) | Node::Start { .. } | Node::Wait { .. } => self,
        }
    }
}
