//! The machine: devices, links, and which ranks share which link.

use serde::{Deserialize, Serialize};

use crate::{DeviceSpec, Level, LinkSpec, Wire};

/// A cluster: its nodes, its devices and its links.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClusterSpec {
    /// The preset it came from, or `"custom"`.
    pub name: String,
    /// Who sits next to whom.
    pub topology: Topology,
    /// Number of nodes there are; `None` for as many as asked.
    pub nodes: Option<usize>,
    /// The device of every rank.
    pub device: DeviceSpec,
    /// Links, innermost level first.
    pub links: Vec<LinkSpec>,
    /// The links inside a node one by one, where two ranks of it are not joined like any other two.
    pub graph: Vec<Wire>,
    /// Cores of a node that its ranks share, where ranks are threads of a CPU; `None` where each has a device.
    pub cores: Option<usize>,
    /// Money for one rank and one hour.
    pub price: Option<f64>,
}

impl ClusterSpec {
    /// The links of a level, if anything is known of them.
    pub fn link(&self, level: Level) -> Option<&LinkSpec> {
        self.links.iter().find(|link| link.level == level)
    }
}

/// Which ranks share a package and a node: enough to tell the level between any two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Ranks in one package; 1 where packages do not matter.
    pub per_package: usize,
    /// Ranks in one node; `None` when every rank is in one node.
    pub per_node: Option<usize>,
}

impl Topology {
    /// Every rank in one node: a laptop, a workstation, ranks as threads.
    pub const ONE_NODE: Topology = Topology { per_package: 1, per_node: None };

    /// The package, node or cluster that contains a rank, by its number.
    pub fn unit(&self, level: Level, rank: usize) -> usize {
        match level {
            Level::Package => rank / self.per_package,
            Level::Node => self.per_node.map_or(0, |n| rank / n),
            Level::Cluster => 0,
        }
    }

    /// The innermost level that holds both ranks.
    pub fn level(&self, a: usize, b: usize) -> Level {
        if a / self.per_package == b / self.per_package {
            Level::Package
        } else if self.per_node.is_none_or(|n| a / n == b / n) {
            Level::Node
        } else {
            Level::Cluster
        }
    }
}
