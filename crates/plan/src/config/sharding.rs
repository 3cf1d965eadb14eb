//! The sharding of a configuration: levels of links become numbers of data-parallel ranks and parts of the axis.

use kintsugi_spec::{ClusterSpec, FrameworkSpec, Level, Span, Topology};

use super::error::{ConfigError, invalid};
use super::keys::RawSharding;
use super::quantized;
use super::words::{Collectives, ShardLevel, ShardPreset};
use crate::{MAX_PARTS, Mesh, Part, SecondaryUse, Sharding, When};

/// The sharding of weights, gradients and states, and when they are gathered and reduced.
pub(super) fn resolve(
    raw: &RawSharding,
    mesh: Mesh,
    cluster: &ClusterSpec,
    framework: &FrameworkSpec,
) -> Result<Sharding, ConfigError> {
    let wanted = Levels::of(raw, raw.zero()?);
    let size = |field, level| shards(field, level, mesh, cluster.topology);
    let [weights, gradients, states] = [
        size("sharding.weights", wanted.weights)?,
        size("sharding.gradients", wanted.gradients)?,
        size("sharding.states", wanted.states)?,
    ];
    check_nested(&wanted, [weights, gradients, states])?;
    let gather = raw.gather();
    let secondary = size("sharding.secondary", wanted.secondary)?;
    if wanted.secondary != ShardLevel::None && wanted.weights == ShardLevel::None {
        return Err(invalid("sharding.secondary", wanted.secondary, "needs sharding.weights to be sharded"));
    }
    // A secondary shard is read from the second gather of a step on, and is larger than the shard that it is gathered from.
    let useful = secondary < weights && gather == When::MicroBatch;
    let secondary = if useful { secondary } else { 1 };
    let hierarchical = match raw.collectives() {
        Collectives::Ring => false,
        Collectives::Hierarchical => true,
        // A framework's profile describes runs that were made with rings.
        Collectives::Auto => framework.preset.is_none() && levels_pay(mesh, cluster, framework),
    };
    let given = [wanted.weights, wanted.states].map(|level| level != ShardLevel::None);
    let quantized = quantized::resolve(raw, [weights, states], given)?;
    // One all-to-all over all replicas would send each node as many times as much as it has ranks.
    let node = mesh.replicas_inside(Level::Node, cluster.topology);
    let node = node.filter(|&ranks| quantized.gradients.is_some() && ranks < states);
    Ok(Sharding {
        weights,
        gradients,
        states,
        secondary,
        secondary_use: if secondary > 1 { raw.secondary_use() } else { SecondaryUse::All },
        gather,
        reduce: reduce(raw.reduce, wanted.gradients, gradients)?,
        quantized,
        multiple: Sharding::multiple_for(quantized),
        parts: parts(mesh, cluster.topology, |ranks| {
            hierarchical || [weights, gradients, states, secondary].contains(&ranks) || node == Some(ranks)
        }),
    })
}

/// Notes about requested sharding that is the same as no sharding.
pub(super) fn notes(raw: &RawSharding, sharding: &Sharding, mesh: Mesh) -> Vec<String> {
    let because = |level: ShardLevel| match mesh.replicas() {
        1 => "there is one replica, parallel.dp = 1".to_owned(),
        _ => format!("parallel.tp = {} leaves no two replicas inside one {}", mesh.tp(), level.name()),
    };
    let wanted = Levels::of(raw, raw.zero.unwrap_or_default());
    let asked = [
        ("weights", wanted.weights, sharding.weights),
        ("gradients", wanted.gradients, sharding.gradients),
        ("states", wanted.states, sharding.states),
    ];
    let mut notes: Vec<String> = asked
        .into_iter()
        .filter(|&(_, level, shards)| level != ShardLevel::None && shards == 1)
        .map(|(what, level, _)| {
            let name = level.name();
            format!("sharding {what} over the {name} is the same as not sharding them: {}", because(level))
        })
        .collect();
    let secondary = wanted.secondary;
    if secondary != ShardLevel::None && sharding.secondary == 1 && sharding.weights > 1 {
        let why = match sharding.gather {
            When::Step => "sharding.gather = \"step\" gathers every unit once".to_owned(),
            When::MicroBatch => format!(
                "the weights are sharded over {} replicas, and one {} has no smaller number of at least two",
                sharding.weights,
                secondary.name()
            ),
        };
        notes.push(format!("sharding.secondary = {secondary} is the same as \"none\": {why}"));
    }
    if sharding.secondary == 1 && raw.secondary_use() != SecondaryUse::All {
        notes.push("sharding.secondary_use has no effect: there is no secondary shard".to_owned());
    }
    notes.extend(quantized::notes(raw, sharding));
    notes
}

/// The levels that a configuration asks for.
struct Levels {
    weights: ShardLevel,
    gradients: ShardLevel,
    states: ShardLevel,
    secondary: ShardLevel,
}

impl Levels {
    /// The levels as given, or from the preset, or from the ZeRO stage.
    fn of(raw: &RawSharding, zero: usize) -> Self {
        use ShardLevel::{Cluster, Node, None, Package};
        let stage = |from: usize| if zero >= from { Cluster } else { None };
        let [weights, gradients, states, secondary] = match raw.preset {
            Some(ShardPreset::Mics) => [Node, Node, Node, None],
            Some(ShardPreset::ZeroPlusPlus) => [Cluster, Cluster, Cluster, Node],
            Some(ShardPreset::ThreeLevel) => [Package, Node, Cluster, None],
            Option::None => [stage(3), stage(2), stage(1), None],
        };
        Levels {
            weights: raw.weights.unwrap_or(weights),
            gradients: raw.gradients.unwrap_or(gradients),
            states: raw.states.unwrap_or(states),
            secondary: raw.secondary.unwrap_or(secondary),
        }
    }
}

