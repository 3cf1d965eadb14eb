//! The cluster of a configuration: a preset, or one described key by key.

use kintsugi_spec::{
    AttentionPoint, ClusterSpec, DeviceSpec, EmulatedLink, EmulatedLinks, Level, LinkSpec, Placement,
    ProductPoint, Topology, Wire,
};

use super::error::{ConfigError, between, invalid, rate, seconds, share, watts, within};
use super::keys::{RawCluster, RawEmulatedLink, RawLink, RawPlacement};
use super::layers::Layers;

/// The name of a cluster that no preset describes.
pub(super) const CUSTOM: &str = "custom";

/// A check of a value, which gets the key for its message.
type Check = fn(&str, f64) -> Result<f64, ConfigError>;

/// The preset of the cluster: the one that is named, or `local` unless the user describes a cluster.
pub(super) fn preset(given: &RawCluster) -> Option<&str> {
    let described = given.per_package.is_some()
        || given.per_node.is_some()
        || given.nodes_per_pod.is_some()
        || given.device.is_some()
        || given.cores.is_some()
        || given.links.is_some()
        || given.graph.is_some()
        || given.profile.is_some();
    given.preset.as_deref().or((!described).then_some("local"))
}

/// The cluster.
pub(super) fn resolve(layers: &Layers) -> Result<ClusterSpec, ConfigError> {
    let raw = &layers.merged.cluster;
    let price = raw.price()?;
    let topology = topology(raw)?;
    let name = preset(&layers.given.cluster).unwrap_or(CUSTOM).to_owned();
    let nodes = nodes(raw, layers.presets.cluster.nodes, &name, topology)?;
    let device = device(raw)?;
    let cores = raw.cores()?;
    let placement = placement(raw, topology)?;
    Ok(ClusterSpec {
        name,
        topology,
        nodes,
        device,
        links: links(raw, topology.nodes_per_pod.is_some() || placement.is_some())?,
        graph: graph(raw, topology)?,
        emulated: emulated(raw)?,
        cores,
        price,
        placement,
    })
}

/// The nodes of the run. Whether they are as many as it needs is checked with the mesh.
fn placement(raw: &RawCluster, topology: Topology) -> Result<Option<Placement>, ConfigError> {
    let Some(RawPlacement { nodes, pods }) = raw.placement.clone() else { return Ok(None) };
    let (nodes, pods) = (nodes.unwrap_or_default(), pods.unwrap_or_default());
    let refused =
        |rule: String| Err(invalid("cluster.placement.nodes", format!("{} nodes", nodes.len()), rule));
    if topology.per_node.is_none() {
        return refused("needs cluster.per_node; without it all ranks are in one node".to_owned());
    }
    if nodes.len() != pods.len() {
        return refused(format!("needs as many in cluster.placement.pods, which has {}", pods.len()));
    }
    let mut sorted: Vec<&String> = nodes.iter().collect();
    sorted.sort_unstable();
    if let Some((node, _)) = sorted.iter().zip(sorted.iter().skip(1)).find(|(a, b)| a == b) {
        return refused(format!("has {node} twice"));
    }
    Ok(Some(Placement { nodes, pods }))
}

fn topology(raw: &RawCluster) -> Result<Topology, ConfigError> {
    let per_package = raw.per_package()?;
    let per_node = raw.per_node()?;
    if let Some(per_node) = per_node.filter(|n| !n.is_multiple_of(per_package)) {
        let rule = format!("is not a multiple of cluster.per_package = {per_package}");
        return Err(invalid("cluster.per_node", per_node, rule));
    }
    let nodes_per_pod = raw.nodes_per_pod()?;
    if let Some(nodes) = nodes_per_pod.filter(|_| per_node.is_none()) {
        let rule = "needs cluster.per_node; without it all ranks are in one node";
        return Err(invalid("cluster.nodes_per_pod", nodes, rule));
    }
    Ok(Topology { per_package, per_node, nodes_per_pod })
}

