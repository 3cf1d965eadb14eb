//! The levels of links in a machine, from the fastest to the slowest.

use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize};

/// A level of links. Two ranks are connected by the innermost level that contains both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Dies of one package (on Frontier: the two GCDs of an MI250X).
    Package,
    /// Devices of one node.
    Node,
    /// Nodes of one pod: a leaf switch, a rail group, a dragonfly group.
    Pod,
    /// Nodes of the cluster.
    Cluster,
}

/// A value for each level.
pub type ByLevel<T> = [T; Level::ALL.len()];

impl<T> Index<Level> for ByLevel<T> {
    type Output = T;

    fn index(&self, level: Level) -> &T {
        &self[level as usize]
    }
}

impl<T> IndexMut<Level> for ByLevel<T> {
    fn index_mut(&mut self, level: Level) -> &mut T {
        &mut self[level as usize]
    }
}

impl Level {
    /// Every level, innermost first.
    pub const ALL: [Level; 4] = [Level::Package, Level::Node, Level::Pod, Level::Cluster];

    /// The name used in configurations and outputs.
    pub fn name(self) -> &'static str {
        match self {
            Level::Package => "package",
            Level::Node => "node",
            Level::Pod => "pod",
            Level::Cluster => "cluster",
        }
    }
}