/// The number of shards over a level: the ranks of a dp group inside one unit of the level.
///
/// If tp fills the level, the number is 1, the same as no sharding.
fn shards(field: &str, level: ShardLevel, mesh: Mesh, topology: Topology) -> Result<usize, ConfigError> {
    let Some(links) = level.level() else { return Ok(1) };
    if links == Level::Pod && topology.nodes_per_pod.is_none() {
        return Err(invalid(field, level, "needs cluster.nodes_per_pod, the nodes that share a pod"));
    }
    mesh.replicas_inside(links, topology).ok_or_else(|| {
        let rule = format!(
            "divides the data-parallel axis of {} ranks unevenly: not every {} has as many of them; use \"none\" or \
             \"cluster\"",
            mesh.replicas(),
            level.name()
        );
        invalid(field, level, rule)
    })
}

/// The parts of the data-parallel axis: it is divided where a level ends and `divided` is true for the number of ranks inside
/// the level.
fn parts(mesh: Mesh, topology: Topology, divided: impl Fn(usize) -> bool) -> [Option<Part>; MAX_PARTS] {
    let mut ends: Vec<(usize, Option<Level>)> = vec![(1, None)];
    for level in Level::ALL {
        let Some(ranks) = mesh.replicas_inside(level, topology) else { continue };
        let wanted = level == Level::Cluster || divided(ranks);
        // Of levels with as many ranks, the innermost gives its name; but all ranks are all ranks.
        if wanted && ends.last().is_some_and(|&(inside, _)| inside < ranks) {
            ends.push((ranks, Some(level)));
        }
    }
    let mut parts = [None; MAX_PARTS];
    for (part, pair) in parts.iter_mut().zip(ends.windows(2)) {
        let ((inside, inner), (ranks, outer)) = (pair[0], pair[1]);
        let outer = outer.filter(|_| ranks < mesh.replicas());
        let span = match (inner, outer) {
            (None, None) => Span::All,
            (None, Some(outer)) => Span::Inside(outer),
            (Some(inner), None) => Span::Across(inner),
            (Some(inner), Some(outer)) => Span::Between(inner, outer),
        };
        *part = Some(Part { span, ranks: ranks / inside });
    }
    parts
}

/// Whether a collective over all replicas is faster inside each node and then across nodes than as one ring, by the bandwidth
/// of the links.
///
/// One ring reaches only a share of the bandwidth between nodes if it has several ranks in each node. Level by level, each rank
/// of a node has a ring across nodes of its own, but the two levels work one after the other.
fn levels_pay(mesh: Mesh, cluster: &ClusterSpec, framework: &FrameworkSpec) -> bool {
    let inside = mesh
        .replicas_inside(Level::Node, cluster.topology)
        .filter(|&ranks| 1 < ranks && ranks < mesh.replicas());
    let Some(inside) = inside else { return false };
    let bandwidth = |level| {
        let link = cluster.link(level)?;
        Some(link.bandwidth? * link.efficiency.unwrap_or(1.0))
    };
    let (Some(node), Some(between)) = (bandwidth(Level::Node), bandwidth(Level::Cluster)) else {
        return false;
    };
    let share = framework.replicas_between_nodes.unwrap_or(framework.between_nodes);
    let moved = |ranks: usize| (ranks - 1) as f64 / ranks as f64;
    let adapters = inside as f64 * between;
    let ring = moved(mesh.replicas()) / (share * adapters).min(node);
    let by_level = moved(mesh.replicas() / inside) / adapters + moved(inside) / node;
    by_level < ring
}

/// A rank updates only what it owns, so what it owns must be a part of its gradients, and they a part of its weights.
fn check_nested(wanted: &Levels, [weights, gradients, states]: [usize; 3]) -> Result<(), ConfigError> {
    let over_more = |what: &str, mine: usize, theirs: usize| {
        format!("is over {mine} replicas, but sharding.{what} over {theirs}; it must not be over more")
    };
    if weights > gradients {
        let rule = match gradients {
            1 => "needs sharding.gradients and sharding.states to be sharded too".to_owned(),
            _ => over_more("gradients", weights, gradients),
        };
        return Err(invalid("sharding.weights", wanted.weights, rule));
    }
    if gradients > states {
        let rule = match states {
            1 => "needs sharding.states to be sharded too".to_owned(),
            _ => over_more("states", gradients, states),
        };
        return Err(invalid("sharding.gradients", wanted.gradients, rule));
    }
    Ok(())
}

fn reduce(given: Option<When>, gradients: ShardLevel, shards: usize) -> Result<When, ConfigError> {
    if given == Some(When::MicroBatch) && gradients == ShardLevel::None {
        let rule = "needs sharded gradients (sharding.zero = 2 or 3); use \"step\"";
        return Err(invalid("sharding.reduce", "\"micro-batch\"", rule));
    }
    Ok(if shards == 1 { When::Step } else { given.unwrap_or(When::MicroBatch) })
}
