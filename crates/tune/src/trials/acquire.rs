//! Which point to try next: the one with the largest expected improvement that is likely to work.
//!
//! Two processes are fitted. One is of the logarithm of the objective, on the trials that worked. The other is of whether a
//! trial works, on all of them, around the predicted memory: a failure says that points like it fail too, and a point that
//! is predicted to need more memory than there is has to be worth the risk.

use rayon::prelude::*;

use super::random::mixed;
use super::space::{Point, Space};
use super::surrogate::{Belief, Observation, Prior, Process};

/// What is known of a point of the space.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Known {
    /// It was measured: the objective.
    Value(f64),
    /// The trial failed.
    Failure,
    /// The trial has not ended yet.
    Pending,
}

/// Trials that are known, by the index of their point.
pub type Trials = [(usize, Known)];

/// The planner is right but for a factor, an exponent and residuals of the size of its usual errors.
const TRUSTED: Prior =
    Prior { slope: 1.0, slope_deviation: 0.25, level_deviation: 0.7, residual: 0.12, probability: 0.95 };
/// The planner says nothing about the order.
const IGNORED: Prior =
    Prior { slope: 0.0, slope_deviation: 1e-3, level_deviation: 3.0, residual: 0.5, probability: 0.05 };
/// Whether trials work: 1 if they do and −1 if they do not. What the predicted memory says is the trend.
const WORKS: Prior =
    Prior { slope: 1.0, slope_deviation: 0.5, level_deviation: 0.5, residual: 0.6, probability: 0.9 };
/// Predicted memory says nothing about whether trials work.
const WORKS_ANYHOW: Prior =
    Prior { slope: 0.0, slope_deviation: 1e-3, level_deviation: 0.5, residual: 0.6, probability: 0.1 };
/// The share by which a predicted memory is off, usually.
const MEMORY_ERROR: f64 = 0.1;
/// The trend of a point whose memory is not known: it probably fits.
const UNKNOWN_MEMORY: f64 = 0.5;
/// The deviation of what is reported of a trial (1 or −1) from what decides whether others like it work.
const CHANCE: f64 = 0.4;
/// The number of candidates whose exact belief is computed at once.
const BATCH: usize = 64;

/// The models of one moment of a tuning.
pub struct Models {
    values: Process,
    works: Process,
    /// The logarithm of the prediction that trends are relative to.
    center: Option<f64>,
    /// What is subtracted from the logarithms of values.
    reference: f64,
    /// The best mean of a point that worked.
    best: Option<f64>,
}

impl Models {
    /// Fits the models to trials.
    pub fn fit(space: &Space, trials: &Trials) -> Self {
        let known = |point: &Point| point.predicted.map(f64::ln);
        let best_predicted = space.points.iter().filter_map(known).min_by(f64::total_cmp);
        let all_predicted = space.points.iter().all(|point| point.predicted.is_some());
        let center = best_predicted.filter(|_| all_predicted);
        let mut models = Models::of(space, center, trials, &[]);
        // A trial that is under way is taken to end as it is expected to.
        let pending = trials.iter().filter(|(_, known)| *known == Known::Pending);
        let believed: Vec<(usize, f64)> =
            pending.map(|&(at, _)| (at, models.relative(&space.points[at]).mean)).collect();
        if !believed.is_empty() {
            models = Models::of(space, center, trials, &believed);
        }
        models
    }

    fn of(space: &Space, center: Option<f64>, trials: &Trials, believed: &[(usize, f64)]) -> Self {
        let measured = trials.iter().filter_map(|&(index, known)| match known {
            Known::Value(value) => Some((index, value.ln())),
            Known::Failure | Known::Pending => None,
        });
        let measured: Vec<(usize, f64)> = measured.collect();
        let mean = || measured.iter().map(|(_, value)| value).sum::<f64>() / measured.len().max(1) as f64;
        let reference = center.unwrap_or_else(mean);
        let believed = believed.iter().map(|&(index, value)| (index, value + reference));
        let observe = |(index, value): (usize, f64)| {
            let point: &Point = &space.points[index];
            Observation { levels: &point.levels, trend: trend(point, center), value: value - reference }
        };
        let observations: Vec<Observation> = measured.iter().copied().chain(believed).map(observe).collect();
        let priors = if center.is_some() { &[TRUSTED, IGNORED][..] } else { &[IGNORED] };
        let values = Process::fit(space, priors, &observations);
        let outcomes: Vec<Observation> = trials
            .iter()
            .filter_map(|&(index, known)| {
                let point = &space.points[index];
                let value = match known {
                    Known::Value(_) => 1.0,
                    Known::Failure => -1.0,
                    Known::Pending => return None,
                };
                Some(Observation { levels: &point.levels, trend: memory_trend(point), value })
            })
            .collect();
        let works = Process::fit(space, &[WORKS, WORKS_ANYHOW], &outcomes);
        let mut models = Models { values, works, center, reference, best: None };
        let worked = trials.iter().filter(|(_, known)| matches!(known, Known::Value(_)));
        models.best =
            worked.map(|&(index, _)| models.relative(&space.points[index]).mean).min_by(f64::total_cmp);
        models
    }

