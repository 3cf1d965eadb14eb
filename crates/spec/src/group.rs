//! Groups of ranks that communicate: what names them.

use std::fmt;
use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize};

use crate::Level;

/// An axis of the mesh of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Axis {
    /// Stages of the pipeline.
    Pipeline,
    /// Data-parallel replicas, which see different samples.
    Data,
    /// Context-parallel ranks, which see different slices of the same samples.
    Context,
    /// Tensor-parallel parts of every matrix.
    Tensor,
}

/// A value for each axis.
pub type ByAxis<T> = [T; Axis::ALL.len()];

impl<T> Index<Axis> for ByAxis<T> {
    type Output = T;

    fn index(&self, axis: Axis) -> &T {
        &self[axis as usize]
    }
}

impl<T> IndexMut<Axis> for ByAxis<T> {
    fn index_mut(&mut self, axis: Axis) -> &mut T {
        &mut self[axis as usize]
    }
}

impl Axis {
    /// Every axis, outermost first. The ranks of an inner axis are closer together, so it has the faster links.
    pub const ALL: [Axis; 4] = [Axis::Pipeline, Axis::Data, Axis::Context, Axis::Tensor];

    /// The name used in configurations and outputs.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Pipeline => "pp",
            Axis::Data => "dp",
            Axis::Context => "cp",
            Axis::Tensor => "tp",
        }
    }
}

/// How far a group reaches along its axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Span {
    /// All ranks of the axis.
    All,
    /// The ranks inside one package, node or pod.
    Inside(Level),
    /// One rank of every package, node or pod: those at the same place in it.
    Across(Level),
    /// One rank of every inner unit inside one outer unit, as in "one rank of every package of a node".
    Between(Level, Level),
}

/// A group of ranks. Ranks with the same group and the same members exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Group {
    /// The ranks that differ along one axis only, within a span. Context-parallel ranks hold the same parameters as those of
    /// dp, so a group along [`Axis::Data`] has the ranks of both axes: the replicas of the parameters.
    Along(Axis, Span),
    /// The first and the last stage, which hold copies of the tied token table.
    Tied,
    /// The ranks at the same place of all nodes, whatever their stage: a ring in which copies of states travel.
    Nodes,
}

impl Group {
    /// The tensor-parallel group: ranks that hold parts of the same matrices.
    pub const TENSOR: Group = Group::Along(Axis::Tensor, Span::All);
    /// The data-parallel group: ranks that hold the same parameters and read different tokens.
    pub const DATA: Group = Group::Along(Axis::Data, Span::All);
    /// The context-parallel group: ranks that hold slices of the same samples.
    pub const CONTEXT: Group = Group::Along(Axis::Context, Span::All);
    /// The stages of one pipeline.
    pub const PIPELINE: Group = Group::Along(Axis::Pipeline, Span::All);
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Group::Along(axis, Span::All) => f.write_str(axis.name()),
            Group::Along(axis, Span::Inside(level)) => write!(f, "{} inside a {}", axis.name(), level.name()),
            Group::Along(axis, Span::Across(level)) => write!(f, "{} across {}s", axis.name(), level.name()),
            Group::Along(axis, Span::Between(inner, outer)) => {
                write!(f, "{} across {}s inside a {}", axis.name(), inner.name(), outer.name())
            }
            Group::Tied => f.write_str("tied stages"),
            Group::Nodes => f.write_str("nodes"),
        }
    }
}
