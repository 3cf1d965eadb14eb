//! The mesh of a configuration, and whether the cluster has enough ranks.

use kintsugi_spec::ClusterSpec;

use super::error::{ConfigError, invalid, within};
use super::keys::{MAX_RANKS, RawParallel};
use super::words::Replicas;
use crate::{Axis, Batch, Mesh};

/// The mesh. `asked` is the number of nodes that the user requests. If it is given, `dp = "auto"` fills these nodes;
/// otherwise `dp = "auto"` is 1.
pub(super) fn resolve(
    raw: &RawParallel,
    cluster: &ClusterSpec,
    asked: Option<usize>,
) -> Result<Mesh, ConfigError> {
    let tp = raw.tp()?;
    let cp = raw.cp()?;
    let pp = raw.pp()?;
    let dp = match raw.dp() {
        Replicas::Count(dp) => within("parallel.dp", dp, 1..=MAX_RANKS)?,
        Replicas::Auto => match (asked, cluster.topology.per_node) {
            (Some(nodes), Some(per_node)) => replicas([tp, cp, pp], nodes, per_node)?,
            _ => 1,
        },
    };
    let mesh = Mesh::ONE
        .with(Axis::Pipeline, pp)
        .with(Axis::Data, dp)
        .with(Axis::Context, cp)
        .with(Axis::Tensor, tp);
    let (available, of) = match (cluster.nodes, cluster.topology.per_node) {
        (Some(nodes), Some(per_node)) => (nodes * per_node, format!("cluster.nodes = {nodes}")),
        _ => (MAX_RANKS, "any cluster".to_owned()),
    };
    if mesh.ranks() > available {
        let rule = format!("ranks, more than the {available} of {of}");
        let (names, sizes) = product([("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp)]);
        return Err(invalid(&format!("parallel.{names}"), format!("{sizes} = {}", mesh.ranks()), rule));
    }
    if let (Some(placement), Some(per_node)) = (&cluster.placement, cluster.topology.per_node) {
        let (nodes, needed) = (placement.nodes.len(), mesh.ranks().div_ceil(per_node));
        if nodes != needed {
            let rule =
                format!("is for another layout: {} ranks are on {needed} nodes of {per_node}", mesh.ranks());
            return Err(invalid("cluster.placement.nodes", format!("{nodes} nodes"), rule));
        }
    }
    Ok(mesh)
}

/// A note about ranks of the requested nodes that are idle.
pub(super) fn note(mesh: Mesh, batch: Batch, cluster: &ClusterSpec, asked: Option<usize>) -> Option<String> {
    let (nodes, per_node) = (asked?, cluster.topology.per_node?);
    let (replica, ranks) = (mesh.ranks() / mesh.dp(), nodes * per_node);
    if mesh.ranks() >= ranks {
        return None;
    }
    let all = ranks / replica;
    let advice = if all * replica == ranks && batch.global.is_multiple_of(batch.micro * all) {
        format!("; parallel.dp = {all} uses all of them")
    } else {
        String::new()
    };
    let (names, sizes) =
        product([("tp", mesh.tp()), ("cp", mesh.cp()), ("pp", mesh.pp()), ("dp", mesh.dp())]);
    Some(format!(
        "{names} = {sizes} uses {} of the {ranks} ranks of cluster.nodes = {nodes}, the others are idle{advice}",
        mesh.ranks()
    ))
}

/// A note about a cluster of which one rank is used because no layout was requested. `asked` is the number of nodes that the
/// user requests.
pub(super) fn default_note(raw: &RawParallel, cluster: &ClusterSpec, asked: Option<usize>) -> Option<String> {
    let per_node = cluster.topology.per_node.filter(|&ranks| ranks > 1)?;
    let given =
        raw.tp.is_some() || raw.cp.is_some() || raw.pp.is_some() || raw.dp.is_some() || asked.is_some();
    (!given).then(|| {
        format!(
            "this plan has one rank, because neither a layout nor cluster.nodes is given: set cluster.nodes = 1 to use all \
             {per_node} devices of a node, or parallel.tp, pp and dp"
        )
    })
}

/// The number of replicas that fills the nodes.
fn replicas([tp, cp, pp]: [usize; 3], nodes: usize, per_node: usize) -> Result<usize, ConfigError> {
    let (ranks, replica) = (nodes * per_node, tp * cp * pp);
    if ranks.is_multiple_of(replica) {
        return Ok(ranks / replica);
    }
    let (names, sizes) = product([("tp", tp), ("cp", cp), ("pp", pp)]);
    let rule = format!(
        "cannot fill the {ranks} ranks of cluster.nodes = {nodes} with replicas of {names} = {sizes} ranks; \
         give parallel.dp, or a {names} that divides {ranks}"
    );
    Err(invalid("parallel.dp", "\"auto\"", rule))
}

/// The names and the sizes of axes as products, cp only if sequences are divided.
fn product<const N: usize>(axes: [(&str, usize); N]) -> (String, String) {
    let shown = || axes.iter().filter(|&&(name, size)| name != "cp" || size > 1);
    let join = |words: Vec<String>| words.join(" · ");
    let names = shown().map(|(name, _)| (*name).to_owned()).collect();
    (join(names), join(shown().map(|(_, size)| size.to_string()).collect()))
}
