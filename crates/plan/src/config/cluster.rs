//! The machine of a configuration: a preset's, or one described key by key.

use kintsugi_spec::{
    AttentionPoint, ClusterSpec, DeviceSpec, KernelPoint, Level, LinkSpec, ProductPoint, Topology, Wire,
};

use super::error::{ConfigError, between, invalid, rate, seconds, share, watts, within};
use super::layers::Layers;
use super::raw::{RawCluster, RawDevice, RawLink};

/// The name of a cluster that no preset describes.
pub(super) const CUSTOM: &str = "custom";

/// The cluster's preset: the one named or, unless the user describes a machine, `local`.
pub(super) fn preset(given: &RawCluster) -> Option<&str> {
    let described = given.per_package.is_some()
        || given.per_node.is_some()
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
    let price = raw.price.map(|price| between("cluster.price", price, 0.0..=1e9)).transpose()?;
    let topology = topology(raw)?;
    let name = preset(&layers.given.cluster).unwrap_or(CUSTOM).to_owned();
    let nodes = nodes(raw, layers.presets.cluster.nodes, &name, topology)?;
    let device = device(raw.device.clone().unwrap_or_default())?;
    let cores = raw.cores.map(|n| within("cluster.cores", n, 1..=1 << 16)).transpose()?;
    Ok(ClusterSpec {
        name,
        topology,
        nodes,
        device,
        links: links(raw)?,
        graph: graph(raw, topology)?,
        cores,
        price,
    })
}

fn topology(raw: &RawCluster) -> Result<Topology, ConfigError> {
    let per_package = within("cluster.per_package", raw.per_package.unwrap_or(1), 1..=1 << 10)?;
    let per_node = raw.per_node.map(|n| within("cluster.per_node", n, 1..=1 << 10)).transpose()?;
    if let Some(per_node) = per_node.filter(|n| !n.is_multiple_of(per_package)) {
        let rule = format!("is not a multiple of cluster.per_package = {per_package}");
        return Err(invalid("cluster.per_node", per_node, rule));
    }
    Ok(Topology { per_package, per_node })
}

fn nodes(
    raw: &RawCluster,
    built: Option<usize>,
    name: &str,
    topology: Topology,
) -> Result<Option<usize>, ConfigError> {
    let Some(nodes) = raw.nodes else { return Ok(None) };
    within("cluster.nodes", nodes, 1..=1 << 20)?;
    if let Some(built) = built.filter(|&built| nodes > built) {
        return Err(invalid("cluster.nodes", nodes, format!("is more than the {built} nodes of {name}")));
    }
    if topology.per_node.is_none() {
        let rule = "needs cluster.per_node; without it all ranks are in one node";
        return Err(invalid("cluster.nodes", nodes, rule));
    }
    Ok(Some(nodes))
}

fn device(raw: RawDevice) -> Result<DeviceSpec, ConfigError> {
    let rate = |field, value: Option<f64>| value.map(|x| rate(field, x)).transpose();
    if raw.memory == Some(0) {
        return Err(invalid("cluster.device.memory", 0, "must be above 0"));
    }
    let share = |field, value: Option<f64>| value.map(|x| share(field, x)).transpose();
    let watts = |field, value: Option<f64>| value.map(|x| watts(field, x)).transpose();
    Ok(DeviceSpec {
        name: raw.name.unwrap_or_else(|| CUSTOM.to_owned()),
        memory: raw.memory,
        peak_16bit: rate("cluster.device.peak_16bit", raw.peak_16bit)?,
        peak_fp32: rate("cluster.device.peak_fp32", raw.peak_fp32)?,
        memory_bandwidth: rate("cluster.device.memory_bandwidth", raw.memory_bandwidth)?,
        units: raw.units.map(|n| within("cluster.device.units", n, 1..=1 << 16)).transpose()?,
        matmul: share("cluster.device.matmul", raw.matmul)?,
        ramp: raw.ramp.map(|x| between("cluster.device.ramp", x, 0.0..=1e6)).transpose()?,
        streaming: share("cluster.device.streaming", raw.streaming)?,
        launch: raw.launch.map(|x| seconds("cluster.device.launch", x)).transpose()?,
        power_idle: watts("cluster.device.power_idle", raw.power_idle)?,
        power_max: watts("cluster.device.power_max", raw.power_max)?,
        power_links: watts("cluster.device.power_links", raw.power_links)?,
        epilogue: rate("cluster.device.epilogue", raw.epilogue)?,
        attention: attention(raw.attention.unwrap_or_default())?,
        products: products(raw.products.unwrap_or_default())?,
        kernels: kernels(raw.kernels.unwrap_or_default())?,
    })
}

