//! How long collectives and messages take: by the level they cross, what they share, and the better algorithm.
//!
//! Inside a node a group's bandwidth is that of its thinnest cut; between nodes it is that of the adapters of its
//! ranks in one node, which other groups of the node leave to it. Rings send the fewest bytes, trees take the
//! fewest steps; both are hierarchical, one step for each rank of a node and one for each node.

use kintsugi_comm::Collective;
use kintsugi_plan::{Coordinate, Mesh};
use kintsugi_spec::{ClusterSpec, Level, LinkSpec, Topology};

/// The links of a cluster under a mesh.
#[derive(Clone, Debug)]
pub struct Links {
    topology: Topology,
    mesh: Mesh,
    levels: [Speed; 3],
    tensor: Group,
    data: Group,
    tied: Group,
    pipeline: Group,
}

/// What a level's links reach.
#[derive(Clone, Copy, Debug)]
struct Speed {
    bandwidth: f64,
    latency: f64,
    start: f64,
}

/// A group of ranks as its slowest member sees it.
#[derive(Clone, Copy, Debug)]
struct Group {
    ranks: usize,
    nodes: usize,
    level: Level,
    bandwidth: f64,
}

/// Which ranks a collective is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Among {
    /// The parts of every matrix.
    Tensor,
    /// The replicas.
    Data,
    /// The stages.
    Pipeline,
    /// First and last stage.
    Tied,
}

impl Links {
    /// The links of a cluster; what is not known of them is taken as it is on common machines.
    pub fn new(cluster: &ClusterSpec, mesh: Mesh) -> Self {
        let levels = Level::ALL.map(|level| speed(cluster, level));
        let group = |stride, ranks, beside| group(cluster, &levels, mesh, stride, ranks, beside);
        let stage = mesh.dp * mesh.tp;
        Links {
            topology: cluster.topology,
            mesh,
            levels,
            tensor: group(1, mesh.tp, 1),
            data: group(mesh.tp, mesh.dp, mesh.tp),
            tied: group(stage * (mesh.pp - 1).max(1), 2.min(mesh.pp), 1),
            pipeline: group(stage, mesh.pp, 1),
        }
    }

    /// Seconds of a collective over `bytes` in sum, and the level it keeps busy.
    pub fn collective(&self, among: Among, collective: Collective, bytes: f64) -> (Level, f64) {
        let group = self.group(among);
        if group.ranks < 2 {
            return (Level::Package, 0.0);
        }
        let n = group.ranks as f64;
        let phases = if collective == Collective::AllReduce { 2.0 } else { 1.0 };
        let inner = self.levels[Level::Node as usize].latency * (n / group.nodes as f64 - 1.0).max(0.0);
        let outer = self.levels[Level::Cluster as usize].latency;
        let nodes = group.nodes as f64;
        let ring = bytes * (n - 1.0) / n / group.bandwidth + inner + outer * (nodes - 1.0);
        let tree = bytes / group.bandwidth + inner + outer * nodes.log2().ceil();
        // Trees reduce and broadcast; nobody gathers or scatters over them.
        let one = if collective == Collective::AllReduce { ring.min(tree) } else { ring };
        (group.level, self.levels[group.level as usize].start + phases * one)
    }

    /// Seconds of a message from `stage` to the rank of the same place in `to`, and the level it crosses.
    ///
    /// With `scattered` each tensor-parallel rank sends one part and the receivers gather them.
    pub fn message(&self, stage: usize, to: usize, bytes: f64, scattered: bool) -> (Level, f64) {
        let rank = |pp| self.mesh.rank(Coordinate { pp, dp: 0, tp: 0 });
        let level = self.topology.level(rank(stage), rank(to));
        let speed = self.levels[level as usize];
        let parts = if scattered { self.mesh.tp as f64 } else { 1.0 };
        let gather = if scattered { self.collective(Among::Tensor, Collective::AllGather, bytes).1 } else { 0.0 };
        (level, speed.start + speed.latency + bytes / parts / speed.bandwidth + gather)
    }

    fn group(&self, among: Among) -> Group {
        match among {
            Among::Tensor => self.tensor,
            Among::Data => self.data,
            Among::Pipeline => self.pipeline,
            Among::Tied => self.tied,
        }
    }
}

/// What a level reaches; where nothing is said of it, its inner neighbour or a common machine's figures.
fn speed(cluster: &ClusterSpec, level: Level) -> Speed {
    let link = cluster.link(level);
    let (bandwidth, latency, start) = match level {
        Level::Package | Level::Node => (DEFAULT_NODE, 2e-6, 10e-6),
        Level::Cluster => (DEFAULT_CLUSTER, 8e-6, 20e-6),
    };
    let or = |of: fn(&LinkSpec) -> Option<f64>, default| link.and_then(of).unwrap_or(default);
    Speed {
        bandwidth: or(|link| link.bandwidth, bandwidth) * or(|link| link.efficiency, 0.8),
        latency: or(|link| link.latency, latency),
        start: or(|link| link.start, start),
    }
}

