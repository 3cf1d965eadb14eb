//! What trials teach about points that were not tried: a Gaussian process with a trend.
//!
//! A value is `slope · x + level + residual + noise`, where `x` is what the planner says of a point (the logarithm of its
//! predicted time). Slope and level are learned from a prior around what the planner claims; the residual is a function of
//! the settings. Its covariance has two parts: one that every setting adds on its own, so that one trial with a slow value
//! of a setting says something about all points with that value, and one for points that are alike in all settings.
//!
//! The smoothness, the noise and whether the planner is to be trusted at all are chosen by the evidence of the trials
//! (Rasmussen and Williams, Gaussian Processes for Machine Learning, chapter 5), the size of residuals by a conjugate prior.

use super::cholesky::{Cholesky, dot};
use super::space::Space;

/// The covariance of residuals.
#[derive(Clone, Debug)]
struct Kernel {
    /// For each setting, the number of its values.
    levels: Vec<usize>,
    /// For each setting, the similarity of each pair of its values, row by row.
    similar: Vec<Vec<f64>>,
}

/// The share of the covariance that settings add on their own.
const SEPARATE: f64 = 0.5;

impl Kernel {
    /// Values of a setting that are `reach` apart have a similarity of 1/e.
    fn new(space: &Space, reach: f64) -> Self {
        let table = |setting: &super::space::Setting| {
            let count = setting.values.len();
            let pair = |i: usize| (-setting.distance(i / count, i % count) / reach).exp();
            (0..count * count).map(pair).collect()
        };
        Kernel {
            levels: space.settings.iter().map(|setting| setting.values.len()).collect(),
            similar: space.settings.iter().map(table).collect(),
        }
    }

    fn similarities<'a>(&'a self, a: &'a [u16], b: &'a [u16]) -> impl Iterator<Item = f64> + 'a {
        let pairs = a.iter().zip(b).zip(self.levels.iter().zip(&self.similar));
        pairs.map(|((&a, &b), (&count, table))| table[a as usize * count + b as usize])
    }

    /// The part for points that are alike in all settings.
    fn joint(&self, a: &[u16], b: &[u16]) -> f64 {
        (1.0 - SEPARATE) * self.similarities(a, b).product::<f64>()
    }

    fn between(&self, a: &[u16], b: &[u16]) -> f64 {
        let (mut sum, mut product) = (0.0, 1.0);
        for similar in self.similarities(a, b) {
            sum += similar;
            product *= similar;
        }
        let separate = if self.levels.is_empty() { 1.0 } else { sum / self.levels.len() as f64 };
        SEPARATE * separate + (1.0 - SEPARATE) * product
    }
}

/// A trial as the process sees it.
#[derive(Clone, Debug)]
pub struct Observation<'a> {
    /// Its point, see [`super::Point::levels`].
    pub levels: &'a [u16],
    /// What the planner says.
    pub trend: f64,
    /// What was measured.
    pub value: f64,
}

/// What is believed before any trial. Deviations are those of normal distributions.
#[derive(Clone, Copy, Debug)]
pub struct Prior {
    /// The expected slope of the trend.
    pub slope: f64,
    /// How far the slope may be from that.
    pub slope_deviation: f64,
    /// How far the level may be from zero.
    pub level_deviation: f64,
    /// The expected size of residuals.
    pub residual: f64,
    /// The probability that this prior is the right one.
    pub probability: f64,
}

/// So many trials weigh as much as the expected size of residuals.
const STRENGTH: f64 = 6.0;
/// Distances over which values of a setting stay similar.
const REACHES: [f64; 3] = [1.5, 4.0, 10.0];
/// The variance of the noise as a share of that of residuals.
const NOISES: [f64; 3] = [0.03, 0.15, 0.5];

/// Trials that decide on the parameters.
const MAX_FOR_EVIDENCE: usize = 150;

/// What is believed of a point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Belief {
    /// The expected value.
    pub mean: f64,
    /// The standard deviation of the value, without noise.
    pub deviation: f64,
}

/// The covariance of some points, the variance of the noise, and the slope of the trend before any trial.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ProcessParameters {
    /// Row by row.
    pub covariance: Vec<Vec<f64>>,
    /// The variance of the noise.
    pub noise: f64,
    /// The expected slope.
    pub slope: f64,
}

