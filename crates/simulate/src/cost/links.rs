//! The time of collectives and messages, by the level that they cross, the links that they share, and the algorithm.
//!
//! Inside a node, the bandwidth of a group is that of the best ring over its wires. Between nodes, it is that of the network
//! adapters of the group's ranks in one node. Rings send the fewest bytes and trees take the fewest steps. A part travels
//! around the whole ring: it takes a hop to every other rank, inside nodes and between them. So a ring of hundreds of ranks
//! is slow for small parts, whatever its links.
//!
//! The ranks of a pod share its links to other pods. A ring has the share of its own ranks in the pod, divided by how often it
//! leaves the pod.
//!
//! Ranks on CPUs run one ring, so between nodes a group has the bandwidth of one link. Emulated links make a transfer longer. Its
//! ranks copy the data meanwhile, which takes the time of the transfer without emulation.

use std::collections::BTreeMap;

use kintsugi_comm::Collective;
use kintsugi_plan::{Coordinate, Mesh};
use kintsugi_spec::{
    Axis, ByAxis, ByLevel, ClusterSpec, EmulatedLink, FrameworkSpec, Group, Hardware, Level, LinkSpec,
    Places, ShortSpec, Span, Topology,
};

use super::rings;

/// The links of a cluster under a mesh.
#[derive(Clone, Debug)]
pub struct Links {
    places: Places,
    mesh: Mesh,
    levels: ByLevel<Speed>,
    whole_sums: bool,
    fp32_sums: bool,
    trees: bool,
    /// Bytes that the framework reduces at once.
    bucket: Option<f64>,
    /// Into how many collectives the framework divides a gather of weights.
    gather_pieces: usize,
    /// Seconds of a hop inside a node, in a ring that leaves the node.
    inner_latency: f64,
    /// Bytes per second of a pass over a rank's own part: two are read and one is written.
    local: f64,
    /// The whole axes.
    axes: ByAxis<GroupLinks>,
    tied: GroupLinks,
    /// The parts of the data-parallel group, by span.
    data_parts: Vec<(Span, GroupLinks)>,
    /// The links that the run emulates on top of these.
    emulated: Option<Box<Links>>,
}

/// The speed of a level's links, with its efficiency applied.
#[derive(Clone, Copy, Debug)]
struct Speed {
    bandwidth: f64,
    latency: f64,
    start: f64,
    short: Option<ShortSpec>,
}

/// The links of a group of ranks, with the values of its slowest member.
#[derive(Clone, Copy, Debug)]
struct GroupLinks {
    ranks: usize,
    nodes: usize,
    /// Pods, or nodes if there are no pods.
    pods: usize,
    level: Level,
    /// Of a ring.
    bandwidth: f64,
    /// Of what one rank sends over the outermost level.
    per_rank: f64,
    /// If it is in several pods: what one rank sends inside its pod, and the fewest ranks in a pod.
    pod: Option<(f64, usize)>,
    /// Whether no wires close a ring. An all-reduce then goes along a chain of wires and back, both at once.
    chain: bool,
}

/// How a collective moves its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Around a ring: the fewest bytes over each link.
    Ring,
    /// Up a tree and down again: the fewest steps.
    Tree,
}

impl Links {
    /// The links of a cluster. Typical values replace what the cluster does not specify.
    pub fn new(cluster: &ClusterSpec, mesh: Mesh, framework: &FrameworkSpec) -> Self {
        let emulated = cluster.emulated.iter().any(Option::is_some);
        let emulated = emulated.then(|| Box::new(Links::of(&emulated_cluster(cluster), mesh, framework)));
        Links { emulated, ..Links::of(cluster, mesh, framework) }
    }

