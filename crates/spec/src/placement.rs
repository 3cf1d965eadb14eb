//! Where ranks are: the nodes of a run, their pods, and the level of links between two ranks.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Level, Topology};

/// The nodes of a run in the order of its ranks, and the pod of each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// The name of each node.
    pub nodes: Vec<String>,
    /// The name of its pod.
    pub pods: Vec<String>,
}

/// Which ranks share a package, a node and a pod. Without a placement, pods are those of the topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    topology: Topology,
    /// The number of each node's pod, if nodes were chosen.
    pods: Option<Arc<[usize]>>,
}

impl From<Topology> for Places {
    fn from(topology: Topology) -> Self {
        Places { topology, pods: None }
    }
}

impl Places {
    /// The places of a topology's ranks on the nodes of a placement.
    pub fn new(topology: Topology, placement: Option<&Placement>) -> Self {
        let number = |placement: &Placement| {
            let mut numbers = BTreeMap::new();
            let mut number = |pod| {
                let next = numbers.len();
                *numbers.entry(pod).or_insert(next)
            };
            placement.pods.iter().map(|pod| number(pod.as_str())).collect()
        };
        Places { topology, pods: placement.map(number) }
    }

    /// The topology that they have without a placement.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// Whether nodes were chosen.
    pub fn is_placed(&self) -> bool {
        self.pods.is_some()
    }

    /// Whether some links between nodes are those of pods.
    pub fn has_pods(&self) -> bool {
        self.is_placed() || self.topology.nodes_per_pod.is_some()
    }

    /// The number of a rank's pod, package or node.
    pub fn unit(&self, level: Level, rank: usize) -> usize {
        match (level, &self.pods) {
            (Level::Pod, Some(pods)) => {
                let node = self.topology.unit(Level::Node, rank);
                // A rank beyond the nodes is in a pod of its own.
                pods.get(node).copied().unwrap_or(pods.len() + node)
            }
            (Level::Package | Level::Node | Level::Pod | Level::Cluster, _) => {
                self.topology.unit(level, rank)
            }
        }
    }

    /// The innermost level that contains both ranks.
    pub fn level(&self, a: usize, b: usize) -> Level {
        let joins = |level: &Level| self.unit(*level, a) == self.unit(*level, b);
        Level::ALL.into_iter().find(joins).expect("the cluster contains all ranks")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_nodes_have_their_own_pods() {
        let topology = Topology { per_package: 1, per_node: Some(2), nodes_per_pod: Some(2) };
        let pods = ["a", "b", "a"].map(str::to_owned).to_vec();
        let nodes = ["n1", "n7", "n2"].map(str::to_owned).to_vec();
        let placed = Places::new(topology, Some(&Placement { nodes, pods }));
        let plain = Places::from(topology);
        let levels = |places: &Places| [(0, 1), (0, 2), (0, 4), (2, 4)].map(|(a, b)| places.level(a, b));
        assert_eq!(levels(&plain), [Level::Node, Level::Pod, Level::Cluster, Level::Cluster]);
        assert_eq!(levels(&placed), [Level::Node, Level::Cluster, Level::Pod, Level::Cluster]);
        let no_pods = Places::from(Topology { nodes_per_pod: None, ..topology });
        assert_eq!(levels(&no_pods), [Level::Node, Level::Cluster, Level::Cluster, Level::Cluster]);
    }
}
