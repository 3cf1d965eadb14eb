//! Times the strategies that may be among the best, and leaves out the others by bounds.
//!
//! A region has the strategies that differ only in their sharding. Its bound is the time of its passes alone. Regions are visited
//! from the least bound on, so that good strategies are known early; when the next bound is worse than what is good enough, no
//! other region can matter. Inside a region each strategy has a tighter bound, with its transfers, before it is timed.

use std::collections::{HashMap, HashSet};

use kintsugi_plan::config::Strategy;
use kintsugi_plan::{Axis, Mesh, Plan};
use kintsugi_simulate::cost::{DeviceModel, StepBound};
use kintsugi_simulate::{
    CompiledStep, Consumption, Coverage, PeakMemory, StepKey, StepTimer, link_scenarios, pessimistic,
    predict, uses_links_between_nodes,
};
use rayon::prelude::*;

use crate::space::{Region, regions};
use crate::{By, Candidate, Counts, SearchPhase, SearchProgress, Settings};

/// What is good enough to be timed.
#[derive(Clone, Copy)]
pub(crate) enum Goal {
    /// The best strategies that were asked for, and all whose pessimistic value is near the least.
    Best,
    /// The least pessimistic value, if it is less than this.
    Least { below: f64 },
}

/// How much larger than the least a pessimistic value may be, for [`Goal::Best`].
pub(crate) const NEAR: f64 = 0.02;

/// The most strategies that are all timed.
const MAX_EVERY: usize = 500_000;

/// The regions visited first, and at most, before the limits are tightened.
const BATCH: [usize; 2] = [16, 512];

/// A search under way.
pub(crate) struct Explorer<'a> {
    settings: &'a Settings<'a>,
    progress: SearchProgress<'a>,
    timer: StepTimer<'a>,
    /// With slow links between nodes, and without overlap, if there are several nodes.
    scenarios: Option<[Scenario<'a>; 2]>,
    peaks: PeakMemory,
    /// From the least bound on.
    regions: Vec<(Values, Region)>,
    /// Every strategy that was timed.
    timed: Vec<Candidate>,
    /// The numbers of those, and of strategies whose peak memory exceeds the limit.
    settled: HashSet<Number>,
    /// Whether every strategy that fits is timed.
    every: bool,
    /// The regions that were reported as done.
    reported: usize,
    /// What the fullest rank takes from its device by a full prediction. `None` if the strategy does not fit by that.
    reserved: HashMap<Strategy, Option<u64>>,
}

/// The number of a region, and of a sharding in it.
type Number = [u32; 2];

/// Other links, or no overlap.
struct Scenario<'a> {
    base: Plan,
    timer: StepTimer<'a>,
}

/// What strategies are compared by.
#[derive(Clone, Copy)]
struct Values {
    step_s: f64,
    joules: f64,
}

/// A strategy beyond these limits does not matter.
struct Limits {
    by: By,
    value: f64,
    pessimistic: f64,
    /// Strategies that no other beats in both time and energy, for a Pareto front.
    front: Vec<Values>,
}

/// Which strategies are explored.
pub(crate) type Admits<'a> = &'a (dyn Fn(&Strategy) -> bool + Sync);

impl<'a> Explorer<'a> {
    pub(crate) fn new(
        settings: &'a Settings<'a>,
        model: &'a DeviceModel,
        progress: SearchProgress<'a>,
    ) -> Self {
        let timer = StepTimer::new(model);
        let base = settings.base;
        let found = regions(base, settings.ranks, settings.only, settings.supported);
        let count: usize = found.iter().map(Region::len).sum();
        let phase = SearchPhase::Bounding(found.len());
        let bounded = found.into_par_iter().map(|region| {
            progress(phase, 1, None);
            let plan = base.with_strategy(&region.plain).expect("a region is allowed without sharding");
            (Values::of_bound(&plan, timer.bound_of_passes(&plan)), region)
        });
        let mut regions: Vec<(Values, Region)> = bounded.collect();
        regions.sort_by(|(a, _), (b, _)| a.of(settings.by).total_cmp(&b.of(settings.by)));
        let replicas = Plan { mesh: Mesh::ONE.with(Axis::Data, settings.ranks), ..base.clone() };
        let scenarios = uses_links_between_nodes(&replicas).then(|| {
            let [slow, _, no_overlap] = link_scenarios(base);
            [slow, no_overlap].map(|base| Scenario { base, timer: StepTimer::new(model) })
        });
        Explorer {
            settings,
            progress,
            timer,
            scenarios,
            peaks: PeakMemory::new(settings.device),
            regions,
            timed: Vec::new(),
            settled: HashSet::new(),
            reported: 0,
            every: settings.every && count <= MAX_EVERY,
            reserved: HashMap::new(),
        }
    }