    /// What is believed of the logarithm of a point's objective, relative to a reference.
    fn relative(&self, point: &Point) -> Belief {
        self.values.belief(&point.levels, trend(point, self.center))
    }

    /// What is believed of the logarithm of a point's objective.
    pub fn expected(&self, point: &Point) -> Belief {
        let belief = self.relative(point);
        Belief { mean: belief.mean + self.reference, ..belief }
    }

    /// The probability that a point works.
    pub fn chance(&self, point: &Point) -> f64 {
        let Belief { mean, deviation } = self.works.belief(&point.levels, memory_trend(point));
        normal_below(mean / deviation.hypot(CHANCE))
    }

    /// The learned exponent of predictions; `None` without them.
    pub fn slope(&self) -> Option<f64> {
        self.center.map(|_| self.values.slope())
    }

    /// How much a trial of a point is worth, as a logarithm: the expected improvement over the best that is known, or
    /// the expected speed before anything has worked.
    fn worth(&self, belief: Belief) -> f64 {
        match self.best {
            Some(best) => log_expected_improvement(best, belief),
            None => -belief.mean,
        }
    }

    /// The points that are worth a trial, the best first, at most `most`. Points that were tried are left out. Of points that
    /// are worth the same, the seed decides.
    pub fn propose(&self, space: &Space, trials: &Trials, most: usize, seed: u64) -> Vec<usize> {
        let order = |a: &(f64, usize), b: &(f64, usize)| {
            let tie = |index: usize| mixed(index as u64, seed);
            b.0.total_cmp(&a.0).then_with(|| tie(a.1).cmp(&tie(b.1)))
        };
        let mut is_tried = vec![false; space.points.len()];
        for &(index, _) in trials {
            is_tried[index] = true;
        }
        let open: Vec<usize> = (0..space.points.len()).filter(|&index| !is_tried[index]).collect();
        let bounded = open.into_par_iter().map(|index| {
            let point = &space.points[index];
            (self.worth(self.values.bound(&point.levels, trend(point, self.center))), index)
        });
        let mut bounded: Vec<(f64, usize)> = bounded.collect();
        bounded.sort_by(order);
        let mut found: Vec<(f64, usize)> = Vec::new();
        for batch in bounded.chunks(BATCH) {
            // No point that is left can be worth more than the least of those that were found.
            if found.len() >= most && found[most - 1].0 >= batch[0].0 {
                break;
            }
            let exact = batch.par_iter().map(|&(_, index)| {
                let point = &space.points[index];
                (self.worth(self.relative(point)) + self.chance(point).ln(), index)
            });
            found.extend(exact.collect::<Vec<_>>());
            found.sort_by(order);
            found.truncate(most);
        }
        found.into_iter().map(|(_, index)| index).collect()
    }
}

/// What the planner says of a point's objective: the logarithm, relative to its best.
fn trend(point: &Point, center: Option<f64>) -> f64 {
    center.zip(point.predicted).map_or(0.0, |(center, predicted)| predicted.ln() - center)
}

/// What the predicted memory says of whether a point works, from −1 to 1.
fn memory_trend(point: &Point) -> f64 {
    point.memory.map_or(UNKNOWN_MEMORY, |share| (-share.ln() / MEMORY_ERROR).tanh())
}