fn nodes(
    raw: &RawCluster,
    built: Option<usize>,
    name: &str,
    topology: Topology,
) -> Result<Option<usize>, ConfigError> {
    let Some(nodes) = raw.nodes()? else { return Ok(None) };
    if let Some(built) = built.filter(|&built| nodes > built) {
        return Err(invalid("cluster.nodes", nodes, format!("is more than the {built} nodes of {name}")));
    }
    if topology.per_node.is_none() {
        let rule = "needs cluster.per_node; without it all ranks are in one node";
        return Err(invalid("cluster.nodes", nodes, rule));
    }
    Ok(Some(nodes))
}

fn device(raw: &RawCluster) -> Result<DeviceSpec, ConfigError> {
    let mut spec = raw.device.clone().unwrap_or_default();
    if spec.name.is_empty() {
        CUSTOM.clone_into(&mut spec.name);
    }
    if spec.memory == Some(0) {
        return Err(invalid("cluster.device.memory", 0, "must be above 0"));
    }
    spec.headroom.map(|x| between("cluster.device.headroom", x, 0.0..=0.9)).transpose()?;
    spec.units.map(|n| within("cluster.device.units", n, 1..=1 << 16)).transpose()?;
    spec.ramp.map(|x| between("cluster.device.ramp", x, 0.0..=1e6)).transpose()?;
    spec.boost.map(|x| between("cluster.device.boost", x, 1.0..=10.0)).transpose()?;
    spec.misaligned.map(|x| between("cluster.device.misaligned", x, 1.0..=10.0)).transpose()?;
    let figures: [(&str, Option<f64>, Check); 13] = [
        ("peak_16bit", spec.peak_16bit, rate),
        ("peak_8bit", spec.peak_8bit, rate),
        ("peak_fp32", spec.peak_fp32, rate),
        ("memory_bandwidth", spec.memory_bandwidth, rate),
        ("matmul", spec.matmul, share),
        ("matmul_8bit", spec.matmul_8bit, share),
        ("streaming", spec.streaming, share),
        ("launch", spec.launch, seconds),
        ("power_idle", spec.power_idle, watts),
        ("power_max", spec.power_max, watts),
        ("power_cap", spec.power_cap, watts),
        ("power_links", spec.power_links, watts),
        ("epilogue", spec.epilogue, rate),
    ];
    for (key, value, check) in figures {
        value.map(|x| check(&format!("cluster.device.{key}"), x)).transpose()?;
    }
    if let Some(cap) = spec.power_cap {
        let idle = spec.power_idle.unwrap_or(0.0);
        if spec.power_max.is_none() {
            return Err(invalid("cluster.device.power_cap", cap, "needs cluster.device.power_max"));
        }
        if cap <= idle {
            let rule = format!("must be above cluster.device.power_idle = {idle}");
            return Err(invalid("cluster.device.power_cap", cap, rule));
        }
    }
    attention(&spec.attention)?;
    attention(&spec.portable_attention)?;
    products(&spec.products)?;
    for point in &spec.kernels {
        rate("cluster.device.kernels.bandwidth", point.bandwidth)?;
    }
    Ok(spec)
}

fn attention(points: &[AttentionPoint]) -> Result<(), ConfigError> {
    for point in points {
        within("cluster.device.attention.head_dim", point.head_dim, 1..=1 << 16)?;
        within("cluster.device.attention.sequence", point.sequence, 1..=1 << 30)?;
        rate("cluster.device.attention.forward", point.forward)?;
        rate("cluster.device.attention.backward", point.backward)?;
    }
    Ok(())
}

fn products(points: &[ProductPoint]) -> Result<(), ConfigError> {
    for point in points {
        for (field, size) in [("m", point.m), ("n", point.n), ("k", point.k)] {
            within(&format!("cluster.device.products.{field}"), size, 1..=1 << 30)?;
        }
        rate("cluster.device.products.flops", point.flops)?;
        point.burst.map(|flops| rate("cluster.device.products.burst", flops)).transpose()?;
    }
    Ok(())
}

/// Largest number of ranks in a node whose wires can be listed, because the best ring is searched over all orders.
const MAX_WIRED: usize = 16;

