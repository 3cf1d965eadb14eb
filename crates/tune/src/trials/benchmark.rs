//! How many trials a search needs on a table of measured layouts: every trial is a row.

use super::acquire::{Known, Models};
use super::random::{Random, mixed};
use super::space::{Point, Proposal, Space};

/// A table of measurements of one job.
#[derive(Clone, Debug)]
pub struct MeasuredJob {
    /// Its layouts.
    pub space: Space,
    /// What each was measured as, once or more; `None` for a run that failed.
    pub outcomes: Vec<Vec<Option<f64>>>,
}

/// How the next trial is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The models of a tuning.
    Tuner,
    /// The planner's order: those that are predicted to fit, the fastest first, then the others.
    PlannerOrder,
    /// The models without predictions.
    WithoutPlanner,
    /// The models with every prediction replaced by that of another layout.
    ShuffledPlanner,
    /// The models with predictions in reverse: the layout that is predicted to be slowest as the fastest.
    ReversedPlanner,
    /// At random.
    Random,
}

/// The share of the best speed that a search should find.
pub const TARGET: f64 = 0.95;

/// The predicted memory of a layout that the planner refuses, as a share of what there is.
const REFUSED: f64 = 2.0;

impl MeasuredJob {
    /// The job of some layouts, each with its runs. One that the planner refuses, so that nothing is predicted for it, is taken to
    /// be the slowest and not to fit.
    pub fn new(layouts: Vec<(Proposal, Vec<Option<f64>>)>) -> Self {
        let slowest = layouts.iter().filter_map(|(layout, _)| layout.predicted).fold(0.0, f64::max);
        let (proposals, outcomes): (Vec<Proposal>, Vec<Vec<Option<f64>>>) = layouts.into_iter().unzip();
        let predicted = |layout: Proposal| Proposal {
            predicted: layout.predicted.or(Some(slowest)),
            memory: layout.memory.or(Some(REFUSED)),
            ..layout
        };
        let proposals: Vec<Proposal> = proposals.into_iter().map(predicted).collect();
        MeasuredJob { space: Space::new(&proposals), outcomes }
    }

    /// The shortest time of a layout among the runs that the seed chooses. `None` if nothing worked.
    pub fn best(&self, seed: u64) -> Option<f64> {
        (0..self.outcomes.len()).filter_map(|index| self.outcome(index, seed)).min_by(f64::total_cmp)
    }

    /// The trials until one reaches [`TARGET`] of the best speed. `None` if nothing works.
    pub fn trials_until_good(&self, method: Method, seed: u64) -> Option<usize> {
        let good = self.best(seed)? / TARGET;
        let outcome = |index: usize| self.outcome(index, seed);
        let is_good = |index: usize| outcome(index).is_some_and(|value| value <= good);
        let order: Box<dyn FnMut() -> usize> = match method {
            Method::PlannerOrder => in_order(planner_order(&self.space)),
            Method::Random => {
                let mut order: Vec<usize> = (0..self.outcomes.len()).collect();
                Random::new(seed).shuffle(&mut order);
                in_order(order)
            }
            Method::Tuner => modelled(self.space.clone(), &outcome, seed),
            Method::WithoutPlanner => modelled(self.space.without_predictions(), &outcome, seed),
            Method::ShuffledPlanner => modelled(shuffled(&self.space, seed), &outcome, seed),
            Method::ReversedPlanner => modelled(reversed(&self.space), &outcome, seed),
        };
        let mut next = order;
        (1..=self.outcomes.len()).find(|_| is_good(next()))
    }

    /// One of the runs of a layout, which the seed chooses.
    fn outcome(&self, index: usize, seed: u64) -> Option<f64> {
        let runs = &self.outcomes[index];
        runs[mixed(index as u64, seed) as usize % runs.len()]
    }
}

fn in_order<'a>(order: Vec<usize>) -> Box<dyn FnMut() -> usize + 'a> {
    let mut order = order.into_iter();
    Box::new(move || order.next().expect("there are as many trials as layouts"))
}

/// Tries what the models propose.
fn modelled<'a>(
    space: Space,
    outcome: &'a dyn Fn(usize) -> Option<f64>,
    seed: u64,
) -> Box<dyn FnMut() -> usize + 'a> {
    let mut trials: Vec<(usize, Known)> = Vec::new();
    Box::new(move || {
        let models = Models::fit(&space, &trials);
        let next = models.propose(&space, &trials, 1, seed)[0];
        trials.push((next, outcome(next).map_or(Known::Failure, Known::Value)));
        next
    })
}

/// The points in the order in which the planner would try them.
pub fn planner_order(space: &Space) -> Vec<usize> {
    let key = |point: &Point| {
        let fits = point.memory.is_none_or(|share| share <= 1.0);
        (!fits, point.predicted.unwrap_or(f64::INFINITY))
    };
    let mut order: Vec<usize> = (0..space.points.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (key(&space.points[a]), key(&space.points[b]));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    });
    order
}

fn shuffled(space: &Space, seed: u64) -> Space {
    let mut from: Vec<usize> = (0..space.points.len()).collect();
    Random::new(seed).shuffle(&mut from);
    with_predictions_of(space, &from)
}

fn reversed(space: &Space) -> Space {
    let order = planner_order(space);
    let mut from = vec![0; order.len()];
    for (&to, &other) in order.iter().zip(order.iter().rev()) {
        from[to] = other;
    }
    with_predictions_of(space, &from)
}

/// A space where each point has the predictions of another.
fn with_predictions_of(space: &Space, from: &[usize]) -> Space {
    let point = |(point, &from): (&Point, &usize)| {
        let other = &space.points[from];
        Point { predicted: other.predicted, memory: other.memory, ..point.clone() }
    };
    Space { settings: space.settings.clone(), points: space.points.iter().zip(from).map(point).collect() }
}
