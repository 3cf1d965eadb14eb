//! A training step as a flat graph of timed operations.
//!
//! `compile` turns the programs of all stages into nodes. `period` finds the part that repeats in every period of the
//! schedule, and the short step that has it. `order` merges the nodes of all stages into one order in which every node follows those that it waits for.
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
pub(crate) use period::{Portions, short_step};