    fn of(cluster: &ClusterSpec, mesh: Mesh, framework: &FrameworkSpec) -> Self {
        let levels = Level::ALL.map(|level| speed(cluster, level));
        let places = cluster.places();
        let with_share = |share: f64, stride, ranks, beside| {
            let mut group = group((cluster, &places), &levels, mesh, stride, ranks, beside);
            if group.nodes > 1 && group.nodes < ranks {
                group.bandwidth *= share;
                group.per_rank *= share;
                group.pod = group.pod.map(|(bandwidth, fewest)| (bandwidth * share, fewest));
            }
            group
        };
        let group = |stride, ranks, beside| with_share(framework.between_nodes, stride, ranks, beside);
        let of_replicas = framework.replicas_between_nodes.unwrap_or(framework.between_nodes);
        // Groups whose ranks are some replicas apart run side by side, one for each rank between these.
        let over_replicas = |ranks, stride: usize| {
            let stride = mesh.stride(Axis::Context) * stride;
            with_share(of_replicas, stride, ranks, stride)
        };
        let along = |axis| {
            if axis == Axis::Data {
                over_replicas(mesh.replicas(), 1)
            } else {
                group(mesh.stride(axis), mesh.size(axis), 1)
            }
        };
        let part = |(span, ranks, stride)| (span, over_replicas(ranks, stride));
        Links {
            data_parts: data_spans(mesh, cluster.topology).into_iter().map(part).collect(),
            places: places.clone(),
            mesh,
            levels,
            axes: Axis::ALL.map(along),
            whole_sums: framework.whole_sums,
            fp32_sums: framework.fp32_sums,
            trees: framework.trees,
            bucket: framework.bucket,
            gather_pieces: framework.gather_pieces,
            inner_latency: inner_latency(cluster, &levels),
            local: local_rate(cluster),
            tied: group(mesh.ranks_per_stage() * (mesh.pp() - 1).max(1), 2.min(mesh.pp()), 1),
            emulated: None,
        }
    }

    /// Whether every rank gets the sum of whole gradients, even if it needs only a shard.
    pub fn whole_sums(&self) -> bool {
        self.whole_sums
    }

    /// Whether 16-bit gradients are summed in fp32.
    pub fn fp32_sums(&self) -> bool {
        self.fp32_sums
    }

    /// Seconds of a sum of gradients: the framework divides it into buckets.
    pub fn reduction(&self, group: Group, collective: Collective, bytes: f64) -> (Level, f64) {
        let buckets = self.bucket.map_or(1.0, |bucket| (bytes / bucket).ceil().max(1.0));
        let (level, seconds) = self.collective(group, collective, bytes / buckets);
        (level, buckets * seconds)
    }

    /// Seconds of a gather of weights: the framework divides it into pieces.
    pub fn gather(&self, group: Group, collective: Collective, bytes: f64) -> (Level, f64) {
        let pieces = self.gather_pieces as f64;
        let (level, seconds) = self.collective(group, collective, bytes / pieces);
        (level, pieces * seconds)
    }

    /// Seconds of a collective over `bytes` in total, and the level that it occupies.
    pub fn collective(&self, group: Group, collective: Collective, bytes: f64) -> (Level, f64) {
        let (level, copying) = self.copying(group, collective, bytes);
        let emulated = self.emulated.as_ref().map_or(0.0, |links| links.copying(group, collective, bytes).1);
        (level, copying.max(emulated))
    }

    /// Seconds of a message of `bytes` from every rank of a group to the next one, and the level that it occupies.
    pub fn shift(&self, group: Group, bytes: f64) -> (Level, f64) {
        let (level, copying) = self.copying_shift(group, bytes);
        let emulated = self.emulated.as_ref().map_or(0.0, |links| links.copying_shift(group, bytes).1);
        (level, copying.max(emulated))
    }

    /// The same without emulated links.
    pub fn copying_shift(&self, group: Group, bytes: f64) -> (Level, f64) {
        let links = self.group(group);
        let speed = self.levels[links.level];
        (links.level, speed.start + speed.latency + bytes / links.bandwidth)
    }