fn attention(points: Vec<AttentionPoint>) -> Result<Vec<AttentionPoint>, ConfigError> {
    for point in &points {
        within("cluster.device.attention.head_dim", point.head_dim, 1..=1 << 16)?;
        within("cluster.device.attention.sequence", point.sequence, 1..=1 << 30)?;
        rate("cluster.device.attention.forward", point.forward)?;
        rate("cluster.device.attention.backward", point.backward)?;
    }
    Ok(points)
}

fn products(points: Vec<ProductPoint>) -> Result<Vec<ProductPoint>, ConfigError> {
    for point in &points {
        for (field, size) in [("m", point.m), ("n", point.n), ("k", point.k)] {
            within(&format!("cluster.device.products.{field}"), size, 1..=1 << 30)?;
        }
        rate("cluster.device.products.flops", point.flops)?;
        point.burst.map(|flops| rate("cluster.device.products.burst", flops)).transpose()?;
    }
    Ok(points)
}

fn kernels(points: Vec<KernelPoint>) -> Result<Vec<KernelPoint>, ConfigError> {
    for point in &points {
        rate("cluster.device.kernels.bandwidth", point.bandwidth)?;
    }
    Ok(points)
}

/// Ranks of a node whose wires can be told: the best ring is searched among all that there are.
const MOST_WIRED: usize = 16;

/// The wires of a node; they need to know how many ranks there are in it.
fn graph(raw: &RawCluster, topology: Topology) -> Result<Vec<Wire>, ConfigError> {
    let wires = raw.graph.clone().unwrap_or_default();
    if wires.is_empty() {
        return Ok(wires);
    }
    let Some(per_node) = topology.per_node else {
        return Err(invalid("cluster.graph", "[…]", "needs cluster.per_node"));
    };
    if per_node > MOST_WIRED {
        let rule =
            format!("has wires, which are for nodes of up to {MOST_WIRED} ranks: use cluster.links.node");
        return Err(invalid("cluster.per_node", per_node, rule));
    }
    for wire in &wires {
        within("cluster.graph.a", wire.a, 0..=per_node - 1)?;
        within("cluster.graph.b", wire.b, 0..=per_node - 1)?;
        rate("cluster.graph.bandwidth", wire.bandwidth)?;
    }
    Ok(wires)
}

fn links(raw: &RawCluster) -> Result<Vec<LinkSpec>, ConfigError> {
    let Some(links) = &raw.links else { return Ok(Vec::new()) };
    let levels = [&links.package, &links.node, &links.cluster];
    let given = Level::ALL.into_iter().zip(levels).filter_map(|(level, raw)| Some((level, raw.as_ref()?)));
    given.map(|(level, raw)| link(level, raw)).collect()
}

fn link(level: Level, raw: &RawLink) -> Result<LinkSpec, ConfigError> {
    let field = |key: &str| format!("cluster.links.{}.{key}", level.name());
    Ok(LinkSpec {
        level,
        bandwidth: raw.bandwidth.map(|x| rate(&field("bandwidth"), x)).transpose()?,
        latency: raw.latency.map(|x| seconds(&field("latency"), x)).transpose()?,
        efficiency: raw.efficiency.map(|x| share(&field("efficiency"), x)).transpose()?,
        start: raw.start.map(|x| seconds(&field("start"), x)).transpose()?,
    })
}