    /// How many admitted strategies there are, and what became of them.
    pub(crate) fn counts(&self, admits: Admits) -> Counts {
        let of_region = |(_, region): &(Values, Region)| region.strategies().filter(admits).count();
        let enumerated = self.regions.par_iter().map(of_region).sum::<usize>();
        let timed = self.timed.len();
        let dropped = self.settled.len() - timed;
        Counts { enumerated, bounded: enumerated - timed - dropped, dropped, timed, ..Counts::default() }
    }

    /// Every candidate that was timed.
    pub(crate) fn timed(&self) -> &[Candidate] {
        &self.timed
    }

    /// Every timed candidate that is admitted, and is not known to be refused.
    pub(crate) fn candidates(&self, admits: Admits) -> impl Iterator<Item = &Candidate> {
        self.timed.iter().filter(move |one| admits(&one.strategy) && !self.refuses(&one.strategy))
    }

    /// The candidate with its full prediction, if it fits by that. Each strategy is predicted once.
    pub(crate) fn verified(&mut self, candidate: &Candidate) -> Option<Candidate> {
        let settings = self.settings;
        let reserved = *self.reserved.entry(candidate.strategy).or_insert_with_key(|strategy| {
            let plan = settings.base.with_strategy(strategy).expect("strategies are allowed");
            let prediction = predict(&plan, settings.device, Coverage::quick(&plan)).under_framework(&plan);
            let reserved = prediction.stages.iter().map(|stage| stage.reserved).max();
            reserved.filter(|_| (settings.fits)(&plan, &prediction))
        });
        reserved.map(|reserved| Candidate { reserved: Some(reserved), ..candidate.clone() })
    }

    /// How many strategies do not fit by their full prediction.
    pub(crate) fn refused(&self) -> usize {
        self.reserved.values().filter(|reserved| reserved.is_none()).count()
    }

    fn refuses(&self, strategy: &Strategy) -> bool {
        self.reserved.get(strategy).is_some_and(Option::is_none)
    }

    /// Times every admitted strategy that the goal may need.
    pub(crate) fn explore(&mut self, admits: Admits, goal: Goal) {
        let by = self.settings.by;
        let (mut at, mut size) = (0, BATCH[0]);
        let phase = SearchPhase::Timing(self.regions.len());
        let mut limits = self.limits(admits, goal);
        while at < self.regions.len() {
            let end = (at + size).min(self.regions.len());
            let batch: Vec<usize> = (at..end).filter(|&i| limits.allow(self.regions[i].0)).collect();
            let (found, too_large) = self.time_batch(&batch, admits, &limits);
            self.settled.extend(too_large);
            if !found.is_empty() {
                self.settled.extend(found.iter().map(|&(number, _)| number));
                self.timed.extend(found.into_iter().map(|(_, candidate)| candidate));
                limits = self.limits(admits, goal);
            }
            if matches!(goal, Goal::Best) && end > self.reported {
                let best = self.candidates(admits).min_by(|a, b| a.value(by).total_cmp(&b.value(by)));
                (self.progress)(phase, end - self.reported, best);
                self.reported = end;
            }
            // Until enough strategies are known, everything that fits is timed.
            size = if limits.value.max(limits.pessimistic).is_finite() {
                (2 * size).min(BATCH[1])
            } else {
                BATCH[0]
            };
            at = end;
        }
        self.judge(admits, goal);
    }