    /// The part of [`Links::shift`] in which emulated links are free for the next transfer.
    pub fn emulated_latency_of_shift(&self, group: Group, bytes: f64) -> f64 {
        let Some(emulated) = &self.emulated else { return 0.0 };
        let (level, slow) = emulated.copying_shift(group, bytes);
        if slow > self.copying_shift(group, bytes).1 { emulated.levels[level].latency } else { 0.0 }
    }

    /// The part of [`Links::collective`] in which emulated links are free for the next transfer: the latency of its hops, if the
    /// emulated links and not the copies determine its time.
    pub fn emulated_latency(&self, group: Group, collective: Collective, bytes: f64) -> f64 {
        let Some(emulated) = &self.emulated else { return 0.0 };
        let (slow, links) = (emulated.copying(group, collective, bytes).1, emulated.group(group));
        if links.ranks < 2 || slow <= self.copying(group, collective, bytes).1 {
            return 0.0;
        }
        match collective {
            Collective::AllToAll => emulated.levels[links.level].latency,
            Collective::AllReduce => 2.0 * emulated.ring(links, 0.0),
            Collective::AllGather | Collective::ReduceScatter => emulated.ring(links, 0.0),
        }
    }

    /// The same without emulated links: on a CPU, the seconds in which a rank copies data.
    pub fn copying(&self, group: Group, collective: Collective, bytes: f64) -> (Level, f64) {
        let links = self.group(group);
        if links.ranks < 2 {
            return (Level::Package, 0.0);
        }
        let phases = if collective == Collective::AllReduce { 2.0 } else { 1.0 };
        let speed = self.levels[links.level];
        if collective == Collective::AllToAll {
            return (links.level, speed.start + self.all_to_all(links, bytes));
        }
        let own = bytes / links.ranks as f64 / self.local;
        let seconds = match (self.algorithm(group, collective, bytes), speed.short) {
            (Algorithm::Tree, _) => speed.start + phases * self.tree(links, bytes),
            (Algorithm::Ring, _) if links.chain && collective == Collective::AllReduce => {
                speed.start + bytes / links.bandwidth + phases * self.hops(links)
            }
            (Algorithm::Ring, Some(short)) if is_short(short, links, phases, bytes) => {
                let hops = phases * short.latency * (links.ranks - 1) as f64;
                let wires = phases * wire(links, bytes) / short.share;
                // Parts travel while others are still sent: the longer of the two counts, and some of the other.
                short.start + (hops.powi(3) + wires.powi(3)).cbrt()
            }
            (Algorithm::Ring, _) => speed.start + phases * self.ring(links, bytes),
        };
        (links.level, seconds + own)
    }

    /// The algorithm of a collective over `bytes`: both its seconds and its traffic follow from it. An all-to-all has no other.
    pub fn algorithm(&self, group: Group, collective: Collective, bytes: f64) -> Algorithm {
        let group = self.group(group);
        // Trees are used only to reduce and broadcast, not to gather or scatter.
        let tree = self.trees && collective == Collective::AllReduce;
        if tree && self.tree(group, bytes) < self.ring(group, bytes) {
            Algorithm::Tree
        } else {
            Algorithm::Ring
        }
    }

    /// Seconds of one phase over a ring.
    fn ring(&self, group: GroupLinks, bytes: f64) -> f64 {
        wire(group, bytes) + self.hops(group)
    }

    /// Seconds of the hops of a part around the ring.
    fn hops(&self, group: GroupLinks) -> f64 {
        let (n, nodes, pods) = (group.ranks as f64, group.nodes as f64, group.pods as f64);
        let [pod, outer] = [Level::Pod, Level::Cluster].map(|level| self.levels[level].latency);
        self.inner(group) * (n - nodes) + pod * (nodes - pods) + outer * (pods - 1.0)
    }

    /// Seconds of a hop of a ring inside a node.
    fn inner(&self, group: GroupLinks) -> f64 {
        if group.nodes > 1 { self.inner_latency } else { self.levels[Level::Node].latency }
    }