/// A fitted process.
#[derive(Clone, Debug)]
pub struct Process {
    prior: Prior,
    kernel: Kernel,
    noise: f64,
    /// The variance of residuals.
    variance: f64,
    /// The variances of the level and of the slope, as shares of that of residuals.
    trend_variances: [f64; 2],
    trials: Vec<Vec<u16>>,
    trends: Vec<f64>,
    factor: Cholesky,
    weights: Vec<f64>,
    /// Sums over the trials of their weights, and of their weights times their trend.
    weight_sums: [f64; 2],
    /// For each setting and each of its values, what trials add to the mean on account of it alone.
    effects: Vec<Vec<f64>>,
}

impl Process {
    /// Fits a process to trials. Of the priors, the one that explains the trials best is taken. Of many trials, an even selection
    /// decides on the parameters.
    pub fn fit(space: &Space, priors: &[Prior], observations: &[Observation]) -> Self {
        let step = observations.len().div_ceil(MAX_FOR_EVIDENCE).max(1);
        let selection: Vec<Observation> = observations.iter().step_by(step).cloned().collect();
        let of_reach = |&reach: &f64| {
            let kernel = Kernel::new(space, reach);
            let covariance = residual_covariance(&kernel, &selection);
            let parameters = NOISES.iter().flat_map(|&noise| priors.iter().map(move |&prior| (noise, prior)));
            let fits = parameters
                .filter_map(|(noise, prior)| Process::new(&kernel, &covariance, noise, prior, &selection));
            fits.collect::<Vec<_>>()
        };
        let best = REACHES.iter().flat_map(of_reach).max_by(|(a, _), (b, _)| a.total_cmp(b));
        let (_, best) = best.expect("a covariance with noise is positive definite");
        if step == 1 {
            return best;
        }
        let covariance = residual_covariance(&best.kernel, observations);
        let whole = Process::new(&best.kernel, &covariance, best.noise, best.prior, observations);
        whole.expect("a covariance with noise is positive definite").1
    }

    /// A process with these parameters, and the logarithm of their evidence.
    fn new(
        kernel: &Kernel,
        covariance: &[f64],
        noise: f64,
        prior: Prior,
        observations: &[Observation],
    ) -> Option<(f64, Self)> {
        let n = observations.len();
        let scale = prior.residual * prior.residual;
        let trend_variances = [prior.level_deviation, prior.slope_deviation].map(|d| d * d / scale);
        let mut all = covariance.to_vec();
        for i in 0..n {
            for j in 0..=i {
                let product = observations[i].trend * observations[j].trend;
                all[i * n + j] += trend_variances[0] + trend_variances[1] * product;
            }
            all[i * n + i] += noise;
        }
        let factor = Cholesky::new(all, n)?;
        let unexplained: Vec<f64> =
            observations.iter().map(|trial| trial.value - prior.slope * trial.trend).collect();
        let weights = factor.solve(&unexplained);
        let freedom = STRENGTH + n as f64;
        let spread = STRENGTH * scale + dot(&unexplained, &weights);
        let evidence = prior.probability.ln() - 0.5 * factor.log_determinant()
            + 0.5 * STRENGTH * (STRENGTH * scale).ln()
            - 0.5 * freedom * spread.ln();
        let trials: Vec<Vec<u16>> = observations.iter().map(|trial| trial.levels.to_vec()).collect();
        let trends: Vec<f64> = observations.iter().map(|trial| trial.trend).collect();
        let process = Process {
            weight_sums: [weights.iter().sum(), dot(&weights, &trends)],
            effects: effects(kernel, &trials, &weights),
            variance: spread / freedom,
            kernel: kernel.clone(),
            prior,
            noise,
            trend_variances,
            trials,
            trends,
            factor,
            weights,
        };
        Some((evidence, process))
    }

    /// The learned slope of the trend.
    pub fn slope(&self) -> f64 {
        self.prior.slope + self.trend_variances[1] * self.weight_sums[1]
    }

    /// The expected value of a point, and the index of the trial that is most like it.
    fn mean_and_nearest(&self, levels: &[u16], trend: f64) -> (f64, Option<usize>) {
        let [level, slope] = self.trend_variances;
        let mut mean = self.prior.slope * trend
            + level * self.weight_sums[0]
            + slope * trend * self.weight_sums[1]
            + self.effects.iter().zip(levels).map(|(effects, &at)| effects[at as usize]).sum::<f64>();
        let mut nearest = (None, 0.0);
        for (i, (trial, weight)) in self.trials.iter().zip(&self.weights).enumerate() {
            let joint = self.kernel.joint(levels, trial);
            mean += weight * joint;
            if joint > nearest.1 {
                nearest = (Some(i), joint);
            }
        }
        (mean, nearest.0)
    }

