//! The search: bound every strategy, time those that may be among the best and fit, and predict the best in full.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use kintsugi_plan::Plan;
use kintsugi_plan::config::Strategy;
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_simulate::{
    CompiledStep, Consumption, Coverage, LinkTimes, PeakMemory, Prediction, StepKey, StepTimer, Timing,
    predict,
};
use kintsugi_tensor::Device;
use rayon::prelude::*;

use crate::explore::{Explorer, Goal};
use crate::links::time_over_links;
use crate::mechanisms::is_lossless;
use crate::pick::{Pick, gains, has_room, pick};
use crate::space::left_out;
use crate::{By, Only, SupportedValues, order};

/// The input of a search.
pub struct Settings<'a> {
    /// The model, the batch and the machine, on a single rank.
    pub base: &'a Plan,
    /// Number of ranks of every strategy.
    pub ranks: usize,
    /// Restrictions.
    pub only: &'a [Only],
    /// What the framework can run.
    pub supported: &'a [SupportedValues],
    /// The criterion of the ranking.
    pub by: By,
    /// How many of the best strategies to return.
    pub top: usize,
    /// Whether to time every strategy that fits, and not only those that may be among the best, if there are not too many.
    pub every: bool,
    /// The memory limit.
    pub limit: Option<Limit>,
    /// The device that memory is predicted for.
    pub device: Device,
    /// Decides whether a plan with a full prediction fits.
    pub fits: &'a (dyn Fn(&Plan, &Prediction) -> bool + Sync),
}

impl Settings<'_> {
    /// Whether the configuration or a restriction has codes. Codes change the numbers of a training.
    pub(crate) fn codes_are_asked_for(&self) -> bool {
        self.base.sharding.quantized.iter().next().is_some() || self.only.iter().any(Only::asks_for_codes)
    }

    /// Whether a strategy may be among the best.
    pub(crate) fn admits(&self, strategy: &Strategy) -> bool {
        is_lossless(strategy) || self.codes_are_asked_for()
    }
}

/// The memory that a strategy must fit into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Bytes for each rank.
    PerRank(u64),
    /// Bytes for all ranks together.
    Shared(u64),
}

/// The phase of a search, for progress bars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchPhase {
    /// Bounding regions of strategies: this many.
    Bounding(usize),
    /// Timing what may be among the best of these regions.
    Timing(usize),
}

/// Reports the phase of a search, how much of it was just done, and the best strategy so far.
pub type SearchProgress<'a> = &'a (dyn Fn(SearchPhase, usize, Option<&Candidate>) + Sync);

/// A strategy and its predictions.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// How long a step takes.
    pub timing: Timing,
    /// What a step consumes, where the device's power is known.
    pub consumption: Option<Consumption>,
    /// The peak of the fullest rank.
    pub peak: u64,
    /// What the fullest rank takes from its device, if the plan was predicted in full.
    pub reserved: Option<u64>,
    /// The step over the range of links between nodes, if that was computed.
    pub links: Option<LinkTimes>,
    /// The seconds or joules that a pick is judged by, if they were computed: half of the way from the prediction to the worse
    /// one of slow links between nodes and no overlap.
    pub pessimistic: Option<f64>,
    /// What that is at least, from the scenarios that were computed.
    pub(crate) least_pessimistic: f64,
}

/// How many strategies went through each phase, and how long the phase took.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Counts {
    /// Allowed.
    pub enumerated: usize,
    /// Whose bounds show that they are not among the best.
    pub bounded: usize,
    /// Whose peak memory exceeds the limit.
    pub dropped: usize,
    /// Timed.
    pub timed: usize,
    /// Among the best that do not fit by their full prediction: gaps between buffers take the rest.
    pub refused: usize,
    /// Seconds of the enumeration and of the bounds of regions.
    pub enumeration_s: f64,
    /// Seconds of the bounds of strategies, their memory and their times.
    pub timing_s: f64,
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// The best: the pick, then the others, best first. A Pareto front has no pick.
    pub best: Vec<Candidate>,
    /// The pick, which is the first of the best.
    pub pick: Option<Pick>,
    /// The best by the criterion alone.
    pub fastest: Option<Candidate>,
    /// Every strategy that was timed, best first.
    pub timed: Vec<Candidate>,
    /// How many strategies went through each phase.
    pub counts: Counts,
    /// What the space does not have.
    pub left_out: Vec<String>,
}