    /// Seconds of an all-to-all, whose chunks are all under way at once. Half of the bytes are received chunks. What leaves the
    /// node and what stays inside use different links.
    fn all_to_all(&self, group: GroupLinks, bytes: f64) -> f64 {
        let (n, nodes) = (group.ranks as f64, group.nodes as f64);
        let (chunk, here) = (bytes / 2.0 / n, n / nodes);
        let bandwidth = if group.nodes == 1 { group.bandwidth } else { self.levels[Level::Node].bandwidth };
        let inside = (here - 1.0) * chunk / bandwidth;
        let outside = match group.pod {
            None => (n - here) * chunk / group.per_rank,
            Some((bandwidth, in_pod)) => {
                let near = (n - here) * chunk / bandwidth;
                near.max((n - in_pod as f64) * chunk / group.per_rank)
            }
        };
        inside.max(outside) + self.levels[group.level].latency
    }

    /// Seconds of one phase over a tree.
    fn tree(&self, group: GroupLinks, bytes: f64) -> f64 {
        let (nodes, pods) = (group.nodes as f64, group.pods as f64);
        let [pod, outer] = [Level::Pod, Level::Cluster].map(|level| self.levels[level].latency);
        let hops = pod * (nodes / pods).log2().ceil() + outer * pods.log2().ceil();
        bytes / group.bandwidth + self.inside_a_node(group) + hops
    }

    /// Seconds of the hops inside a node.
    fn inside_a_node(&self, group: GroupLinks) -> f64 {
        let hops = (group.ranks as f64 / group.nodes as f64 - 1.0).max(0.0);
        self.levels[Level::Node].latency * hops
    }

    /// Seconds of a message from each rank of `stage` to its peer in `to`, and the level it crosses. The ranks of a stage wait
    /// for each other, so the outermost level of any of them counts.
    ///
    /// With `scattered` each tensor-parallel rank sends one part and the receivers gather them.
    pub fn message(&self, stage: usize, to: usize, bytes: f64, scattered: bool) -> (Level, f64) {
        let (level, copying) = self.copying_message(stage, to, bytes, scattered);
        let emulated = self.emulated.as_ref();
        let emulated = emulated.map_or(0.0, |links| links.copying_message(stage, to, bytes, scattered).1);
        (level, copying.max(emulated))
    }

    /// The part of [`Links::message`] in which emulated links are free for the next message.
    pub fn emulated_latency_of_message(&self, stage: usize, to: usize, bytes: f64, scattered: bool) -> f64 {
        let Some(emulated) = &self.emulated else { return 0.0 };
        let (level, slow) = emulated.copying_message(stage, to, bytes, scattered);
        let copying = self.copying_message(stage, to, bytes, scattered).1;
        if slow > copying { emulated.levels[level].latency } else { 0.0 }
    }

    /// [`Links::message`] without emulated links.
    pub fn copying_message(&self, stage: usize, to: usize, bytes: f64, scattered: bool) -> (Level, f64) {
        let first = |stage| self.mesh.rank(Coordinate::of_stage(stage));
        let ranks = self.mesh.ranks_per_stage();
        let alike =
            if self.places.is_placed() { ranks } else { ranks.min(ranks_of_pod(self.places.topology())) };
        let level = (0..alike).map(|place| self.places.level(first(stage) + place, first(to) + place)).max();
        let level = level.unwrap_or(Level::Package);
        let speed = self.levels[level];
        let parts = if scattered { self.mesh.tp() as f64 } else { 1.0 };
        let gather =
            if scattered { self.collective(Group::TENSOR, Collective::AllGather, bytes).1 } else { 0.0 };
        (level, speed.start + speed.latency + bytes / parts / speed.bandwidth + gather)
    }

    /// Everything that depends on where ranks are, as text: plans that differ only in their placement take the same time if this
    /// is the same.
    pub(crate) fn signature(&self) -> String {
        let pp = self.mesh.pp();
        let message = |stage: usize| self.copying_message(stage, (stage + 1) % pp, 0.0, false).0;
        let messages: Vec<Level> = (0..pp).map(message).collect();
        let groups = (&self.axes, &self.tied, &self.data_parts, messages);
        let emulated = self.emulated.as_ref().map(|links| links.signature());
        format!("{groups:?} {emulated:?}")
    }

