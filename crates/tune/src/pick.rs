//! Which strategy to recommend.
//!
//! 1. A strategy is judged by its pessimistic value: half of the way from the prediction to the worse one of slow links between
//!    nodes and no overlap.
//! 2. The pick is at most 2 % worse than the best strategy without codes. Codes change the numbers of a training, so they need to
//!    be asked for.
//! 3. It leaves at least 4 % free of the memory that it may take, if one of these does.
//! 4. Of these it has the fewest mechanisms, and among equals the most free memory.
//! 5. The gain of every mechanism is reported, whether the pick uses it or not.

use kintsugi_plan::config::{LayerSplit, Strategy};
use kintsugi_plan::{Recompute, ScheduleKind};
use kintsugi_spec::Level;
use serde::Serialize;

use crate::explore::{Admits, Explorer, Goal, NEAR};
use crate::only::zero;
use crate::{Candidate, Settings};

/// The share of the memory limit that a pick leaves free.
pub const FREE_SHARE: f64 = 0.04;

/// A recommendation.
#[derive(Clone, Debug)]
pub struct Pick {
    /// The strategy.
    pub candidate: Candidate,
    /// Whether it leaves [`FREE_SHARE`] of its memory free. If not, no strategy that is near the best does.
    pub has_room: bool,
    /// What the mechanisms gain.
    pub gains: Vec<Gain>,
}

/// What a mechanism gains, by pessimistic values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// The mechanism.
    pub mechanism: String,
    /// Whether the pick has it.
    pub used: bool,
    /// If the pick uses it: the slowdown of the best strategy that uses less of it, `None` if none fits. Otherwise: the
    /// slowdown of the pick relative to the best strategy that uses more of it.
    pub gain: Option<f64>,
}

/// The strategy to recommend, of those that were explored.
pub(crate) fn pick(settings: &Settings, explorer: &mut Explorer) -> Option<Candidate> {
    let admits = |strategy: &Strategy| settings.admits(strategy);
    let known = explorer.candidates(&admits).filter(|one| one.pessimistic.is_some());
    let mut known: Vec<Candidate> = known.cloned().collect();
    known.sort_by(|a, b| by_pessimistic(a, b).then(a.peak.cmp(&b.peak)));
    let best = known.iter().find_map(|candidate| explorer.verified(candidate))?;
    let limit = (1.0 + NEAR) * best.pessimistic?;
    known.retain(|candidate| candidate.pessimistic.is_some_and(|value| value <= limit));
    known.sort_by(|a, b| {
        let simple = |candidate: &Candidate| (complexity(&candidate.strategy), candidate.peak);
        simple(a).cmp(&simple(b)).then_with(|| by_pessimistic(a, b))
    });
    let roomy = known.iter().filter(|candidate| has_room(settings, candidate));
    let mut roomy = roomy.filter_map(|candidate| explorer.verified(candidate));
    if let Some(pick) = roomy.find(|candidate| has_room(settings, candidate)) {
        return Some(pick);
    }
    known.sort_by_key(|candidate| candidate.peak);
    known.iter().find_map(|candidate| explorer.verified(candidate))
}

/// What each mechanism gains. Explores strategies that are worse than the pick until that is known.
pub(crate) fn gains(settings: &Settings, explorer: &mut Explorer, pick: &Candidate) -> Vec<Gain> {
    let value = pick.pessimistic.unwrap_or(f64::INFINITY);
    let mut gains = Vec::new();
    for mechanism in Mechanism::ALL {
        let count = mechanism.count(&pick.strategy);
        let may = |strategy: &Strategy| mechanism == Mechanism::Codes || settings.admits(strategy);
        if count > 0 {
            let fewer = |strategy: &Strategy| may(strategy) && mechanism.count(strategy) < count;
            let other = least(explorer, &fewer, f64::INFINITY);
            let gain = other.and_then(|other| other.pessimistic).map(|other| other / value - 1.0);
            gains.push(Gain { mechanism: mechanism.describe(&pick.strategy), used: true, gain });
        }
        let more = |strategy: &Strategy| may(strategy) && mechanism.count(strategy) > count;
        if let Some(other) = least(explorer, &more, value) {
            let gain = other.pessimistic.map(|other| value / other - 1.0);
            gains.push(Gain { mechanism: mechanism.describe(&other.strategy), used: false, gain });
        }
    }
    gains
}

/// The admitted candidate that fits with the least pessimistic value, if that is less than `below`.
fn least(explorer: &mut Explorer, admits: Admits, below: f64) -> Option<Candidate> {
    loop {
        explorer.explore(admits, Goal::Least { below });
        let known = explorer.candidates(admits);
        let known = known.filter(|one| one.pessimistic.is_some_and(|value| value < below));
        let best = known.min_by(|a, b| by_pessimistic(a, b))?.clone();
        if let Some(best) = explorer.verified(&best) {
            return Some(best);
        }
    }
}

fn by_pessimistic(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    let value = |candidate: &Candidate| candidate.pessimistic.unwrap_or(f64::INFINITY);
    value(a).total_cmp(&value(b))
}

/// Whether a candidate leaves [`FREE_SHARE`] of what it may take.
pub(crate) fn has_room(settings: &Settings, candidate: &Candidate) -> bool {
    let plan = settings.base.with_strategy(&candidate.strategy).expect("strategies are allowed");
    let most = settings.limit.map_or(u64::MAX, |limit| limit.per_rank(&plan));
    candidate.reserved.unwrap_or(candidate.peak) as f64 <= (1.0 - FREE_SHARE) * most as f64
}