/// Why a search is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SearchError {
    /// Nothing can be timed.
    #[error("the speed of the device is unknown")]
    UnknownSpeed,
}

/// Runs a search.
pub fn search(settings: &Settings, progress: SearchProgress) -> Result<SearchResult, SearchError> {
    let model = DeviceModel::new(&settings.base.cluster.device, &settings.base.framework)
        .ok_or(SearchError::UnknownSpeed)?;
    let admits = |strategy: &Strategy| settings.admits(strategy);
    let mut enumeration_s = 0.0;
    let mut explorer = measured(&mut enumeration_s, || Explorer::new(settings, &model, progress));
    let start = Instant::now();
    let mut verifier = Verifier::new(settings);
    let (mut best, pick, counts) = loop {
        explorer.explore(&admits, Goal::Best);
        let ordered = order(explorer.candidates(&admits).cloned().collect(), settings.by);
        let best = first(settings, &ordered, &mut verifier);
        let pick = if settings.by == By::Pareto { None } else { pick(settings, &explorer, &mut verifier) };
        // Where something was refused, other strategies may be among the best.
        let known = explorer.refused.len();
        explorer.refused.extend(verifier.refused());
        if explorer.refused.len() == known {
            break (best, pick, Counts { refused: known, ..explorer.counts(&admits) });
        }
    };
    let timed = order(explorer.timed().to_vec(), settings.by);
    let pick = pick.map(|candidate| {
        best.retain(|other| other.strategy != candidate.strategy);
        best.insert(0, candidate.clone());
        let gains = gains(settings, &mut explorer, &mut verifier, &candidate);
        Pick { has_room: has_room(settings, &candidate), candidate, gains }
    });
    time_over_links(settings, &model, &mut best);
    let fastest = order(best.clone(), settings.by).into_iter().next();
    best.truncate(settings.top);
    let timing_s = start.elapsed().as_secs_f64();
    let counts = Counts { enumeration_s, timing_s, ..counts };
    Ok(SearchResult { best, pick, fastest, timed, counts, left_out: left_out(settings) })
}

/// The strategies whose peak memory is within the limit, each with its peak. The peak is never above what a full
/// prediction reserves, so no strategy that fits is dropped.
pub fn strategies_that_fit(
    base: &Plan,
    device: Device,
    all: &[Strategy],
    limit: Option<Limit>,
    done: &(dyn Fn(usize) + Sync),
) -> Vec<(Strategy, u64)> {
    let peaks = PeakMemory::new(device);
    let one = |strategy: &Strategy| {
        let plan = base.with_strategy(strategy).expect("strategies are allowed");
        let limit = limit.map_or(u64::MAX, |limit| limit.per_rank(&plan));
        if peaks.resident(&plan) > limit {
            return None;
        }
        Some((*strategy, peaks.of(&plan))).filter(|&(_, peak)| peak <= limit)
    };
    let chunks = all.par_chunks(CHUNK).flat_map_iter(|chunk| {
        done(chunk.len());
        chunk.iter().filter_map(one).collect::<Vec<_>>()
    });
    chunks.collect()
}

/// Strategies of one task of the thread pool.
const CHUNK: usize = 64;

