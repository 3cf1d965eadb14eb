//! Which strategy to recommend.
//!
//! 1. A strategy is judged by its pessimistic value: half of the way from the prediction to the worse one of slow links between
//!    nodes and no overlap.
//! 2. The pick is at most 2 % worse than the best strategy without codes. Codes change the numbers of a training, so they need to
//!    be asked for.
//! 3. It leaves at least 4 % free of the memory that it may take, if one of these does.
//! 4. Of these it has the fewest mechanisms, and among equals the most free memory.
//! 5. The gain of every mechanism is reported, whether the pick uses it or not.

use kintsugi_plan::config::Strategy;
use serde::Serialize;

use crate::explore::{Admits, Explorer, Goal, NEAR};
use crate::mechanisms::{Mechanism, complexity, is_lossless};
use crate::search::Verifier;
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
pub(crate) fn pick(settings: &Settings, explorer: &Explorer, verifier: &mut Verifier) -> Option<Candidate> {
    let admits = |strategy: &Strategy| settings.admits(strategy);
    let known = explorer.candidates(&admits);
    let mut known: Vec<&Candidate> = known.filter(|one| one.pessimistic.is_some()).collect();
    known.sort_by(|a, b| by_pessimistic(a, b).then(a.peak.cmp(&b.peak)));
    let best = known.iter().find_map(|candidate| verifier.verified(candidate))?;
    let limit = (1.0 + NEAR) * best.pessimistic?;
    known.retain(|candidate| candidate.pessimistic.is_some_and(|value| value <= limit));
    known.sort_by(|a, b| {
        let simple = |candidate: &Candidate| (complexity(&candidate.strategy), candidate.peak);
        simple(a).cmp(&simple(b)).then_with(|| by_pessimistic(a, b))
    });
    let roomy = known.iter().filter(|candidate| has_room(settings, candidate));
    let mut roomy = roomy.filter_map(|candidate| verifier.verified(candidate));
    if let Some(pick) = roomy.find(|candidate| has_room(settings, candidate)) {
        return Some(pick);
    }
    known.sort_by_key(|candidate| candidate.peak);
    known.iter().find_map(|candidate| verifier.verified(candidate))
}

/// What each mechanism gains. Strategies that are worse than the pick are explored as far as that takes.
pub(crate) fn gains(
    settings: &Settings,
    explorer: &mut Explorer,
    verifier: &mut Verifier,
    pick: &Candidate,
) -> Vec<Gain> {
    let value = pick.pessimistic.unwrap_or(f64::INFINITY);
    let mut gains = Vec::new();
    for mechanism in Mechanism::ALL {
        let count = mechanism.count(&pick.strategy);
        let may = |strategy: &Strategy| {
            mechanism == Mechanism::Codes || settings.codes_are_asked_for() || is_lossless(strategy)
        };
        if count > 0 {
            let fewer = |strategy: &Strategy| may(strategy) && mechanism.count(strategy) < count;
            let other = least(explorer, verifier, &fewer, f64::INFINITY);
            let gain = other.and_then(|other| other.pessimistic).map(|other| other / value - 1.0);
            gains.push(Gain { mechanism: mechanism.describe(&pick.strategy), used: true, gain });
        }
        let more = |strategy: &Strategy| may(strategy) && mechanism.count(strategy) > count;
        if let Some(other) = least(explorer, verifier, &more, value) {
            let gain = other.pessimistic.map(|other| value / other - 1.0);
            gains.push(Gain { mechanism: mechanism.describe(&other.strategy), used: false, gain });
        }
    }
    gains
}

/// The admitted candidate that fits with the least pessimistic value, if that is less than `below`.
fn least(explorer: &mut Explorer, verifier: &mut Verifier, admits: Admits, below: f64) -> Option<Candidate> {
    loop {
        explorer.explore(admits, Goal::Least { below });
        let known = explorer.candidates(admits);
        let known = known.filter(|one| one.pessimistic.is_some_and(|value| value < below));
        let best = known.min_by(|a, b| by_pessimistic(a, b))?.clone();
        if let Some(best) = verifier.verified(&best) {
            return Some(best);
        }
        explorer.refused.insert(best.strategy);
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
