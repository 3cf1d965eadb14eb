//! The time of collectives and messages, by the level that they cross, the links that they share, and the algorithm.
//!
//! `groups` finds the links of every group. Rings send the fewest bytes and trees take the fewest steps. A part travels around
//! the whole ring: it takes a hop to every other rank, inside nodes and between them. So a ring of hundreds of ranks is slow for
//! small parts, whatever its links.
//!
//! Emulated links make a transfer longer. Its ranks copy the data meanwhile, which takes the time of the transfer without
//! emulation.

mod groups;
mod rings;
#[cfg(test)]
mod tests;

use kintsugi_comm::Collective;
use kintsugi_plan::{COPY_PIECE, Coordinate, Mesh, Plan};
use kintsugi_spec::{
    Axis, ByAxis, ByLevel, ClusterSpec, FrameworkSpec, Group, Hardware, Level, Places, ShortSpec, Span,
};

use groups::{GroupLinks, Speed, data_spans, emulated_cluster, group, ranks_of_pod, speed};

/// Seconds of a collective over `bytes` in a group of a plan, by the cost model of a whole step.
pub fn collective_seconds(plan: &Plan, group: Group, collective: Collective, bytes: f64) -> f64 {
    Links::of(plan).collective(group, collective, bytes).seconds
}

/// Seconds of a message of `bytes` from the first stage of a plan to the second.
pub fn message_seconds(plan: &Plan, bytes: f64) -> f64 {
    Links::of(plan).message(0, 1 % plan.mesh.pp(), bytes, false).seconds
}

/// Seconds of the transfers in which all ranks copy their states to the next node.
pub(crate) fn replication_seconds(plan: &Plan) -> f64 {
    let pieces = plan.replication(0).ops.len() / 2;
    pieces as f64 * Links::of(plan).to_next_node(plan.nodes().1, COPY_PIECE as f64)
}

/// What the time of a plan depends on of its placement, as text: two placements of a plan with the same text take as long.
pub fn links_of(plan: &Plan) -> String {
    Links::of(plan).signature()
}

/// The links of a cluster under a mesh.
#[derive(Clone, Debug)]
pub struct Links {
    places: Places,
    mesh: Mesh,
    levels: ByLevel<Speed>,
    /// Whether every rank gets the sum of whole gradients, even if it needs only a shard.
    pub whole_sums: bool,
    /// Whether 16-bit gradients are summed in fp32.
    pub fp32_sums: bool,
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

/// The time of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct LinkTime {
    /// The level that it occupies.
    pub level: Level,
    /// Seconds from its start to its end.
    pub seconds: f64,
    /// Seconds without emulated links: on a CPU, those in which a rank copies data.
    pub copying: f64,
    /// The latency of its hops on emulated links, at its end: meanwhile the links are free for the next transfer. 0 if the
    /// copies determine its time.
    pub latency: f64,
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
    /// The links of a plan.
    pub fn of(plan: &Plan) -> Self {
        Links::new(&plan.cluster, plan.mesh, &plan.framework)
    }

    /// The links of a cluster. Typical values replace what the cluster does not specify.
    fn new(cluster: &ClusterSpec, mesh: Mesh, framework: &FrameworkSpec) -> Self {
        let emulated = cluster.emulated.iter().any(Option::is_some);
        let emulated =
            emulated.then(|| Box::new(Links::without_emulation(&emulated_cluster(cluster), mesh, framework)));
        Links { emulated, ..Links::without_emulation(cluster, mesh, framework) }
    }