const DEFAULT_NODE: f64 = 20e9;
const DEFAULT_CLUSTER: f64 = 10e9;

/// The slowest of the groups of `ranks` ranks, `stride` apart, of which `beside` run at the same time.
fn group(
    cluster: &ClusterSpec,
    levels: &[Speed; 3],
    mesh: Mesh,
    stride: usize,
    ranks: usize,
    beside: usize,
) -> Group {
    let per_node = cluster.topology.per_node.unwrap_or(usize::MAX);
    let span = stride * ranks;
    // Groups that begin at the same place of a node are alike.
    let starts = (0..mesh.ranks()).step_by(span.max(1)).take(8);
    let one = |first: usize| {
        let members: Vec<usize> = (0..ranks).map(|i| first + i * stride).collect();
        let nodes = members.chunk_by(|a, b| a / per_node == b / per_node);
        let (count, fewest) = nodes.fold((0, usize::MAX), |(n, few), node| (n + 1, few.min(node.len())));
        let level = cluster.topology.level(members[0], members[ranks - 1]);
        let node = levels[Level::Node as usize].bandwidth;
        let bandwidth = match level {
            Level::Cluster => (fewest as f64 * levels[Level::Cluster as usize].bandwidth).min(node.max(DEFAULT_NODE)),
            inner if cluster.graph.is_empty() || ranks < 2 => levels[inner as usize].bandwidth,
            inner => {
                let reached = cluster.link(inner).and_then(|link| link.efficiency).unwrap_or(0.8);
                thinnest_cut(cluster, &members, stride, beside, per_node) * reached
            }
        };
        Group { ranks, nodes: count, level, bandwidth }
    };
    let slowest = starts.map(one).min_by(|a, b| a.bandwidth.total_cmp(&b.bandwidth));
    slowest.unwrap_or(Group { ranks, nodes: 1, level: Level::Package, bandwidth: f64::INFINITY })
}

/// Bytes per second over the thinnest cut between the members of a group inside a node, shared with the `beside`
/// groups that run along it: every member takes the ranks up to the next one to its side.
fn thinnest_cut(cluster: &ClusterSpec, members: &[usize], stride: usize, beside: usize, per_node: usize) -> f64 {
    let side = |rank: usize| members.iter().position(|&m| (m % per_node..m % per_node + stride).contains(&rank));
    let wires: Vec<(usize, usize, f64)> = cluster
        .graph
        .iter()
        .filter_map(|wire| Some((side(wire.a)?, side(wire.b)?, wire.bandwidth)))
        .filter(|(a, b, _)| a != b)
        .collect();
    let cuts = 1..(1_usize << (members.len() - 1).min(15));
    let across = |cut: usize| -> f64 {
        wires.iter().filter(|(a, b, _)| (cut >> a ^ cut >> b) & 1 == 1).map(|wire| wire.2).sum()
    };
    cuts.map(across).fold(f64::INFINITY, f64::min) / beside as f64
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::resolve;

    use super::*;

    fn frontier(tp: usize, pp: usize, dp: usize) -> Links {
        let cluster = resolve(Some("[model]\npreset = \"demo\"\n[cluster]\npreset = \"frontier\""), "test", &[]);
        Links::new(&cluster.unwrap().cluster, Mesh { pp, dp, tp })
    }

    #[test]
    fn a_group_has_the_bandwidth_of_its_thinnest_cut() {
        let bandwidth = |tp| frontier(tp, 1, 1).tensor.bandwidth;
        // Four links in a package; 0–2 and 1–3 between two; {0, 1} against the rest of all eight.
        assert_eq!([2, 4, 8].map(bandwidth), [0.75 * 200e9, 0.75 * 100e9, 0.75 * 250e9]);
    }

    #[test]
    fn between_nodes_the_ranks_of_a_node_share_its_adapters() {
        let links = frontier(4, 1, 8);
        let (level, bandwidth) = (links.data.level, links.data.bandwidth);
        assert_eq!((level, links.data.nodes), (Level::Cluster, 4));
        assert_eq!(bandwidth, 2.0 * 0.8 * 12.5e9);
    }

    #[test]
    fn a_group_of_one_takes_no_time() {
        assert_eq!(frontier(1, 1, 1).collective(Among::Data, Collective::AllReduce, 1e9).1, 0.0);
    }

    #[test]
    fn trees_serve_small_sums_and_rings_large_ones() {
        let links = frontier(8, 1, 256);
        let time = |bytes| links.collective(Among::Data, Collective::AllReduce, bytes).1;
        assert!(time(8.0) < 2.0 * 255.0 * 10e-6, "{}", time(8.0));
        let gather = |bytes| links.collective(Among::Data, Collective::AllGather, bytes).1;
        assert!((time(1e9) / gather(1e9) - 2.0).abs() < 0.05);
    }
}
