//! The machine: devices, links, and which ranks share which link.

use serde::{Deserialize, Serialize};

use crate::Level;

/// One device (GPU, GCD or CPU rank) as the planner sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Product name.
    pub name: String,
    /// Memory in bytes; `None` where it is whatever the machine has.
    pub memory: Option<u64>,
    /// Peak of the 16-bit matrix units, FLOP/s.
    pub peak_16bit: Option<f64>,
    /// Peak in fp32, FLOP/s.
    pub peak_fp32: Option<f64>,
    /// Memory bandwidth, bytes/s.
    pub memory_bandwidth: Option<f64>,
}

/// The links of one level, as one rank sees them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Which level.
    pub level: Level,
    /// Bytes per second in one direction, per rank.
    pub bandwidth: Option<f64>,
    /// Seconds per message.
    pub latency: Option<f64>,
}

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