/// The logarithm of the expected improvement of a value below `best`. Without a loss of precision where it is tiny.
fn log_expected_improvement(best: f64, Belief { mean, deviation }: Belief) -> f64 {
    let deviation = deviation.max(1e-9);
    let z = (best - mean) / deviation;
    let density = (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let factor = if z > -6.0 {
        (density + z * normal_below(z)).ln()
    } else {
        // Mills' ratio: the two terms above cancel.
        -0.5 * z * z - 0.5 * (2.0 * std::f64::consts::PI).ln() - 2.0 * (-z).ln()
    };
    deviation.ln() + factor
}

/// The probability that a standard normal variable is below `z`.
fn normal_below(z: f64) -> f64 {
    0.5 * libm::erfc(-z / std::f64::consts::SQRT_2)
}

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::super::space::Proposal;
    use super::*;

    /// Points with three settings, whose predictions are off by a factor that one setting decides.
    fn space(count: usize) -> Space {
        let proposal = |i: usize| {
            let pairs = [("tp", 1 << (i % 4)), ("micro", 1 << (i / 4 % 5)), ("rest", 1 + i / 20)];
            let values = pairs.map(|(key, value)| (key.to_owned(), value.to_string())).into();
            let predicted = 1.0 + (i * 37 % count) as f64 / count as f64;
            Proposal { values, predicted: Some(predicted), memory: Some(0.5 + (i % 9) as f64 / 10.0) }
        };
        Space::new(&(0..count).map(proposal).collect::<Vec<_>>())
    }

    fn known(space: &Space, count: usize) -> Vec<(usize, Known)> {
        let mut order: Vec<usize> = (0..space.points.len()).collect();
        Random::new(11).shuffle(&mut order);
        let one = |index: usize| {
            let point = &space.points[index];
            let factor = if point.levels[2] > 1 { 1.3 } else { 0.9 };
            let value = point.predicted.expect("it is predicted") * factor;
            (index, if point.memory > Some(1.2) { Known::Failure } else { Known::Value(value) })
        };
        order.into_iter().take(count).map(one).collect()
    }

    #[test]
    fn the_proposal_is_the_best_of_all_points() {
        let space = space(400);
        for count in [0, 1, 7, 40] {
            let mut trials = known(&space, count);
            if let Some(last) = trials.last_mut() {
                last.1 = Known::Pending;
            }
            let models = Models::fit(&space, &trials);
            let worth = |index: usize| {
                let point = &space.points[index];
                models.worth(models.relative(point)) + models.chance(point).ln()
            };
            let open = (0..400).filter(|index| trials.iter().all(|(tried, _)| tried != index));
            let best = open.map(worth).max_by(f64::total_cmp).expect("there are points");
            let proposed = models.propose(&space, &trials, 3, 0);
            assert!((worth(proposed[0]) - best).abs() < 1e-9, "{count}");
            assert_eq!(proposed.len(), 3);
        }
    }

    #[test]
    fn a_point_that_needs_too_much_memory_is_avoided_until_it_is_worth_it() {
        let point = |predicted: f64, memory: f64, tp: usize| Proposal {
            values: [("tp".to_owned(), tp.to_string())].into(),
            predicted: Some(predicted),
            memory: Some(memory),
        };
        let space = Space::new(&[point(1.0, 1.5, 1), point(1.1, 0.5, 2), point(1.3, 0.4, 4)]);
        let first = Models::fit(&space, &[]).propose(&space, &[], 1, 0);
        assert_eq!(first, [1]);
        let models = Models::fit(&space, &[(1, Known::Failure)]);
        assert!(models.chance(&space.points[1]) < models.chance(&space.points[2]));
        assert!(Models::fit(&space, &[]).chance(&space.points[1]) > 0.8);
    }

    #[test]
    fn expected_improvement_is_that_of_a_normal_distribution() {
        // At the best value itself it is the deviation over the root of 2π.
        let at = |mean: f64, deviation: f64| log_expected_improvement(0.0, Belief { mean, deviation });
        assert!((at(0.0, 2.0) - (2.0 / (2.0 * std::f64::consts::PI).sqrt()).ln()).abs() < 1e-12);
        assert!((at(-5.0, 0.01) - 5.0_f64.ln()).abs() < 1e-9, "a sure gain of 5");
        // The two ways to compute a tiny one meet.
        assert!((at(5.999, 1.0) - at(6.001, 1.0)).abs() < 0.08 && at(40.0, 1.0).is_finite());
    }
}