/// How long a step takes under each strategy, in order. Strategies that run the same programs share one compiled step.
pub fn timings(
    base: &Plan,
    model: &DeviceModel,
    strategies: &[Strategy],
    done: &(dyn Fn(usize) + Sync),
) -> Vec<Timing> {
    let plan = |i: usize| base.with_strategy(&strategies[i]).expect("strategies are allowed");
    let keys: Vec<StepKey> = (0..strategies.len()).into_par_iter().map(|i| StepKey::of(&plan(i))).collect();
    let mut groups: HashMap<StepKey, Vec<usize>> = HashMap::new();
    for (i, key) in keys.into_iter().enumerate() {
        groups.entry(key).or_default().push(i);
    }
    let timer = StepTimer::new(model);
    let groups: Vec<Vec<usize>> = groups.into_values().collect();
    let timed = groups.par_iter().with_max_len(1).flat_map_iter(|group| {
        let step = CompiledStep::new(&plan(group[0]));
        let times = group.iter().map(|&i| (i, timer.time_compiled(&plan(i), &step)));
        let times: Vec<(usize, Timing)> = times.collect();
        done(group.len());
        times
    });
    let mut timed: Vec<(usize, Timing)> = timed.collect();
    timed.sort_by_key(|&(i, _)| i);
    timed.into_iter().map(|(_, timing)| timing).collect()
}

/// The first candidates that fit by their full prediction. On a Pareto front, each needs fewer joules than the one before.
fn first(settings: &Settings, ordered: &[Candidate], verifier: &mut Verifier) -> Vec<Candidate> {
    let mut best: Vec<Candidate> = Vec::new();
    for candidate in ordered {
        if best.len() == settings.top {
            break;
        }
        let beaten = best.last().is_some_and(|faster| candidate.joules() >= faster.joules());
        if settings.by != By::Pareto || !beaten {
            best.extend(verifier.verified(candidate));
        }
    }
    best
}

/// Decides by full predictions which candidates fit. Each is predicted once.
pub(crate) struct Verifier<'a> {
    settings: &'a Settings<'a>,
    /// What each takes from its device, if it fits.
    known: HashMap<Strategy, Option<u64>>,
}

impl<'a> Verifier<'a> {
    fn new(settings: &'a Settings<'a>) -> Self {
        Verifier { settings, known: HashMap::new() }
    }

    /// The candidate with its full prediction, if it fits by that.
    pub(crate) fn verified(&mut self, candidate: &Candidate) -> Option<Candidate> {
        let known = self.known.entry(candidate.strategy);
        let reserved = *known.or_insert_with(|| reserved(self.settings, &candidate.strategy));
        reserved.map(|reserved| Candidate { reserved: Some(reserved), ..candidate.clone() })
    }

    fn refused(&self) -> HashSet<Strategy> {
        let refused = self.known.iter().filter(|(_, reserved)| reserved.is_none());
        refused.map(|(&strategy, _)| strategy).collect()
    }
}

/// What the fullest rank takes from its device by the full prediction, if that fits.
fn reserved(settings: &Settings, strategy: &Strategy) -> Option<u64> {
    let plan = settings.base.with_strategy(strategy).expect("strategies are allowed");
    let prediction = predict(&plan, settings.device, Coverage::quick(&plan)).under_framework(&plan);
    let reserved = prediction.stages.iter().map(|stage| stage.reserved).max();
    reserved.filter(|_| (settings.fits)(&plan, &prediction))
}

impl Candidate {
    /// Joules of a step; infinity if they are not known.
    pub(crate) fn joules(&self) -> f64 {
        self.consumption.map_or(f64::INFINITY, |used| used.joules)
    }

    /// What it is ranked by. A Pareto front begins with the fastest.
    pub(crate) fn value(&self, by: By) -> f64 {
        match by {
            By::Time | By::Pareto => self.timing.step_s,
            By::Energy => self.joules(),
        }
    }
}

impl Limit {
    /// The most that one rank may take. If the memory is shared, the ranks of the fullest stage may take all of it.
    pub(crate) fn per_rank(self, plan: &Plan) -> u64 {
        match self {
            Limit::PerRank(bytes) => bytes,
            Limit::Shared(bytes) => bytes / plan.mesh.ranks_per_stage() as u64,
        }
    }
}

fn measured<T>(seconds: &mut f64, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    *seconds = start.elapsed().as_secs_f64();
    result
}