    /// The expected value of a point.
    pub fn mean(&self, levels: &[u16], trend: f64) -> f64 {
        self.mean_and_nearest(levels, trend).0
    }

    /// The expected value, and a bound on the deviation: what it would be if only the trial that is most like the point
    /// were known. More trials never make a process less certain.
    pub fn bound(&self, levels: &[u16], trend: f64) -> Belief {
        let (mean, nearest) = self.mean_and_nearest(levels, trend);
        let before = self.variance_before(trend);
        let learned = nearest.map_or(0.0, |i| {
            let shared = self.covariance(levels, trend, i);
            shared * shared / (self.variance_before(self.trends[i]) + self.noise)
        });
        Belief { mean, deviation: (self.variance * (before - learned).max(0.0)).sqrt() }
    }

    /// What is believed of a point.
    pub fn belief(&self, levels: &[u16], trend: f64) -> Belief {
        let shared: Vec<f64> = (0..self.trials.len()).map(|i| self.covariance(levels, trend, i)).collect();
        let mean = self.prior.slope * trend + dot(&shared, &self.weights);
        let half = self.factor.forward(&shared);
        let left = self.variance_before(trend) - dot(&half, &half);
        Belief { mean, deviation: (self.variance * left.max(0.0)).sqrt() }
    }

    /// What the beliefs of some points follow from, to compute them elsewhere.
    pub fn parameters(&self, points: &[(&[u16], f64)]) -> ProcessParameters {
        let [level, slope] = self.trend_variances;
        let between = |a: &(&[u16], f64), b: &(&[u16], f64)| {
            self.variance * (self.kernel.between(a.0, b.0) + level + slope * a.1 * b.1)
        };
        ProcessParameters {
            covariance: points.iter().map(|a| points.iter().map(|b| between(a, b)).collect()).collect(),
            noise: self.variance * self.noise,
            slope: self.prior.slope,
        }
    }

    /// The variance of a point before any trial, as a share of that of residuals.
    fn variance_before(&self, trend: f64) -> f64 {
        1.0 + self.trend_variances[0] + self.trend_variances[1] * trend * trend
    }

    fn covariance(&self, levels: &[u16], trend: f64, trial: usize) -> f64 {
        let [level, slope] = self.trend_variances;
        self.kernel.between(levels, &self.trials[trial]) + level + slope * trend * self.trends[trial]
    }
}

/// The lower triangle of the residuals' covariance.
fn residual_covariance(kernel: &Kernel, observations: &[Observation]) -> Vec<f64> {
    let n = observations.len();
    let mut covariance = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            covariance[i * n + j] = kernel.between(observations[i].levels, observations[j].levels);
        }
    }
    covariance
}

