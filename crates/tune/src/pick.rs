//! Which of the best strategies to recommend.
//!
//! The fastest by a fraction of a percent is not a choice that a prediction can justify. What collectives reach of the links
//! between nodes is uncertain, and so is how well transfers overlap. A strategy that leans on links may lose more than it
//! seemed to gain. The pick is the strategy with the least regret over the range of links: how much longer it takes than the
//! best strategy for each of these links, at worst. Among strategies whose regret is about the same, the simplest is picked.
//! Codes change the numbers of a training, so a strategy with codes is picked only if the configuration has codes itself, or if
//! nothing else is about as fast.

use std::collections::HashSet;

use kintsugi_plan::config::Strategy;
use kintsugi_plan::{Mesh, Plan, ScheduleKind};
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_simulate::{Consumption, LinkTimes, Timing, link_scenarios, uses_links_between_nodes};

use crate::only::zero;
use crate::search::timings;
use crate::{By, Candidate, Settings};

/// Differences of regret that are ignored in favour of a simpler strategy: the uncertainty of comparing two layouts of one
/// job. Half of the runs of arXiv 2311.05610 and of vTrain are within 3 to 4 % of the median error of their job.
pub const INDIFFERENCE: f64 = 0.04;
/// The most that a pick may be slower than the fastest, by the prediction.
const MAX_GIVEN: f64 = 0.1;
/// The fastest candidates that are compared, besides the fastest of every mesh and complexity.
const FASTEST: usize = 100;

/// How complex a strategy is to run: the ZeRO stage, chunks, a split backward, uneven stages, and codes, which change the numbers.
pub fn complexity(strategy: &Strategy) -> usize {
    const ZERO: [usize; 4] = [0, 1, 3, 5];
    let split = if strategy.schedule == ScheduleKind::ZeroBubble { 2 } else { 0 };
    let uneven = usize::from(strategy.last_layers.is_some());
    let codes = 2 * strategy.sharding.quantized.iter().count();
    ZERO[zero(strategy)] + (strategy.virtual_stages - 1) + split + uneven + codes
}

/// The candidates to recommend, in order of preference. `ordered` is sorted by the criterion, and its first that fits is
/// `fastest`.
pub(crate) fn by_preference(
    settings: &Settings,
    model: &DeviceModel,
    ordered: &[Candidate],
    fastest: &Candidate,
) -> Vec<Candidate> {
    let pool = pool(settings, ordered, fastest);
    let asked = settings.base.sharding.quantized.iter().next().is_some();
    let has_codes = |candidate: &Candidate| candidate.strategy.sharding.quantized.iter().next().is_some();
    let (coded, plain): (Vec<_>, Vec<_>) = pool.into_iter().partition(|of| !asked && has_codes(of));
    [plain, coded].into_iter().flat_map(|alike| sorted(settings, model, alike)).collect()
}

/// The candidates of a pool, in order of preference.
fn sorted(settings: &Settings, model: &DeviceModel, mut pool: Vec<Candidate>) -> Vec<Candidate> {
    let values = values_over_links(settings, model, &mut pool);
    let scenarios = values.first().map_or(0, Vec::len);
    let best: Vec<f64> =
        (0..scenarios).map(|i| values.iter().map(|of| of[i]).fold(f64::INFINITY, f64::min)).collect();
    let regret =
        |of: &Vec<f64>| of.iter().zip(&best).map(|(value, best)| value / best - 1.0).fold(0.0, f64::max);
    let mut rated: Vec<(f64, Candidate)> = values.iter().map(regret).zip(pool).collect();
    let least = rated.iter().map(|&(regret, _)| regret).fold(f64::INFINITY, f64::min);
    // The simplest of those with about the least regret, then the others.
    rated.sort_by(|(a, x), (b, y)| {
        let group = |regret: f64| regret > least + INDIFFERENCE;
        let simple = |candidate: &Candidate| complexity(&candidate.strategy);
        let alike = || {
            simple(x).cmp(&simple(y)).then(criterion(settings.by, x).total_cmp(&criterion(settings.by, y)))
        };
        group(*a).cmp(&group(*b)).then_with(|| if group(*a) { a.total_cmp(b) } else { alike() })
    });
    rated.into_iter().map(|(_, candidate)| candidate).collect()
}