    fn group(&self, group: Group) -> GroupLinks {
        match group {
            Group::Along(axis, Span::All) => self.axes[axis],
            Group::Tied => self.tied,
            Group::Along(_, span) => {
                let part = self.data_parts.iter().find(|(part, _)| *part == span);
                part.unwrap_or_else(|| panic!("no program has a collective over {group}")).1
            }
        }
    }
}

/// Seconds of a hop inside a node, in a ring that leaves the node.
fn inner_latency(cluster: &ClusterSpec, levels: &ByLevel<Speed>) -> f64 {
    let given = cluster.link(Level::Cluster).and_then(|link| link.inner_latency);
    given.unwrap_or(0.0).max(levels[Level::Node].latency)
}

/// Whether the library uses its protocol for short collectives. Its hops are faster and its bandwidth is lower, so it is used
/// up to a time on the wires that grows with the number of hops.
fn is_short(short: ShortSpec, group: GroupLinks, phases: f64, bytes: f64) -> bool {
    phases * wire(group, bytes) < short.until * (group.ranks - 1) as f64
}

/// Seconds that the bytes of one phase over a ring take on the links.
fn wire(group: GroupLinks, bytes: f64) -> f64 {
    let n = group.ranks as f64;
    bytes * (n - 1.0) / n / group.bandwidth
}

/// Bytes per second of a pass over a rank's own part. Copies between threads are in the measured links already.
fn local_rate(cluster: &ClusterSpec) -> f64 {
    let device = &cluster.device;
    let memory = device.memory_bandwidth.filter(|_| device.kind == Some(Hardware::Gpu));
    memory.map_or(f64::INFINITY, |bandwidth| bandwidth * device.streaming.unwrap_or(0.8) / 3.0)
}

