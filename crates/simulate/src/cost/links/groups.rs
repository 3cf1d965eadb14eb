//! The links that the groups of a mesh have: their level, and their bandwidth by the wires, adapters and pods that they share.
//!
//! Inside a node, the bandwidth of a group is that of the best ring over its wires. Between nodes, it is that of the network
//! adapters of the group's ranks in one node. The ranks of a pod share its links to other pods. A ring has the share of its own
//! ranks in the pod, divided by how often it leaves the pod. Ranks on CPUs run one ring, so between nodes a group has the
//! bandwidth of one link.

use std::collections::BTreeMap;

use kintsugi_plan::Mesh;
use kintsugi_spec::{ByLevel, ClusterSpec, EmulatedLink, Level, LinkSpec, Places, ShortSpec, Span, Topology};

use super::rings;

/// The speed of a level's links, with its efficiency applied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speed {
    pub bandwidth: f64,
    pub latency: f64,
    pub start: f64,
    pub short: Option<ShortSpec>,
}

/// The links of a group of ranks, with the values of its slowest member.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupLinks {
    pub ranks: usize,
    pub nodes: usize,
    /// Pods, or nodes if there are no pods.
    pub pods: usize,
    pub level: Level,
    /// Of a ring.
    pub bandwidth: f64,
    /// Of what one rank sends over the outermost level.
    pub per_rank: f64,
    /// If it is in several pods: what one rank sends inside its pod, and the fewest ranks in a pod.
    pub pod: Option<(f64, usize)>,
    /// Whether no wires close a ring. An all-reduce then goes along a chain of wires and back, both at once.
    pub chain: bool,
}

/// The speed of a level. Typical values replace what is not specified.
pub(super) fn speed(cluster: &ClusterSpec, level: Level) -> Speed {
    let link = cluster.link(level);
    let (bandwidth, latency, start) = match level {
        Level::Package | Level::Node => (DEFAULT_NODE, 2e-6, 10e-6),
        Level::Pod | Level::Cluster => (DEFAULT_CLUSTER, 8e-6, 20e-6),
    };
    let or = |of: fn(&LinkSpec) -> Option<f64>, default| link.and_then(of).unwrap_or(default);
    Speed {
        bandwidth: or(|link| link.bandwidth, bandwidth) * or(|link| link.efficiency, 0.8),
        latency: or(|link| link.latency, latency),
        start: or(|link| link.start, start),
        short: link.and_then(|link| link.short),
    }
}

/// A cluster with the links that its runs emulate.
pub(super) fn emulated_cluster(cluster: &ClusterSpec) -> ClusterSpec {
    let link = |level: Level| match cluster.emulated[level] {
        Some(EmulatedLink { bandwidth, latency }) => Some(LinkSpec {
            level,
            bandwidth: Some(bandwidth),
            latency: Some(latency),
            efficiency: Some(1.0),
            start: Some(0.0),
            short: None,
            rings: None,
            inner_latency: None,
        }),
        None => cluster.link(level).cloned(),
    };
    ClusterSpec { links: Level::ALL.into_iter().filter_map(link).collect(), ..cluster.clone() }
}

const DEFAULT_NODE: f64 = 20e9;
const DEFAULT_CLUSTER: f64 = 10e9;

/// The spans that divide the data-parallel axis evenly, with their ranks and the replicas from one of these to the next.
pub(super) fn data_spans(mesh: Mesh, topology: Topology) -> Vec<(Span, usize, usize)> {
    let exists = |level: &Level| *level != Level::Pod || topology.nodes_per_pod.is_some();
    let inside = |level| mesh.replicas_inside(level, topology).filter(|_| exists(&level));
    // A cluster contains all ranks, so nothing is across clusters.
    let [levels @ .., Level::Cluster] = &Level::ALL else {
        unreachable!("the cluster is the outermost level")
    };
    let mut spans = Vec::new();
    for (number, &inner) in levels.iter().enumerate() {
        let Some(ranks) = inside(inner) else { continue };
        spans
            .extend([(Span::Inside(inner), ranks, 1), (Span::Across(inner), mesh.replicas() / ranks, ranks)]);
        let outer = levels[number + 1..].iter().filter_map(|&outer| Some((outer, inside(outer)?)));
        spans.extend(outer.map(|(outer, all)| (Span::Between(inner, outer), all / ranks, ranks)));
    }
    spans
}

/// The number of ranks after which positions in packages, nodes and pods repeat.
pub(super) fn ranks_of_pod(topology: Topology) -> usize {
    topology.ranks_inside(Level::Pod).unwrap_or(topology.per_package)
}