/// One thing that a strategy may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mechanism {
    /// Tensor parallelism.
    Tensor,
    /// Pipeline parallelism.
    Pipeline,
    /// Sharding of states, then also of gradients, then also of weights.
    Zero,
    /// Sharding over a part of the replicas.
    Levels,
    /// A secondary shard of the weights (hpZ).
    Secondary,
    /// Recomputation.
    Recompute,
    /// Several chunks per stage.
    Chunks,
    /// A backward in two parts.
    ZeroBubble,
    /// Chunks with different numbers of layers.
    Uneven,
    /// Transfers that carry codes.
    Codes,
}

impl Mechanism {
    /// All of them.
    pub const ALL: [Mechanism; 10] = [
        Mechanism::Tensor,
        Mechanism::Pipeline,
        Mechanism::Zero,
        Mechanism::Levels,
        Mechanism::Secondary,
        Mechanism::Recompute,
        Mechanism::Chunks,
        Mechanism::ZeroBubble,
        Mechanism::Uneven,
        Mechanism::Codes,
    ];

    /// How much a strategy has of it. A ZeRO stage counts its number, and chunks count their doublings; all others count one, and
    /// codes one for each kind of transfer.
    pub fn count(self, strategy: &Strategy) -> usize {
        let sharding = &strategy.sharding;
        let levels = [sharding.weights, sharding.gradients, sharding.states];
        match self {
            Mechanism::Tensor => usize::from(strategy.mesh.tp() > 1),
            Mechanism::Pipeline => usize::from(strategy.mesh.pp() > 1),
            Mechanism::Zero => zero(strategy),
            Mechanism::Levels => {
                usize::from(levels.into_iter().flatten().any(|level| level != Level::Cluster))
            }
            Mechanism::Secondary => usize::from(sharding.secondary.is_some()),
            Mechanism::Recompute => usize::from(strategy.recompute != Recompute::None),
            Mechanism::Chunks => strategy.virtual_stages.next_power_of_two().ilog2() as usize,
            Mechanism::ZeroBubble => usize::from(strategy.schedule == ScheduleKind::ZeroBubble),
            Mechanism::Uneven => usize::from(strategy.split != LayerSplit::Even),
            Mechanism::Codes => sharding.quantized.iter().count(),
        }
    }

    /// What a strategy that has it is called.
    pub fn describe(self, strategy: &Strategy) -> String {
        match self {
            Mechanism::Tensor => format!("tp {}", strategy.mesh.tp()),
            Mechanism::Pipeline => format!("pp {}", strategy.mesh.pp()),
            Mechanism::Zero => format!("ZeRO-{}", zero(strategy)),
            Mechanism::Levels => "sharding by level".to_owned(),
            Mechanism::Secondary => "a secondary shard".to_owned(),
            Mechanism::Recompute => match strategy.recompute {
                Recompute::None => "no recomputation".to_owned(),
                Recompute::Selective => "selective recomputation".to_owned(),
                Recompute::Full => "full recomputation".to_owned(),
            },
            Mechanism::Chunks => format!("{} chunks", strategy.virtual_stages),
            Mechanism::ZeroBubble => "zero-bubble".to_owned(),
            Mechanism::Uneven => "uneven chunks".to_owned(),
            Mechanism::Codes => "codes".to_owned(),
        }
    }
}

/// The number of mechanisms that a strategy uses.
pub fn complexity(strategy: &Strategy) -> usize {
    Mechanism::ALL.iter().map(|mechanism| mechanism.count(strategy)).sum()
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ShardingChoice;
    use kintsugi_plan::{Axis, Mesh};

    use super::*;

    #[test]
    fn mechanisms_are_counted() {
        let plain = Strategy {
            mesh: Mesh::ONE.with(Axis::Data, 8),
            micro: 4,
            schedule: ScheduleKind::OneForwardOneBackward,
            virtual_stages: 1,
            split: LayerSplit::Even,
            sequence_parallel: false,
            sharding: ShardingChoice::NONE,
            recompute: Recompute::None,
        };
        assert_eq!(complexity(&plain), 0, "replicas alone");
        let cluster = Some(Level::Cluster);
        let zero1 = ShardingChoice { states: cluster, ..ShardingChoice::NONE };
        let zero3 = ShardingChoice { weights: cluster, gradients: cluster, ..zero1 };
        assert_eq!(complexity(&Strategy { sharding: zero3, ..plain }), 3);
        let mics = ShardingChoice { weights: Some(Level::Node), ..zero3 };
        assert_eq!(complexity(&Strategy { sharding: mics, ..plain }), 4);
        // Llama 3 405B: tp, pp, ZeRO-1, four chunks and uneven ends.
        let llama = Strategy {
            mesh: plain.mesh.with(Axis::Tensor, 8).with(Axis::Pipeline, 16),
            schedule: ScheduleKind::Interleaved,
            virtual_stages: 4,
            split: LayerSplit::LighterEnds,
            sequence_parallel: true,
            sharding: zero1,
            ..plain
        };
        assert_eq!(complexity(&llama), 6);
        assert_eq!(complexity(&Strategy { virtual_stages: 12, ..llama }), 8);
        assert_eq!(complexity(&Strategy { recompute: Recompute::Full, ..llama }), 7);
    }
}
