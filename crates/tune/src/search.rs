//! The search: bound every strategy, time those that may be among the best and fit, and predict the best in full.

use std::time::Instant;

use kintsugi_plan::config::Strategy;
use kintsugi_plan::{Plan, Quantized};
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_simulate::{
    Consumption, LinkTimes, PeakMemory, Prediction, StepTimer, Timing, link_scenarios,
    uses_links_between_nodes,
};
use kintsugi_tensor::Device;
use rayon::prelude::*;

use crate::explore::{Explorer, Goal};
use crate::pick::{Pick, gains, has_room, pick};
use crate::space::left_out;
use crate::{Only, SupportedValues};

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

/// The criterion of the ranking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The shortest step.
    Time,
    /// The fewest joules.
    Energy,
    /// The Pareto front of time and energy, the fastest first.
    Pareto,
}

impl Settings<'_> {
    /// Whether the configuration or a restriction has codes. Codes change the numbers of a training.
    pub(crate) fn codes_are_asked_for(&self) -> bool {
        self.base.sharding.quantized.iter().next().is_some() || self.only.iter().any(Only::asks_for_codes)
    }

    /// Whether a strategy may be among the best.
    pub(crate) fn admits(&self, strategy: &Strategy) -> bool {
        strategy.sharding.quantized == Quantized::NONE || self.codes_are_asked_for()
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
    let (mut best, pick, counts) = loop {
        explorer.explore(&admits, Goal::Best);
        let refused = explorer.refused();
        let best = first(settings, &mut explorer);
        let pick = if settings.by == By::Pareto { None } else { pick(settings, &mut explorer) };
        // Where something was refused, other strategies may be among the best.
        if explorer.refused() == refused {
            break (best, pick, Counts { refused, ..explorer.counts(&admits) });
        }
    };
    let timed = in_order(explorer.timed().to_vec(), settings.by);
    let pick = pick.map(|candidate| {
        best.retain(|other| other.strategy != candidate.strategy);
        best.insert(0, candidate.clone());
        let gains = gains(settings, &mut explorer, &candidate);
        Pick { has_room: has_room(settings, &candidate), candidate, gains }
    });
    time_over_links(settings, &model, &mut best);
    let fastest = in_order(best.clone(), settings.by).into_iter().next();
    best.truncate(settings.top);
    let timing_s = start.elapsed().as_secs_f64();
    let counts = Counts { enumeration_s, timing_s, ..counts };
    Ok(SearchResult { best, pick, fastest, timed, counts, left_out: left_out(settings) })
}

/// The first candidates that fit by their full prediction. On a Pareto front, each needs fewer joules than the one before.
fn first(settings: &Settings, explorer: &mut Explorer) -> Vec<Candidate> {
    let admits = |strategy: &Strategy| settings.admits(strategy);
    let mut best: Vec<Candidate> = Vec::new();
    for candidate in in_order(explorer.candidates(&admits).cloned().collect(), settings.by) {
        if best.len() == settings.top {
            break;
        }
        let beaten = best.last().is_some_and(|faster| candidate.joules() >= faster.joules());
        if settings.by != By::Pareto || !beaten {
            best.extend(explorer.verified(&candidate));
        }
    }
    best
}

/// Sorts candidates: best first, or the fastest first of a Pareto front. Memory breaks ties.
fn in_order(mut candidates: Vec<Candidate>, by: By) -> Vec<Candidate> {
    let joules = Candidate::joules;
    let seconds = |candidate: &Candidate| candidate.timing.step_s;
    let keys = |candidate: &Candidate| match by {
        By::Time | By::Pareto => [seconds(candidate), joules(candidate)],
        By::Energy => [joules(candidate), seconds(candidate)],
    };
    candidates.sort_by(|a, b| {
        let ([a1, a2], [b1, b2]) = (keys(a), keys(b));
        a1.total_cmp(&b1).then(a2.total_cmp(&b2)).then(a.peak.cmp(&b.peak))
    });
    candidates
}

/// Times candidates over the range of links between nodes, if they run on several.
fn time_over_links(settings: &Settings, model: &DeviceModel, candidates: &mut [Candidate]) {
    let plan = |base: &Plan, candidate: &Candidate| {
        base.with_strategy(&candidate.strategy).expect("strategies are allowed")
    };
    if !candidates.first().is_some_and(|first| uses_links_between_nodes(&plan(settings.base, first))) {
        return;
    }
    let scenarios = link_scenarios(settings.base).map(|base| (base, StepTimer::new(model)));
    candidates.par_iter_mut().for_each(|candidate| {
        let seconds = scenarios.each_ref().map(|(base, timer)| timer.time(&plan(base, candidate)).step_s);
        candidate.links = Some(LinkTimes::new(seconds));
    });
}

/// The strategies whose peak memory is within the limit, each with its peak. The peak is never above what a full
/// prediction reserves, so no strategy that fits is dropped.
pub fn strategies_that_fit(
    base: &Plan,
    device: Device,
    all: &[Strategy],
    limit: Option<Limit>,
) -> Vec<(Strategy, u64)> {
    let peaks = PeakMemory::new(device);
    let peak = |strategy: &Strategy| {
        let plan = base.with_strategy(strategy).expect("strategies are allowed");
        let limit = limit.map_or(u64::MAX, |limit| limit.per_rank(&plan));
        if peaks.resident(&plan) > limit {
            return None;
        }
        Some((*strategy, peaks.of(&plan))).filter(|&(_, peak)| peak <= limit)
    };
    all.par_iter().filter_map(peak).collect()
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
