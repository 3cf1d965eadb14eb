//! The search: enumerate strategies, drop the strategies that do not fit, time the rest, and predict the best in full.

use std::collections::HashMap;
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

use crate::pick::{by_preference, time_over_links};
use crate::{By, Only, SupportedValues, order, strategies};

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
    /// The memory limit.
    pub limit: Option<Limit>,
    /// The device that memory is predicted for.
    pub device: Device,
    /// Decides whether a plan with a full prediction fits.
    pub fits: &'a (dyn Fn(&Plan, &Prediction) -> bool + Sync),
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
    /// Computing the peak memory of this many strategies.
    CheckingMemory(usize),
    /// Timing the strategies that fit: this many.
    Timing(usize),
}

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
}

/// How many strategies went through each phase, and how long the phase took.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Counts {
    /// Allowed.
    pub enumerated: usize,
    /// Whose peak memory exceeds the limit.
    pub dropped: usize,
    /// Timed.
    pub timed: usize,
    /// Among the best that do not fit by their full prediction: gaps between buffers take the rest.
    pub refused: usize,
    /// Seconds of the enumeration.
    pub enumeration_s: f64,
    /// Seconds of the memory phase.
    pub screening_s: f64,
    /// Seconds of the timing.
    pub timing_s: f64,
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// The best: the pick, then the others, best first. A Pareto front has no pick.
    pub best: Vec<Candidate>,
    /// The best by the criterion alone.
    pub fastest: Option<Candidate>,
    /// Every strategy that was timed, best first.
    pub timed: Vec<Candidate>,
    /// How many strategies went through each phase.
    pub counts: Counts,
}

/// Why a search is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SearchError {
    /// Nothing can be timed.
    #[error("the speed of the device is unknown")]
    UnknownSpeed,
    /// It would take minutes or gigabytes.
    #[error(
        "{strategies} strategies or more, which take {ops} ops or more to compare, are too many for one search (at most \
         {MAX_STRATEGIES} and {MAX_OPS})"
    )]
    TooLarge {
        /// The strategies that were counted.
        strategies: usize,
        /// Ops that they take in all.
        ops: usize,
    },
}

/// Largest number of strategies of one search.
const MAX_STRATEGIES: usize = 500_000;
/// Largest number of ops of one search: two cores take about two minutes for them.
const MAX_OPS: usize = 1 << 29;
/// Predicting the memory of one layer takes about as long as timing this many ops.
const OPS_PER_LAYER: usize = 4;

/// Runs a search. `progress` is called with the phase and the number of strategies that were just finished.
pub fn search(
    settings: &Settings,
    progress: &(dyn Fn(SearchPhase, usize) + Sync),
) -> Result<SearchResult, SearchError> {
    let model = DeviceModel::new(&settings.base.cluster.device, &settings.base.framework)
        .ok_or(SearchError::UnknownSpeed)?;
    let mut counts = Counts::default();
    let all = measured(&mut counts.enumeration_s, || {
        let (only, supported) = (settings.only, settings.supported);
        let all = strategies(settings.base, settings.ranks, only, supported, MAX_STRATEGIES + 1);
        check_size(settings.base, &all).map(|()| all)
    })?;
    counts.enumerated = all.len();
    let done = |done| progress(SearchPhase::CheckingMemory(all.len()), done);
    let fitting = measured(&mut counts.screening_s, || {
        strategies_that_fit(settings.base, settings.device, &all, settings.limit, &done)
    });
    counts.dropped = all.len() - fitting.len();
    counts.timed = fitting.len();
    let done = |done| progress(SearchPhase::Timing(fitting.len()), done);
    let timed = measured(&mut counts.timing_s, || {
        let strategies: Vec<Strategy> = fitting.iter().map(|&(strategy, _)| strategy).collect();
        timings(settings.base, &model, &strategies, &done)
    });
    let candidates = fitting.into_iter().zip(timed).map(|((strategy, peak), timing)| {
        let plan = settings.base.with_strategy(&strategy).expect("strategies are allowed");
        let consumption = Consumption::new(&plan, &timing);
        Candidate { strategy, timing, consumption, peak, reserved: None, links: None }
    });
    let ordered = order(candidates.collect(), settings.by);
    let mut best = verified(settings, &ordered, &mut counts.refused);
    if settings.by != By::Pareto
        && let Some(fastest) = best.first().cloned()
    {
        let preferred = by_preference(settings, &model, &ordered, &fastest);
        if let Some(pick) = preferred.iter().find_map(|candidate| predicted(settings, candidate)) {
            best.retain(|candidate| candidate.strategy != pick.strategy);
            best.insert(0, pick);
        }
    }
    time_over_links(settings, &model, &mut best);
    let fastest = order(best.clone(), settings.by).into_iter().next();
    best.truncate(settings.top);
    Ok(SearchResult { best, fastest, timed: ordered, counts })
}

/// Refuses a search that would take too long. The memory of each strategy is computed layer by layer; a program is compiled
/// once for all strategies that run it.
fn check_size(base: &Plan, all: &[Strategy]) -> Result<(), SearchError> {
    let one = |strategy: &Strategy| {
        let plan = base.with_strategy(strategy).expect("strategies are allowed");
        (StepKey::of(&plan), plan.pipeline.laid_out_ops(plan.micro_batches()))
    };
    let programs: HashMap<StepKey, usize> = all.par_iter().map(one).collect();
    let ops = programs.into_values().sum::<usize>() + OPS_PER_LAYER * base.model.layers * all.len();
    if all.len() > MAX_STRATEGIES || ops > MAX_OPS {
        return Err(SearchError::TooLarge { strategies: all.len(), ops });
    }
    Ok(())
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
fn verified(settings: &Settings, ordered: &[Candidate], refused: &mut usize) -> Vec<Candidate> {
    let mut best: Vec<Candidate> = Vec::new();
    for candidate in ordered {
        if best.len() == settings.top {
            break;
        }
        let beaten = best.last().is_some_and(|faster| candidate.joules() >= faster.joules());
        if settings.by == By::Pareto && beaten {
            continue;
        }
        match predicted(settings, candidate) {
            Some(candidate) => best.push(candidate),
            None => *refused += 1,
        }
    }
    best
}

/// The candidate with its full prediction, if it fits by that.
fn predicted(settings: &Settings, candidate: &Candidate) -> Option<Candidate> {
    let plan = settings.base.with_strategy(&candidate.strategy).expect("strategies are allowed");
    let prediction = predict(&plan, settings.device, Coverage::quick(&plan)).under_framework(&plan);
    let reserved = prediction.stages.iter().map(|stage| stage.reserved).max();
    (settings.fits)(&plan, &prediction).then(|| Candidate { reserved, ..candidate.clone() })
}

impl Candidate {
    /// Joules of a step; infinity if they are not known.
    pub(crate) fn joules(&self) -> f64 {
        self.consumption.map_or(f64::INFINITY, |used| used.joules)
    }
}

impl Limit {
    /// The most that one rank may take. If the memory is shared, the ranks of the fullest stage may take all of it.
    fn per_rank(self, plan: &Plan) -> u64 {
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