    /// What is good enough, from what is known.
    fn limits(&self, admits: Admits, goal: Goal) -> Limits {
        let by = self.settings.by;
        let least = self.candidates(admits).filter_map(|one| one.pessimistic).fold(f64::INFINITY, f64::min);
        if let Goal::Least { below } = goal {
            let (value, pessimistic) = (f64::NEG_INFINITY, least.min(below));
            return Limits { by, value, pessimistic, front: Vec::new() };
        }
        let mut values: Vec<Values> = self.candidates(admits).map(Values::of_candidate).collect();
        values.sort_by(|a, b| a.of(by).total_cmp(&b.of(by)));
        let last = values.get(self.settings.top.saturating_sub(1)).map(|value| value.of(by));
        let value = last.filter(|_| !self.every).unwrap_or(f64::INFINITY);
        let mut front: Vec<Values> = Vec::new();
        if by == By::Pareto && !self.every {
            for value in values {
                if front.last().is_none_or(|last| value.joules < last.joules) {
                    front.push(value);
                }
            }
        }
        Limits { by, value, pessimistic: (1.0 + NEAR) * least, front }
    }

    /// Times the strategies of some regions that fit and whose bounds are within the limits, in order. Also returns the numbers of
    /// those that do not fit.
    fn time_batch(
        &self,
        batch: &[usize],
        admits: Admits,
        limits: &Limits,
    ) -> (Vec<(Number, Candidate)>, Vec<Number>) {
        let of_region = |&region: &usize| {
            let numbered = self.regions[region].1.strategies().enumerate();
            numbered.map(move |(sharding, strategy)| ([region as u32, sharding as u32], strategy))
        };
        let new = batch.par_iter().flat_map_iter(of_region);
        let new = new.filter(|(number, strategy)| admits(strategy) && !self.settled.contains(number));
        let checked: Vec<(Number, Strategy, Check)> =
            new.map(|(number, strategy)| (number, strategy, self.check(&strategy, limits))).collect();
        let mut too_large = Vec::new();
        let mut promising = Vec::new();
        for (number, strategy, check) in checked {
            match check {
                Check::TooLarge => too_large.push(number),
                Check::TooSlow => {}
                Check::Promising { peak } => promising.push(Promising { number, strategy, peak }),
            }
        }
        let mut groups: HashMap<StepKey, Vec<Promising>> = HashMap::new();
        for one in promising {
            groups.entry(StepKey::of(&self.plan(&one.strategy))).or_default().push(one);
        }
        let groups: Vec<(StepKey, Vec<Promising>)> = groups.into_iter().collect();
        let timed = groups.par_iter().with_max_len(1).flat_map_iter(|(key, group)| {
            let step = CompiledStep::new(&self.plan(&group[0].strategy));
            let one = |one: &Promising| (one.number, self.time(one, (key, &step), limits));
            group.iter().map(one).collect::<Vec<_>>()
        });
        let mut timed: Vec<(Number, Candidate)> = timed.collect();
        timed.sort_by_key(|&(number, _)| number);
        (timed, too_large)
    }

    fn check(&self, strategy: &Strategy, limits: &Limits) -> Check {
        let plan = self.plan(strategy);
        let most = self.settings.limit.map_or(u64::MAX, |limit| limit.per_rank(&plan));
        if self.peaks.resident(&plan) > most {
            return Check::TooLarge;
        }
        if !limits.allow(Values::of_bound(&plan, self.timer.bound(&plan))) {
            return Check::TooSlow;
        }
        match self.peaks.of(&plan) {
            peak if peak > most => Check::TooLarge,
            peak => Check::Promising { peak },
        }
    }