/// The slowest group of `ranks` ranks that are `stride` apart, if `beside` such groups run at the same time.
pub(super) fn group(
    (cluster, places): (&ClusterSpec, &Places),
    levels: &ByLevel<Speed>,
    mesh: Mesh,
    stride: usize,
    ranks: usize,
    beside: usize,
) -> GroupLinks {
    let topology = cluster.topology;
    let per_node = topology.per_node.unwrap_or(usize::MAX);
    let span = stride * ranks;
    let first = (0..mesh.ranks()).step_by(span).flat_map(|block| block..block + stride);
    let starts = first.filter(|first| first + (ranks - 1) * stride < mesh.ranks());
    // Groups that begin at the same position of a pod are alike, and of a node if they do not leave it or there are no pods.
    // Pods of chosen nodes are not alike, and groups are if they pass through the same nodes.
    let has_pods = places.has_pods();
    let pod = ranks_of_pod(topology);
    let same_nodes = match stride {
        stride if per_node.is_multiple_of(stride) => stride,
        stride if stride.is_multiple_of(per_node) => per_node,
        _ => 1,
    };
    let position = |first: usize| {
        let leaves = has_pods && first / per_node != (first + (ranks - 1) * stride) / per_node;
        let place = match leaves {
            true if places.is_placed() => first / same_nodes,
            true => first % pod,
            false => first % per_node.min(pod),
        };
        (leaves, place)
    };
    let starts: BTreeMap<(bool, usize), usize> = starts.map(|first| (position(first), first)).collect();
    let members = |first: usize| -> Vec<usize> { (0..ranks).map(|i| first + i * stride).collect() };
    let one = |first: usize| {
        let first_beside = members(first / span * span);
        let members = members(first);
        let nodes = members.chunk_by(|a, b| a / per_node == b / per_node);
        let (count, fewest) = nodes.fold((0, usize::MAX), |(n, few), node| (n + 1, few.min(node.len())));
        let level = if places.is_placed() {
            members.windows(2).map(|two| places.level(two[0], two[1])).max().unwrap_or(Level::Package)
        } else {
            topology.level(members[0], members[ranks - 1])
        };
        let node = levels[Level::Node].bandwidth;
        // The adapters of its ranks in a node.
        let adapters = |level: Level| (fewest as f64 * levels[level].bandwidth).min(node.max(DEFAULT_NODE));
        let pods = has_pods && level == Level::Cluster;
        let pods = pods.then(|| PodShares::of(&members, |rank| places.unit(Level::Pod, rank)));
        let mut chain = false;
        let bandwidth = match (level, &pods) {
            (Level::Pod | Level::Cluster, None) if cluster.cores.is_some() => levels[level].bandwidth,
            (Level::Pod | Level::Cluster, None) => adapters(level),
            (Level::Cluster, Some(_)) if cluster.cores.is_some() => {
                levels[Level::Cluster].bandwidth.min(levels[Level::Pod].bandwidth)
            }
            (Level::Cluster, Some(pods)) => {
                adapters(Level::Pod).min(pods.ranks_for_each_exit * levels[Level::Cluster].bandwidth)
            }
            (Level::Package | Level::Node | Level::Pod, _) if cluster.graph.is_empty() || ranks < 2 => {
                levels[level].bandwidth
            }
            (Level::Package | Level::Node | Level::Pod, _) => {
                let efficiency = cluster.link(level).and_then(|link| link.efficiency).unwrap_or(0.8);
                // Groups that run at the same time share their wires. Those of the first group stand for all.
                let ring = rings::bandwidth(cluster, &first_beside, stride, per_node);
                chain = ring.is_none();
                ring.unwrap_or(unwired_bandwidth(cluster)) / beside as f64 * efficiency
            }
        };
        let between_nodes = level >= Level::Pod && cluster.cores.is_none();
        let (per_rank, pod) = match &pods {
            None => (bandwidth / if between_nodes { fewest as f64 } else { 1.0 }, None),
            Some(pods) => {
                let near = if between_nodes {
                    adapters(Level::Pod) / fewest as f64
                } else {
                    levels[Level::Pod].bandwidth
                };
                (levels[Level::Cluster].bandwidth.min(near), Some((near, pods.fewest)))
            }
        };
        let pods = pods.map_or(if level == Level::Pod { 1 } else { count }, |pods| pods.runs);
        GroupLinks { ranks, nodes: count, pods, level, bandwidth, per_rank, pod, chain }
    };
    let slowest = starts.into_values().map(one).min_by(|a, b| {
        let hops = |group: &GroupLinks| if has_pods { (group.pods, group.nodes) } else { (1, 1) };
        a.bandwidth.total_cmp(&b.bandwidth).then_with(|| hops(b).cmp(&hops(a)))
    });
    let (level, bandwidth) = (Level::Package, f64::INFINITY);
    slowest.unwrap_or(GroupLinks {
        ranks,
        nodes: 1,
        pods: 1,
        level,
        bandwidth,
        per_rank: bandwidth,
        pod: None,
        chain: false,
    })
}

/// How the members of a group are spread over pods.
struct PodShares {
    /// How often the next member is in another pod, and one.
    runs: usize,
    /// The fewest members in a pod.
    fewest: usize,
    /// The fewest members in a pod for each time that the ring leaves it.
    ranks_for_each_exit: f64,
}

impl PodShares {
    fn of(members: &[usize], pod: impl Fn(usize) -> usize) -> Self {
        let mut found: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        let mut runs = 1;
        for (i, &member) in members.iter().enumerate() {
            let (here, next) = (pod(member), pod(members[(i + 1) % members.len()]));
            let (ranks, exits) = found.entry(here).or_default();
            *ranks += 1;
            *exits += usize::from(here != next);
            runs += usize::from(here != next && i + 1 < members.len());
        }
        let shares = found.values().map(|&(ranks, exits)| ranks as f64 / exits.max(1) as f64);
        let fewest = found.values().map(|&(ranks, _)| ranks).min().unwrap_or(1);
        PodShares { runs, fewest, ranks_for_each_exit: shares.fold(f64::INFINITY, f64::min) }
    }
}

/// The bandwidth between two ranks of a node without a direct wire.
fn unwired_bandwidth(cluster: &ClusterSpec) -> f64 {
    cluster.link(Level::Node).and_then(|link| link.bandwidth).unwrap_or(DEFAULT_NODE)
}
