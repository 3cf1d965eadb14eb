//! The machine: devices, links, and which ranks share which link.

use serde::{Deserialize, Serialize};

use crate::{DeviceSpec, EmulatedLinks, Level, LinkSpec, Placement, Places, Wire};

/// A cluster: its nodes, its devices and its links.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClusterSpec {
    /// The preset's name, or `"custom"`.
    pub name: String,
    /// Which ranks share a package, a node or a pod.
    pub topology: Topology,
    /// Number of nodes; `None` if it is unlimited.
    pub nodes: Option<usize>,
    /// The device of every rank.
    pub device: DeviceSpec,
    /// Links, innermost level first.
    pub links: Vec<LinkSpec>,
    /// The wires inside a node, if not all pairs of its ranks have the same link.
    pub graph: Vec<Wire>,
    /// Links whose speed the transfers of a run on CPUs are slowed down to.
    pub emulated: EmulatedLinks,
    /// Cores of a machine that its ranks share, if ranks are threads of a CPU; `None` if each rank has its own device.
    pub cores: Option<usize>,
    /// Price of one rank for one hour.
    pub price: Option<f64>,
    /// The nodes of the run, if they were chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

impl ClusterSpec {
    /// The links of a level, if they are described.
    pub fn link(&self, level: Level) -> Option<&LinkSpec> {
        self.links.iter().find(|link| link.level == level)
    }

    /// Where the ranks are.
    pub fn places(&self) -> Places {
        Places::new(self.topology, self.placement.as_ref())
    }

    /// The same cluster with chosen nodes. Their pods have the links of the cluster unless pods are described.
    #[must_use]
    pub fn placed(&self, placement: Placement) -> ClusterSpec {
        let mut cluster = ClusterSpec { placement: Some(placement), ..self.clone() };
        if cluster.link(Level::Pod).is_none()
            && let Some(outer) = cluster.link(Level::Cluster)
        {
            let link = LinkSpec { level: Level::Pod, ..outer.clone() };
            cluster.links.push(link);
        }
        cluster
    }

    /// How many of `ranks` ranks share the cores of a machine: those of a node, or all of them if links between nodes are emulated.
    /// One machine runs all nodes then.
    pub fn ranks_of_machine(&self, ranks: usize) -> usize {
        let one_machine = [Level::Pod, Level::Cluster].iter().any(|&level| self.emulated[level].is_some());
        self.topology.per_node.filter(|_| !one_machine).map_or(ranks, |n| n.min(ranks))
    }
}

/// How many ranks share a package, a node and a pod. This decides the level between any two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Ranks in one package; 1 if packages do not matter.
    pub per_package: usize,
    /// Ranks in one node; `None` if all ranks are in one node.
    pub per_node: Option<usize>,
    /// Nodes in one pod; `None` if there are no pods, and the same links between all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes_per_pod: Option<usize>,
}

impl Topology {
    /// Every rank in one node: a laptop, a workstation, ranks as threads.
    pub const ONE_NODE: Topology = Topology { per_package: 1, per_node: None, nodes_per_pod: None };

    /// Ranks in one package, node, pod or cluster; `None` if it contains all. Without pods every node is one of its own.
    pub fn ranks_inside(&self, level: Level) -> Option<usize> {
        match level {
            Level::Package => Some(self.per_package),
            Level::Node => self.per_node,
            Level::Pod => self.per_node.map(|ranks| ranks * self.nodes_per_pod.unwrap_or(1)),
            Level::Cluster => None,
        }
    }

    /// The package, node, pod or cluster that contains a rank, by its number.
    pub fn unit(&self, level: Level, rank: usize) -> usize {
        self.ranks_inside(level).map_or(0, |ranks| rank / ranks)
    }

    /// The innermost level that contains both ranks.
    pub fn level(&self, a: usize, b: usize) -> Level {
        let joins = |level: &Level| self.unit(*level, a) == self.unit(*level, b);
        Level::ALL.into_iter().find(joins).expect("the cluster contains all ranks")
    }
}