    fn time(
        &self,
        &Promising { strategy, peak, .. }: &Promising,
        (key, step): (&StepKey, &CompiledStep),
        limits: &Limits,
    ) -> Candidate {
        let plan = self.plan(&strategy);
        let timing = self.timer.time_compiled(&plan, step);
        let consumption = Consumption::new(&plan, &timing);
        let candidate = Candidate {
            strategy,
            timing,
            consumption,
            peak,
            reserved: None,
            links: None,
            pessimistic: None,
            least_pessimistic: 0.0,
        };
        self.judged(candidate, (key, step), limits.pessimistic)
    }

    /// The candidate with its pessimistic value, or with what that is at least if it is beyond the limit.
    fn judged(
        &self,
        mut candidate: Candidate,
        (key, step): (&StepKey, &CompiledStep),
        limit: f64,
    ) -> Candidate {
        let by = self.settings.by;
        let expected = candidate.value(by);
        let mut worst = expected;
        for Scenario { base, timer } in self.scenarios.iter().flatten() {
            candidate.least_pessimistic = pessimistic(expected, worst);
            if by == By::Pareto || candidate.least_pessimistic > limit {
                return candidate;
            }
            let plan = base.with_strategy(&candidate.strategy).expect("strategies are allowed");
            let same =
                StepKey::of(&plan) == *key && plan.pipeline.overlap == self.settings.base.pipeline.overlap;
            let timing = if same { timer.time_compiled(&plan, step) } else { timer.time(&plan) };
            let consumption = Consumption::new(&plan, &timing);
            worst = worst.max(Candidate { timing, consumption, ..candidate.clone() }.value(by));
        }
        candidate.pessimistic = Some(pessimistic(expected, worst));
        candidate
    }

    /// Judges the candidates that were beyond the limits of another goal, from the least value on.
    fn judge(&mut self, admits: Admits, goal: Goal) {
        loop {
            let limit = self.limits(admits, goal).pessimistic;
            let is_open = |one: &Candidate| {
                let within = one.pessimistic.is_none() && one.least_pessimistic <= limit;
                within && admits(&one.strategy) && !self.refuses(&one.strategy)
            };
            let mut open: Vec<usize> = (0..self.timed.len()).filter(|&i| is_open(&self.timed[i])).collect();
            if open.is_empty() || self.settings.by == By::Pareto {
                return;
            }
            let least = |&i: &usize| self.timed[i].least_pessimistic;
            open.sort_by(|a, b| least(a).total_cmp(&least(b)));
            open.truncate(BATCH[0]);
            let one = |&i: &usize| {
                let plan = self.plan(&self.timed[i].strategy);
                let step = CompiledStep::new(&plan);
                (i, self.judged(self.timed[i].clone(), (&StepKey::of(&plan), &step), limit))
            };
            for (i, candidate) in open.par_iter().map(one).collect::<Vec<_>>() {
                self.timed[i] = candidate;
            }
        }
    }

    fn plan(&self, strategy: &Strategy) -> Plan {
        self.settings.base.with_strategy(strategy).expect("strategies are allowed")
    }
}

/// What the bounds and the memory of a strategy say.
enum Check {
    TooLarge,
    TooSlow,
    Promising { peak: u64 },
}

/// A strategy to be timed.
struct Promising {
    number: Number,
    strategy: Strategy,
    peak: u64,
}

impl Values {
    fn of_candidate(candidate: &Candidate) -> Self {
        Values { step_s: candidate.timing.step_s, joules: candidate.joules() }
    }

    fn of_bound(plan: &Plan, bound: StepBound) -> Self {
        let joules = Consumption::least_joules(plan, bound).unwrap_or(f64::INFINITY);
        Values { step_s: bound.step_s, joules }
    }

    fn of(self, by: By) -> f64 {
        match by {
            By::Time | By::Pareto => self.step_s,
            By::Energy => self.joules,
        }
    }
}

impl Limits {
    /// Whether a strategy with these least values may matter.
    fn allow(&self, least: Values) -> bool {
        if self.by == By::Pareto {
            let beats = |other: &Values| other.step_s <= least.step_s && other.joules <= least.joules;
            return !self.front.iter().any(beats);
        }
        least.of(self.by) <= self.value.max(self.pessimistic)
    }
}
