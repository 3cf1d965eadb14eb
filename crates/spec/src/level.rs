//! The levels of links in a machine, from the fastest to the slowest.

use serde::{Deserialize, Serialize};

/// A level of links. Two ranks are connected by the innermost level that contains both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Dies of one package (on Frontier: the two GCDs of an MI250X).
    Package,
    /// Devices of one node.
    Node,
    /// Nodes of the cluster.
    Cluster,
}

impl Level {
    /// Every level, innermost first.
    pub const ALL: [Level; 3] = [Level::Package, Level::Node, Level::Cluster];

    /// The name used in configurations and outputs.
    pub fn name(self) -> &'static str {
        match self {
            Level::Package => "package",
            Level::Node => "node",
            Level::Cluster => "cluster",
        }
    }
}