/// The wires of a node. The check needs the number of ranks in it.
fn graph(raw: &RawCluster, topology: Topology) -> Result<Vec<Wire>, ConfigError> {
    let wires = raw.graph.clone().unwrap_or_default();
    if wires.is_empty() {
        return Ok(wires);
    }
    let Some(per_node) = topology.per_node else {
        return Err(invalid("cluster.graph", "[…]", "needs cluster.per_node"));
    };
    if per_node > MAX_WIRED {
        let rule =
            format!("has wires, which are for nodes of up to {MAX_WIRED} ranks: use cluster.links.node");
        return Err(invalid("cluster.per_node", per_node, rule));
    }
    for wire in &wires {
        within("cluster.graph.a", wire.a, 0..=per_node - 1)?;
        within("cluster.graph.b", wire.b, 0..=per_node - 1)?;
        rate("cluster.graph.bandwidth", wire.bandwidth)?;
    }
    Ok(wires)
}

fn links(raw: &RawCluster, has_pods: bool) -> Result<Vec<LinkSpec>, ConfigError> {
    let links = raw.links.clone().unwrap_or_default();
    let pod = if has_pods || links.pod.is_some() {
        Some(pod_link(links.pod.as_ref(), links.cluster.as_ref()))
    } else {
        None
    };
    let levels = [links.package, links.node, pod, links.cluster];
    let given = Level::ALL.into_iter().zip(&levels).filter_map(|(level, raw)| Some((level, raw.as_ref()?)));
    given.map(|(level, raw)| link(level, raw)).collect()
}

/// The links of pods: what is not given is as between pods.
fn pod_link(pod: Option<&RawLink>, cluster: Option<&RawLink>) -> RawLink {
    fn of<T>(links: [Option<&RawLink>; 2], figure: impl Fn(&RawLink) -> Option<T>) -> Option<T> {
        links.into_iter().flatten().find_map(figure)
    }
    let links = [pod, cluster];
    RawLink {
        bandwidth: of(links, |link| link.bandwidth),
        latency: of(links, |link| link.latency),
        inner_latency: of(links, |link| link.inner_latency),
        efficiency: of(links, |link| link.efficiency),
        start: of(links, |link| link.start),
        short: of(links, |link| link.short),
        rings: of(links, |link| link.rings),
    }
}

fn link(level: Level, raw: &RawLink) -> Result<LinkSpec, ConfigError> {
    let field = |key: &str| format!("cluster.links.{}.{key}", level.name());
    if let Some(short) = raw.short {
        seconds(&field("short.start"), short.start)?;
        seconds(&field("short.latency"), short.latency)?;
        share(&field("short.share"), short.share)?;
        seconds(&field("short.until"), short.until)?;
    }
    Ok(LinkSpec {
        level,
        bandwidth: raw.bandwidth.map(|x| rate(&field("bandwidth"), x)).transpose()?,
        latency: raw.latency.map(|x| seconds(&field("latency"), x)).transpose()?,
        inner_latency: raw.inner_latency.map(|x| seconds(&field("inner_latency"), x)).transpose()?,
        efficiency: raw.efficiency.map(|x| share(&field("efficiency"), x)).transpose()?,
        start: raw.start.map(|x| seconds(&field("start"), x)).transpose()?,
        short: raw.short,
        rings: raw.rings.map(|n| within(&field("rings"), n, 1..=16)).transpose()?,
    })
}

fn emulated(raw: &RawCluster) -> Result<EmulatedLinks, ConfigError> {
    let mut emulated = EmulatedLinks::default();
    let Some(links) = &raw.emulated else { return Ok(emulated) };
    for (level, raw) in Level::ALL.into_iter().zip([&links.package, &links.node, &links.pod, &links.cluster])
    {
        emulated[level] = raw.as_ref().map(|raw| emulated_link(level, raw)).transpose()?;
    }
    Ok(emulated)
}

fn emulated_link(level: Level, raw: &RawEmulatedLink) -> Result<EmulatedLink, ConfigError> {
    /// Bytes per second of a link that only has a latency.
    const UNLIMITED: f64 = 1e18;
    let field = |key: &str| format!("cluster.emulated.{}.{key}", level.name());
    Ok(EmulatedLink {
        bandwidth: rate(&field("bandwidth"), raw.bandwidth.unwrap_or(UNLIMITED))?,
        latency: seconds(&field("latency"), raw.latency.unwrap_or(0.0))?,
    })
}