    fn without_emulation(cluster: &ClusterSpec, mesh: Mesh, framework: &FrameworkSpec) -> Self {
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

    /// The time of a sum of gradients: the framework divides it into buckets.
    pub fn reduction(&self, group: Group, collective: Collective, bytes: f64) -> LinkTime {
        let buckets = self.bucket.map_or(1.0, |bucket| (bytes / bucket).ceil().max(1.0));
        self.in_pieces(buckets, group, collective, bytes)
    }

    /// The time of a gather of weights: the framework divides it into pieces.
    pub fn gather(&self, group: Group, collective: Collective, bytes: f64) -> LinkTime {
        self.in_pieces(self.gather_pieces as f64, group, collective, bytes)
    }

    fn in_pieces(&self, pieces: f64, group: Group, collective: Collective, bytes: f64) -> LinkTime {
        let seconds = pieces * self.collective(group, collective, bytes / pieces).seconds;
        LinkTime { seconds, ..self.collective(group, collective, bytes) }
    }

    /// The time of a collective over `bytes` in total.
    pub fn collective(&self, group: Group, collective: Collective, bytes: f64) -> LinkTime {
        self.beside_copies(self.copying(group, collective, bytes), |emulated| {
            let (group, (_, seconds)) = (emulated.group(group), emulated.copying(group, collective, bytes));
            let latency = match collective {
                Collective::AllToAll => emulated.levels[group.level].latency,
                Collective::AllReduce => 2.0 * emulated.ring(group, 0.0),
                Collective::AllGather | Collective::ReduceScatter => emulated.ring(group, 0.0),
            };
            (seconds, latency)
        })
    }

    /// The time of a message of `bytes` from every rank of a group to the next one.
    pub fn shift(&self, group: Group, bytes: f64) -> LinkTime {
        self.beside_copies(self.copying_shift(group, bytes), |emulated| {
            let (level, seconds) = emulated.copying_shift(group, bytes);
            (seconds, emulated.levels[level].latency)
        })
    }

    /// The time of a message from each rank of `stage` to its peer in `to`. The ranks of a stage wait for each other, so the
    /// outermost level that any of them crosses counts.
    ///
    /// With `scattered` each tensor-parallel rank sends one part and the receivers gather them.
    pub fn message(&self, stage: usize, to: usize, bytes: f64, scattered: bool) -> LinkTime {
        self.beside_copies(self.copying_message(stage, to, bytes, scattered), |emulated| {
            let (level, seconds) = emulated.copying_message(stage, to, bytes, scattered);
            (seconds, emulated.levels[level].latency)
        })
    }

    /// A transfer that takes `copying` without emulated links. `emulated` returns its seconds and its latency on these.
    fn beside_copies(
        &self,
        (level, copying): (Level, f64),
        emulated: impl FnOnce(&Links) -> (f64, f64),
    ) -> LinkTime {
        let (slow, latency) = self.emulated.as_deref().map_or((0.0, 0.0), emulated);
        let (seconds, latency) = if slow > copying { (slow, latency) } else { (copying, 0.0) };
        LinkTime { level, seconds, copying, latency }
    }

    fn copying(&self, group: Group, collective: Collective, bytes: f64) -> (Level, f64) {
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

    fn copying_shift(&self, group: Group, bytes: f64) -> (Level, f64) {
        let links = self.group(group);
        let speed = self.levels[links.level];
        (links.level, speed.start + speed.latency + bytes / links.bandwidth)
    }

    fn copying_message(&self, stage: usize, to: usize, bytes: f64, scattered: bool) -> (Level, f64) {
        let level = self.message_level(stage, to);
        let speed = self.levels[level];
        let parts = if scattered { self.mesh.tp() as f64 } else { 1.0 };
        let gather = if scattered {
            self.collective(Group::TENSOR, Collective::AllGather, bytes).seconds
        } else {
            0.0
        };
        (level, speed.start + speed.latency + bytes / parts / speed.bandwidth + gather)
    }

    /// The outermost level that a message between two stages crosses.
    fn message_level(&self, stage: usize, to: usize) -> Level {
        let first = |stage| self.mesh.rank(Coordinate::of_stage(stage));
        let ranks = self.mesh.ranks_per_stage();
        let alike =
            if self.places.is_placed() { ranks } else { ranks.min(ranks_of_pod(self.places.topology())) };
        let level = (0..alike).map(|place| self.places.level(first(stage) + place, first(to) + place)).max();
        level.unwrap_or(Level::Package)
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

    /// Seconds of a message of `bytes` from every rank to the one at the same place of the next node.
    pub fn to_next_node(&self, per_node: usize, bytes: f64) -> f64 {
        let ranks = self.mesh.ranks();
        let level = (0..ranks).map(|rank| self.places.level(rank, (rank + per_node) % ranks)).max();
        let speed = self.levels[level.unwrap_or(Level::Package)];
        let copying = speed.start + speed.latency + bytes / speed.bandwidth;
        self.emulated.as_ref().map_or(copying, |links| copying.max(links.to_next_node(per_node, bytes)))
    }

    /// Everything that depends on where ranks are, as text.
    fn signature(&self) -> String {
        let pp = self.mesh.pp();
        let messages: Vec<Level> = (0..pp).map(|stage| self.message_level(stage, (stage + 1) % pp)).collect();
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
            Group::Nodes => unreachable!("no program has a collective over {group}"),
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