fn effects(kernel: &Kernel, trials: &[Vec<u16>], weights: &[f64]) -> Vec<Vec<f64>> {
    let share = SEPARATE / kernel.levels.len().max(1) as f64;
    let of = |setting: usize| {
        let (count, table) = (kernel.levels[setting], &kernel.similar[setting]);
        let mut sums = vec![0.0; count];
        for (trial, weight) in trials.iter().zip(weights) {
            let row = &table[trial[setting] as usize * count..][..count];
            sums.iter_mut().zip(row).for_each(|(sum, similar)| *sum += share * weight * similar);
        }
        sums
    };
    (0..kernel.levels.len()).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::super::space::Proposal;
    use super::*;

    const EXACT: Prior =
        Prior { slope: 1.0, slope_deviation: 0.5, level_deviation: 1.0, residual: 0.3, probability: 1.0 };

    /// Points with two counts and a word.
    fn space() -> Space {
        let mut proposals = Vec::new();
        for a in [1, 2, 4, 8, 16] {
            for b in [1, 2, 4] {
                for word in ["x", "y"] {
                    let pairs = [("a", a.to_string()), ("b", b.to_string()), ("w", word.to_owned())];
                    let values = pairs.map(|(key, value)| (key.to_owned(), value)).into();
                    proposals.push(Proposal { values, ..Proposal::default() });
                }
            }
        }
        Space::new(&proposals)
    }

    /// A trend that differs between all points.
    fn trend(index: usize) -> f64 {
        0.03 * (index * 7 % 30) as f64
    }

    fn observe<'a>(space: &'a Space, which: &[usize], value: &dyn Fn(usize) -> f64) -> Vec<Observation<'a>> {
        let one =
            |&i: &usize| Observation { levels: &space.points[i].levels, trend: trend(i), value: value(i) };
        which.iter().map(one).collect()
    }

    #[test]
    fn one_trial_gives_the_posterior_of_the_textbook() {
        let space = space();
        let kernel = Kernel::new(&space, 2.0);
        let trial = observe(&space, &[3], &|_| 0.7);
        let covariance = residual_covariance(&kernel, &trial);
        let (_, process) = Process::new(&kernel, &covariance, 0.1, EXACT, &trial).expect("positive");
        // By hand: k is the covariance of point and trial, v the variance of the trial, y what the prior does not explain.
        let (level, slope) = (1.0 / 0.09, 0.25 / 0.09);
        let (x, x0) = (trend(8), trend(3));
        let k = kernel.between(&space.points[8].levels, &space.points[3].levels) + level + slope * x * x0;
        let (v, y) = (1.0 + level + slope * x0 * x0 + 0.1, 0.7 - x0);
        let variance = (6.0 * 0.09 + y * y / v) / 7.0;
        let belief = process.belief(&space.points[8].levels, x);
        assert!((belief.mean - (x + k * y / v)).abs() < 1e-12, "{belief:?}");
        let left = 1.0 + level + slope * x * x - k * k / v;
        assert!((belief.deviation - (variance * left).sqrt()).abs() < 1e-9, "{belief:?}");
    }

    #[test]
    fn a_known_function_is_found_from_half_of_its_points() {
        let space = space();
        // A slope of 0.8, a level of 0.2, and a setting that costs 0.3.
        let truth = |i: usize| {
            let costly = space.settings[2].values[space.points[i].levels[2] as usize] == "y";
            0.2 + 0.8 * trend(i) + if costly { 0.3 } else { 0.0 }
        };
        let which: Vec<usize> = (0..30).filter(|i| i % 2 == i / 2 % 2).collect();
        let process = Process::fit(&space, &[EXACT], &observe(&space, &which, &truth));
        for i in 0..30 {
            let belief = process.belief(&space.points[i].levels, trend(i));
            assert!((belief.mean - truth(i)).abs() < 0.06, "{i}: {belief:?}, {}", truth(i));
            assert!((belief.mean - truth(i)).abs() < 4.0 * belief.deviation + 0.02, "{i}: {belief:?}");
        }
        assert!((process.slope() - 0.8).abs() < 0.15, "{}", process.slope());
    }

    #[test]
    fn the_quick_bound_has_the_same_mean_and_no_smaller_deviation() {
        let space = space();
        let mut random = Random::new(5);
        for trials in 0..12 {
            let which: Vec<usize> = (0..trials).map(|_| random.below(30)).collect();
            let noise: Vec<f64> = (0..30).map(|_| random.below(1000) as f64 / 1000.0).collect();
            let process = Process::fit(&space, &[EXACT], &observe(&space, &which, &|i| noise[i]));
            for (i, point) in space.points.iter().enumerate() {
                let (exact, bound) =
                    (process.belief(&point.levels, trend(i)), process.bound(&point.levels, trend(i)));
                assert!((exact.mean - bound.mean).abs() < 1e-9, "{exact:?} {bound:?}");
                assert!(bound.deviation >= exact.deviation - 1e-9, "{exact:?} {bound:?}");
                assert!((process.mean(&point.levels, trend(i)) - exact.mean).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn a_prior_that_explains_nothing_is_given_up() {
        let space = space();
        let ignored = Prior { slope: 0.0, slope_deviation: 1e-3, probability: 0.05, ..EXACT };
        let which: Vec<usize> = (0..30).step_by(2).collect();
        let trusted = Process::fit(&space, &[EXACT, ignored], &observe(&space, &which, &|i| trend(i) + 0.1));
        assert!(trusted.slope() > 0.8, "{}", trusted.slope());
        let stubborn = Prior { slope_deviation: 0.05, ..EXACT };
        let reversed = Process::fit(&space, &[stubborn, ignored], &observe(&space, &which, &|i| -trend(i)));
        assert!(reversed.slope().abs() < 0.2, "{}", reversed.slope());
    }
}
