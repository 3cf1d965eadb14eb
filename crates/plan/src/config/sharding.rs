//! The sharding of a configuration: levels of links become numbers of data-parallel ranks.

use kintsugi_spec::{Level, Topology};

use super::error::{ConfigError, invalid, unavailable, within};
use super::raw::RawSharding;
use super::words::{Quantize, ShardLevel};
use crate::{Coordinate, Group, Mesh, Sharding, When};

/// The sharding of weights, gradients and states, and when they are gathered and reduced.
pub(super) fn resolve(raw: &RawSharding, mesh: Mesh, topology: Topology) -> Result<Sharding, ConfigError> {
    check_available(raw)?;
    let zero = within("sharding.zero", raw.zero.unwrap_or(0), 0..=3)?;
    let [weights, gradients, states] = levels(raw, zero);
    let size = |field, level| shards(field, level, mesh, topology);
    let sharding = Sharding {
        weights: size("sharding.weights", weights)?,
        gradients: size("sharding.gradients", gradients)?,
        states: size("sharding.states", states)?,
        gather: raw.gather.unwrap_or(When::MicroBatch),
        reduce: When::Step,
    };
    check_nested(&sharding, weights, gradients)?;
    let reduce = reduce(raw.reduce, gradients, sharding.gradients)?;
    Ok(Sharding { reduce, ..sharding })
}

/// Notes about requested sharding that is the same as no sharding.
pub(super) fn notes(raw: &RawSharding, sharding: &Sharding, mesh: Mesh) -> Vec<String> {
    let because = |level: ShardLevel| match mesh.dp {
        1 => "there is one replica, parallel.dp = 1".to_owned(),
        _ => format!("parallel.tp = {} leaves no two replicas inside one {}", mesh.tp, level.name()),
    };
    let fields = ["weights", "gradients", "states"];
    let shards = [sharding.weights, sharding.gradients, sharding.states];
    let asked = fields.into_iter().zip(levels(raw, raw.zero.unwrap_or(0))).zip(shards);
    asked
        .filter(|((_, level), shards)| *level != ShardLevel::None && *shards == 1)
        .map(|((field, level), _)| {
            format!(
                "sharding {field} over the {} is the same as not sharding them: {}",
                level.name(),
                because(level)
            )
        })
        .collect()
}

/// The levels of weights, gradients and states: as given, or from the ZeRO stage.
fn levels(raw: &RawSharding, zero: usize) -> [ShardLevel; 3] {
    let level = |given: Option<ShardLevel>, from: usize| {
        given.unwrap_or(if zero >= from { ShardLevel::Cluster } else { ShardLevel::None })
    };
    [level(raw.weights, 3), level(raw.gradients, 2), level(raw.states, 1)]
}

fn check_available(raw: &RawSharding) -> Result<(), ConfigError> {
    let quantized = [
        ("sharding.quantize_weights", raw.quantize_weights),
        ("sharding.quantize_gradients", raw.quantize_gradients),
    ];
    for (field, given) in quantized {
        if let Some(kind) = given.filter(|&kind| kind != Quantize::None) {
            return Err(unavailable(field, kind, "\"none\""));
        }
    }
    match raw.secondary.filter(|&level| level != ShardLevel::None) {
        Some(level) => Err(unavailable("sharding.secondary", level, "\"none\"")),
        None => Ok(()),
    }
}

/// The number of shards over a level: the ranks of a dp group inside one unit of the level.
///
/// If tp fills the level, the number is 1, the same as no sharding.
fn shards(field: &str, level: ShardLevel, mesh: Mesh, topology: Topology) -> Result<usize, ConfigError> {
    let joined = match level.level() {
        None => return Ok(1),
        Some(Level::Cluster) => return Ok(mesh.dp),
        Some(links) => move |a: usize, b: usize| topology.level(a, b) <= links,
    };
    let starts = (0..mesh.pp).flat_map(|pp| (0..mesh.tp).map(move |tp| Coordinate { pp, dp: 0, tp }));
    let groups: Vec<Vec<usize>> = starts.map(|at| mesh.group(Group::DATA, at, topology)).collect();
    if groups.iter().all(|group| joined(group[0], group[mesh.dp - 1])) {
        return Ok(mesh.dp);
    }
    if groups.iter().all(|group| group.windows(2).all(|pair| !joined(pair[0], pair[1]))) {
        return Ok(1);
    }
    let rule = format!(
        "covers only part of the data-parallel axis of {} ranks, and partitions inside it are not available yet; \
         use \"none\" or \"cluster\"",
        mesh.dp
    );
    Err(invalid(field, level, rule))
}

/// Sharded weights need sharded gradients, and sharded gradients need sharded states, because a rank updates only what
/// it owns.
fn check_nested(sharding: &Sharding, weights: ShardLevel, gradients: ShardLevel) -> Result<(), ConfigError> {
    if sharding.weights > 1 && sharding.gradients == 1 {
        let rule = "needs sharding.gradients and sharding.states to be sharded too";
        return Err(invalid("sharding.weights", weights, rule));
    }
    if sharding.gradients > 1 && sharding.states == 1 {
        return Err(invalid("sharding.gradients", gradients, "needs sharding.states to be sharded too"));
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