/// Candidates that are at most [`MAX_GIVEN`] worse than the fastest that fits: the fastest ones, and the fastest of every
/// mesh and complexity.
fn pool(settings: &Settings, ordered: &[Candidate], fastest: &Candidate) -> Vec<Candidate> {
    let best = criterion(settings.by, fastest);
    let mut seen: HashSet<(Mesh, usize)> = HashSet::new();
    let near = ordered.iter().map(|candidate| (criterion(settings.by, candidate), candidate));
    let near =
        near.filter(|&(value, _)| value >= best).take_while(|&(value, _)| value <= best * (1.0 + MAX_GIVEN));
    let kept = near.enumerate().filter(|(i, (_, candidate))| {
        seen.insert((candidate.strategy.mesh, complexity(&candidate.strategy))) || *i < FASTEST
    });
    kept.map(|(_, (_, candidate))| candidate.clone()).collect()
}

/// The criterion of every candidate by the prediction, and over the range of links.
fn values_over_links(settings: &Settings, model: &DeviceModel, pool: &mut [Candidate]) -> Vec<Vec<f64>> {
    let mut values: Vec<Vec<f64>> =
        pool.iter().map(|candidate| vec![criterion(settings.by, candidate)]).collect();
    for scenario in time_over_links(settings, model, pool) {
        let values = values.iter_mut().zip(&scenario);
        values.for_each(|(values, candidate)| values.push(criterion(settings.by, candidate)));
    }
    values
}

/// Times candidates over the range of links, and stores the times in them. Returns the candidates with the times of each
/// scenario; nothing if they run in one node.
pub(crate) fn time_over_links(
    settings: &Settings,
    model: &DeviceModel,
    pool: &mut [Candidate],
) -> Vec<Vec<Candidate>> {
    let plan = |base: &Plan, candidate: &Candidate| {
        base.with_strategy(&candidate.strategy).expect("strategies are allowed")
    };
    if !pool.first().is_some_and(|first| uses_links_between_nodes(&plan(settings.base, first))) {
        return Vec::new();
    }
    let strategies: Vec<Strategy> = pool.iter().map(|candidate| candidate.strategy).collect();
    let scenarios = link_scenarios(settings.base).map(|base| {
        let times = timings(&base, model, &strategies, &|_| {});
        let with = |(timing, candidate): (Timing, &Candidate)| {
            let consumption = Consumption::new(&plan(&base, candidate), &timing);
            Candidate { timing, consumption, ..candidate.clone() }
        };
        times.into_iter().zip(pool.iter()).map(with).collect::<Vec<_>>()
    });
    for (i, candidate) in pool.iter_mut().enumerate() {
        candidate.links = Some(LinkTimes::new(scenarios.each_ref().map(|all| all[i].timing.step_s)));
    }
    scenarios.into()
}

fn criterion(by: By, candidate: &Candidate) -> f64 {
    match by {
        By::Time | By::Pareto => candidate.timing.step_s,
        By::Energy => candidate.joules(),
    }
}

/// Why a pick is preferred to the fastest strategy, in a few words.
pub fn preference(pick: &Candidate, fastest: &Candidate) -> String {
    let percent = |ratio: f64| format!("{:.1} %", 100.0 * (ratio - 1.0));
    let slower = percent(pick.timing.step_s / fastest.timing.step_s);
    let gained = |of: fn(&LinkTimes) -> f64| {
        pick.links.zip(fastest.links).map_or(1.0, |(pick, fastest)| of(&fastest) / of(&pick))
    };
    let gains = [
        (gained(|links| links.slow_s), "with slow links between nodes"),
        (gained(|links| links.no_overlap_s), "without overlap"),
    ];
    let (gain, when) = gains[usize::from(gains[1].0 > gains[0].0)];
    let simpler = complexity(&pick.strategy) < complexity(&fastest.strategy);
    let robust = (gain > 1.01).then(|| format!("{} faster {when}", percent(gain)));
    let reasons: Vec<String> = simpler.then(|| "simpler".to_owned()).into_iter().chain(robust).collect();
    format!("{slower} slower than the fastest, but {}", reasons.join(" and "))
}