/// The spans that divide the data-parallel axis evenly, with their ranks and the replicas from one of these to the next.
fn data_spans(mesh: Mesh, topology: Topology) -> Vec<(Span, usize, usize)> {
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

/// The speed of a level. Typical values replace what is not specified.
fn speed(cluster: &ClusterSpec, level: Level) -> Speed {
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
fn emulated_cluster(cluster: &ClusterSpec) -> ClusterSpec {
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

/// The number of ranks after which positions in packages, nodes and pods repeat.
fn ranks_of_pod(topology: Topology) -> usize {
    topology.ranks_inside(Level::Pod).unwrap_or(topology.per_package)
}

/// The slowest group of `ranks` ranks that are `stride` apart, if `beside` such groups run at the same time.
fn group(
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

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    fn mesh(tp: usize, pp: usize, dp: usize) -> Mesh {
        Mesh::ONE.with(Axis::Pipeline, pp).with(Axis::Data, dp).with(Axis::Tensor, tp)
    }

    fn frontier(tp: usize, pp: usize, dp: usize) -> Links {
        let cluster =
            ConfigSource::text("[model]\npreset = \"demo\"\n[cluster]\npreset = \"frontier\"").plan();
        Links::new(&cluster.unwrap().cluster, mesh(tp, pp, dp), &FrameworkSpec::default())
    }

    #[test]
    fn a_group_has_the_bandwidth_of_its_best_ring() {
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"frontier\"";
        let cluster = ConfigSource::text(file).plan().unwrap().cluster;
        let over =
            |members: &[usize]| rings::bandwidth(&cluster, members, 1, 8).map(|bandwidth| bandwidth / 1e9);
        // Four wires in a package. The rings 0–1–3–2 and 0–1–3–2–4–5–7–6 have hops of one wire, used in both
        // directions.
        assert_eq!(over(&[0, 1]), Some(200.0));
        assert_eq!(over(&[0, 1, 2, 3]), Some(100.0));
        assert_eq!(over(&[0, 1, 2, 3, 4, 5, 6, 7]), Some(100.0));
        assert_eq!(over(&[0, 3]), None, "no wire joins them");
        // Wires that are listed one by one serve different rings: all links of a node of four GPUs.
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"perlmutter\"";
        let cluster = ConfigSource::text(file).plan().unwrap().cluster;
        let over =
            |members: &[usize]| rings::bandwidth(&cluster, members, 1, 4).map(|bandwidth| bandwidth / 1e9);
        assert_eq!([over(&[0, 1]), over(&[0, 1, 2]), over(&[0, 1, 2, 3])], [100.0, 200.0, 300.0].map(Some));
    }

    #[test]
    fn between_nodes_the_ranks_of_a_node_share_its_adapters() {
        let links = frontier(4, 1, 8);
        let (level, bandwidth) = (links.axes[Axis::Data].level, links.axes[Axis::Data].bandwidth);
        assert_eq!((level, links.axes[Axis::Data].nodes), (Level::Cluster, 4));
        let one = links.levels[Level::Cluster].bandwidth;
        assert!((bandwidth / one - 2.0).abs() < 1e-12, "{bandwidth}");
    }

    #[test]
    fn replicas_reach_their_own_share_of_the_links_between_nodes() {
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"frontier\"";
        let with = |sets: &[&str]| {
            let plan = ConfigSource::text(file).sets(sets).plan().unwrap();
            let links = Links::new(&plan.cluster, mesh(4, 1, 8), &plan.framework);
            links.axes[Axis::Data].bandwidth
        };
        let whole = with(&[]);
        let half = with(&["framework.between_nodes=0.5"]);
        let own = with(&["framework.between_nodes=0.5", "framework.replicas_between_nodes=0.25"]);
        assert!((half / whole - 0.5).abs() < 1e-12 && (own / whole - 0.25).abs() < 1e-12, "{half} {own}");
    }

    #[test]
    fn groups_side_by_side_share_the_wires_between_their_parts() {
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"frontier\"";
        let cluster = ConfigSource::text(file).plan().unwrap().cluster;
        let efficiency = cluster.link(Level::Node).and_then(|link| link.efficiency).unwrap();
        let between_halves = rings::bandwidth(&cluster, &[0, 4], 4, 8).unwrap();
        // Four groups of two: 0 and 4, 1 and 5, 2 and 6, 3 and 7.
        let data = frontier(4, 1, 2).axes[Axis::Data].bandwidth;
        assert!((data / (between_halves / 4.0 * efficiency) - 1.0).abs() < 1e-12, "{data}");
    }

    #[test]
    fn stages_go_on_together_so_that_the_slowest_message_counts() {
        // Of the six ranks of a stage, four have their peer on another node of eight.
        let links = frontier(1, 2, 6);
        assert_eq!(links.message(0, 1, 1e6, false).0, Level::Cluster);
        assert_eq!((links.tied.level, links.axes[Axis::Pipeline].level), (Level::Cluster, Level::Cluster));
        assert_eq!(frontier(1, 2, 4).message(0, 1, 1e6, false).0, Level::Node);
        assert_eq!(frontier(1, 8, 1).message(0, 1, 1e6, false).0, Level::Package);
    }

    #[test]
    fn a_group_of_one_takes_no_time() {
        assert!(frontier(1, 1, 1).collective(Group::DATA, Collective::AllReduce, 1e9).1 <= 0.0);
    }

    #[test]
    fn an_all_to_all_sends_what_leaves_the_node_over_every_ranks_adapter() {
        let links = frontier(1, 1, 32);
        let time = links.collective(Group::DATA, Collective::AllToAll, 64e9).1;
        let speed = links.levels[Level::Cluster];
        // A chunk has 1 GB, and 24 of the 32 ranks are on other nodes.
        let expected = speed.start + speed.latency + 24e9 / links.axes[Axis::Data].per_rank;
        assert!((time / expected - 1.0).abs() < 1e-12, "{time} {expected}");
        assert!(links.axes[Axis::Data].per_rank <= speed.bandwidth);
    }

    #[test]
    fn a_short_gather_over_four_nodes_of_mi250x_takes_its_hops() {
        // RCCL over Slingshot, 4 nodes of 8 GCDs: 201 to 211 µs for 256 KiB (ROCm/rccl, issue 1490). Nothing is fitted on it.
        let time = frontier(1, 1, 32).collective(Group::DATA, Collective::AllGather, 262_144.0).1;
        assert!((time / 206e-6 - 1.0).abs() < 0.3, "{time}");
    }

    #[test]
    fn buckets_of_replicas_reach_about_one_adapter_however_many_share_a_node() {
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"h100\"";
        let cluster = ConfigSource::text(file).plan().unwrap().cluster;
        // Eight nodes and the buckets of DistributedDataParallel. The adapters that all-reduces were seen to reach, with 8, 4, 2
        // and 1 ranks of a node in the group, are 1.6, 1.4, 1.1 and 1.
        let bucket = 26_214_400.0;
        for tp in [1, 2, 4, 8] {
            let dp = 64 / tp;
            let links = Links::new(&cluster, mesh(tp, 1, dp), &FrameworkSpec::default());
            let time = links.collective(Group::DATA, Collective::AllReduce, bucket).1;
            let adapters = 2.0 * bucket * (dp - 1) as f64 / dp as f64 / time / 50e9;
            assert!((0.7..1.65).contains(&adapters), "tp {tp}: {adapters}");
        }
    }

    #[test]
    fn a_ring_that_leaves_the_node_has_slower_hops_inside() {
        let links = frontier(1, 1, 384);
        let [inner, outer] = [Level::Node, Level::Cluster].map(|level| links.levels[level]);
        assert!(links.inner_latency > inner.latency);
        let hops = outer.start + 336.0 * links.inner_latency + 47.0 * outer.latency;
        let time = links.collective(Group::DATA, Collective::AllGather, 1.0).1;
        assert!((time / hops - 1.0).abs() < 1e-6, "{time} {hops}");
        let inside = frontier(1, 1, 8).collective(Group::DATA, Collective::AllGather, 1.0).1;
        assert!((inside / (inner.start + 7.0 * inner.latency) - 1.0).abs() < 1e-6, "{inside}");
    }

    /// Sixteen nodes of eight ranks in pods of four, with links between pods of a quarter of the bandwidth.
    fn pods(tp: usize, pp: usize, dp: usize, sets: &[&str]) -> Links {
        let file = "[model]\npreset = \"demo\"\n[cluster]\nper_node = 8\n[cluster.links]\nnode.bandwidth = 300e9\n\
                    cluster = { bandwidth = 2e9, latency = 4e-5, efficiency = 1.0 }\n";
        let pods = ["cluster.nodes_per_pod=4", "cluster.links.pod={ bandwidth = 8e9, latency = 1e-5 }"];
        let plan = ConfigSource::text(file).sets(pods).sets(sets).plan().expect("a plan");
        Links::new(&plan.cluster, mesh(tp, pp, dp), &plan.framework)
    }

    #[test]
    fn a_ring_has_the_share_of_its_ranks_of_a_pods_links() {
        // One rank of each node: four of a pod share its links, and one adapter is slower than these.
        let data = pods(8, 1, 16, &[]).axes[Axis::Data];
        assert_eq!((data.level, data.nodes, data.pods), (Level::Cluster, 16, 4));
        assert!((data.bandwidth / 8e9 - 1.0).abs() < 1e-12, "{}", data.bandwidth);
        // Two nodes of a pod: half of it.
        let data = pods(8, 8, 2, &["cluster.nodes_per_pod=1"]).axes[Axis::Data];
        assert_eq!((data.level, data.nodes, data.pods), (Level::Cluster, 2, 2));
        assert!((data.bandwidth / 2e9 - 1.0).abs() < 1e-12, "{}", data.bandwidth);
        let inside = pods(8, 4, 4, &[]).axes[Axis::Data];
        assert_eq!((inside.level, inside.nodes, inside.pods), (Level::Pod, 4, 1));
        assert!((inside.bandwidth / 8e9 - 1.0).abs() < 1e-12, "{}", inside.bandwidth);
    }

    #[test]
    fn hops_between_pods_take_their_own_time() {
        let links = pods(8, 1, 16, &["cluster.links.cluster.start=0", "cluster.links.pod.start=0"]);
        let time = links.collective(Group::DATA, Collective::AllGather, 1.0).1;
        assert!((time / (12.0 * 1e-5 + 3.0 * 4e-5) - 1.0).abs() < 1e-4, "{time}");
        // Stages of one pod each: messages cross pods.
        let links = pods(8, 4, 4, &[]);
        assert_eq!(
            [links.message(0, 1, 1.0, false).0, links.message(2, 3, 1.0, false).0],
            [Level::Cluster; 2]
        );
        let links = pods(8, 8, 2, &[]);
        let levels = [0, 1, 2].map(|stage| links.message(stage, stage + 1, 1.0, false).0);
        assert_eq!(levels, [Level::Pod, Level::Cluster, Level::Pod]);
    }

    #[test]
    fn an_all_to_all_sends_what_leaves_the_pod_over_its_links() {
        let links = pods(1, 1, 128, &["cluster.links.cluster.start=0"]);
        let time = links.collective(Group::DATA, Collective::AllToAll, 256e9).1;
        // A chunk has 1 GB. 96 of 128 ranks are in other pods.
        assert!((time / (96e9 / 2e9 + 4e-5) - 1.0).abs() < 1e-9, "{time}");
    }

    #[test]
    fn pods_whose_links_are_not_described_change_no_time() {
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"frontier\"";
        let with = |sets: &[&str]| ConfigSource::text(file).sets(sets).plan().expect("a plan");
        let (without, with) = (with(&[]), with(&["cluster.nodes_per_pod=4"]));
        for (tp, pp, dp) in [(1, 1, 128), (4, 2, 16), (8, 4, 4), (2, 1, 100), (8, 12, 8)] {
            let [a, b] =
                [&without, &with].map(|plan| Links::new(&plan.cluster, mesh(tp, pp, dp), &plan.framework));
            for collective in [Collective::AllReduce, Collective::AllGather, Collective::AllToAll] {
                for bytes in [1e3, 1e9] {
                    let [a, b] = [&a, &b].map(|links| links.collective(Group::DATA, collective, bytes).1);
                    assert!((a / b - 1.0).abs() < 1e-9 || (a, b) == (0.0, 0.0), "{tp} {pp} {dp} {a} {b}");
                }
            }
        }
    }

    #[test]
    fn a_gather_in_pieces_takes_the_hops_of_each() {
        let whole = frontier(1, 1, 64);
        let links = Links { gather_pieces: 6, ..whole.clone() };
        let gather = |links: &Links| links.gather(Group::DATA, Collective::AllGather, 1e9).1;
        let hops = whole.collective(Group::DATA, Collective::AllGather, 0.0).1;
        assert!((gather(&links) - gather(&whole) - 5.0 * hops).abs() < 1e-9);
    }

    #[test]
    fn trees_serve_small_sums_and_rings_large_ones() {
        let links = Links { trees: true, ..frontier(8, 1, 256) };
        let time = |bytes| links.collective(Group::DATA, Collective::AllReduce, bytes).1;
        let hop = links.levels[Level::Cluster].latency;
        assert!(time(8.0) < 2.0 * 255.0 * hop, "{}", time(8.0));
        let gather = |bytes| links.collective(Group::DATA, Collective::AllGather, bytes).1;
        assert!((time(2e10) / gather(2e10) - 2.0).abs() < 0.05);
    }
}
