//! How far apart the weights of two runs may be, if their gradients differ no more than they are allowed to.
//!
//! The bound of each element follows the reference step by step. Every gradient `g` may differ by `δ`.
//!
//! `AdamW` moves a weight by `rate · r` with `r = m̂ / (√v̂ + ε)`, where `m̂` is a weighted mean of the gradients so far and `√v̂` a
//! weighted root mean square (arXiv 1711.05101). So `r` does not depend on the size of the gradients, and if those of an
//! element are almost zero, differences as small as rounding turn it around:
//!
//! - `m̂` differs by no more than the same mean of `δ`, `D₁`, and `√v̂` by no more than the same root mean square of `δ`, `D₂`
//!   (the triangle inequality).
//! - So `r` differs by no more than `(D₁ + |r|·D₂) / (max(√v̂ − D₂, 0) + ε)`.
//! - It never differs by more than `|r| + C`: `C` is the largest `|m̂| / √v̂` that any gradients have (Cauchy–Schwarz), 1 at the
//!   first step and little more at the next ones.
//!
//! `Lion` moves a weight by `rate · sign(c)`, where `c` is a weighted mean of the gradients so far (arXiv 2302.06675). If `|c|` is
//! larger than the same mean of `δ`, both runs have the same sign. Otherwise they may be on both sides of zero, 2 apart.
//!
//! `SGD` moves a weight by `rate · b`, where `b` is a weighted sum of the gradients so far and of the decayed weights, and differs by
//! no more than the same sum of `δ` and of the earlier differences of the weight.
//!
//! `Muon` moves a matrix by `rate · s · f(d / ‖d‖)`, where the direction `d` is a weighted mean of the gradients so far, `f` is the
//! Newton–Schulz iteration and `s` a factor of the shape. If `‖d‖` differs by no more than `D`, the same mean of the bounds on the
//! L2 differences of the gradients, `d / ‖d‖` differs by no more than `2·D / ‖d‖`. An odd polynomial of a matrix amplifies a
//! difference, in L2, by no more than its largest divided difference on the singular values, which is for this iteration its slope
//! at 0, 485. No element of a difference is larger than its L2 norm, nor than twice the largest singular value, 1.2. Roundings in
//! the iteration count as differences of its input.
//!
//! The weights differ by no more than the sum over the steps of `rate` times that. Decoupled weight decay makes earlier differences
//! smaller. Rounding of the weights adds a few units in the last place per step.
//!
//! `δ` is the bound on gradients times `|g| + root mean square of the parameter's gradient`: an element is a sum of terms, and
//! rounding is relative to the terms, which are as large for an element that is almost zero as for its neighbours. The bound
//! on gradients is one on the root mean square of the errors of a parameter. The largest of its `n` errors is `√(2 ln n)` times
//! that, if they are normally distributed, and `δ` as many times as large. An element that is exactly zero has no terms, such as
//! the row of a token that does not occur.

use std::collections::BTreeMap;

use kintsugi_plan::{Compute, OptimizerKind, ParameterUpdate, Plan};
use kintsugi_rank::WholeParameters;

use super::noise::AMPLIFICATION;

/// The bounds after the steps so far.
pub(super) struct WeightBounds {
    /// The relative difference that gradients may have.
    gradient: f64,
    kind: OptimizerKind,
    /// What the optimizer does with each parameter, and whether it needs all of it at once.
    parameter_updates: BTreeMap<String, (ParameterUpdate, bool)>,
    /// The same mean of the bounds on gradients as the momentum is of gradients, for each of these parameters.
    momentum_errors: BTreeMap<String, f64>,
    /// Updates so far.
    updates: i32,
    /// `C²` without the bias corrections.
    largest_square: f64,
    parameters: BTreeMap<String, Vec<Element>>,
}

/// The state of one weight.
#[derive(Clone, Copy, Default)]
struct Element {
    /// The states of its gradient, without bias corrections.
    first: f32,
    second: f32,
    /// The states of `δ`. The second one is a mean square.
    first_error: f32,
    second_error: f32,
    /// The sum of the differences of its updates.
    bound: f32,
    /// The sum of the largest updates so far.
    moved: f32,
}

/// What one update has in common for all elements of a parameter.
#[derive(Clone, Copy)]
struct Update {
    kind: OptimizerKind,
    /// `1 − βᵗ`.
    corrections: (f64, f64),
    rate: f64,
    /// λ.
    decay: f64,
    /// `C`.
    largest: f64,
}

impl WeightBounds {
    /// Bounds of a run of a plan, whose gradients may differ by `gradient`, relatively.
    pub fn new(plan: &Plan, gradient: f64) -> Self {
        let kind = plan.optimizer.kind;
        // States in 16 bits are rounded in every step, and a state contains the last 1/(1 − β) roundings.
        let rounding = if plan.precision.states == Compute::Bf16 { f64::exp2(-8.0) } else { 0.0 };
        let roundings = |beta: f64| 1.0 / (1.0 - beta);
        let roundings = match kind {
            OptimizerKind::AdamW { betas, .. } => roundings(betas.0) + roundings(betas.1),
            OptimizerKind::Muon { momentum, betas, .. } => {
                roundings(momentum).max(roundings(betas.0) + roundings(betas.1))
            }
            OptimizerKind::Lion { betas } => roundings(betas.1),
            OptimizerKind::Sgd { momentum, .. } => roundings(momentum),
        };
        let placed = plan.units().into_iter().flat_map(|unit| plan.layout(unit).placed);
        WeightBounds {
            gradient: gradient + rounding * roundings,
            kind,
            parameter_updates: placed
                .map(|placed| {
                    let parameter = &placed.parameter;
                    let (update, whole) = (plan.optimizer.update_of(parameter), kind.needs_whole(parameter));
                    (parameter.name(), (update, whole))
                })
                .collect(),
            momentum_errors: BTreeMap::new(),
            updates: 0,
            largest_square: 0.0,
            parameters: BTreeMap::new(),
        }
    }

    /// Adds an update with these gradients, which are multiplied by `factor` before, and this learning rate.
    pub fn add(&mut self, gradients: &WholeParameters, factor: f64, rate: f64) {
        self.updates += 1;
        let (beta1, beta2) = self.kind.corrected_betas();
        let corrections = (1.0 - beta1.powi(self.updates), 1.0 - beta2.powi(self.updates));
        let earlier =
            if self.updates > 1 && beta1 > 0.0 { self.largest_square * beta1 * beta1 / beta2 } else { 0.0 };
        self.largest_square = earlier + (1.0 - beta1).powi(2) / (1.0 - beta2);
        let largest = (self.largest_square * corrections.1).sqrt() / corrections.0;
        for (name, gradients) in gradients {
            let (ParameterUpdate { lr_factor, shape_factor, weight_decay }, whole) =
                self.parameter_updates[name];
            let (rate, decay) = (rate * lr_factor * shape_factor, weight_decay);
            let update = Update { kind: self.kind, corrections, rate, decay, largest };
            let squares: f64 = gradients.iter().map(|&g| (f64::from(g) * factor).powi(2)).sum();
            let mean = (squares / gradients.len() as f64).sqrt();
            let largest_error = self.gradient * (2.0 * (gradients.len() as f64).ln()).sqrt().max(1.0);
            let elements = self.parameters.entry(name.clone());
            let elements = elements.or_insert_with(|| vec![Element::default(); gradients.len()]);
            if let (true, OptimizerKind::Muon { momentum, nesterov, .. }) = (whole, self.kind) {
                let momentum_error = self.momentum_errors.entry(name.clone()).or_default();
                let error = self.gradient * squares.sqrt();
                let step = mean_step(momentum_error, momentum, nesterov, error);
                let difference = add_muon(elements, (momentum, nesterov), gradients, factor, step);
                for element in elements {
                    element.moved += (rate * LARGEST_SINGULAR_VALUE) as f32;
                    element.bound += (rate * difference) as f32;
                }
                continue;
            }
            for (element, &gradient) in elements.iter_mut().zip(gradients) {
                let gradient = f64::from(gradient) * factor;
                let exact = gradient == 0.0;
                let error = if exact { 0.0 } else { largest_error * (gradient.abs() + mean) };
                element.add(update, gradient, error);
            }
        }
    }

    /// The bound of every weight, given the weights at the end.
    pub fn of(self, weights: &WholeParameters) -> WholeParameters {
        /// Roundings of a weight in a step of both runs: by the decay, and by the update, which itself has some.
        const ROUNDINGS: f64 = 6.0;
        let unit = ROUNDINGS * f64::from(self.updates) * f64::from(f32::EPSILON) / 2.0;
        let bound = |(element, &weight): (&Element, &f32)| {
            (f64::from(element.bound) + unit * (f64::from(weight).abs() + f64::from(element.moved))) as f32
        };
        let parameter = |(name, weights): (&String, &Vec<f32>)| {
            // Frozen weights do not differ.
            let frozen = || vec![0.0; weights.len()];
            let bounds = |elements: &Vec<Element>| elements.iter().zip(weights).map(bound).collect();
            (name.clone(), self.parameters.get(name).map_or_else(frozen, bounds))
        };
        weights.iter().map(parameter).collect()
    }
}

impl Element {
    /// Adds an update with a gradient that may differ by `error`.
    fn add(&mut self, update: Update, gradient: f64, error: f64) {
        let (most, difference) = match update.kind {
            OptimizerKind::AdamW { betas, eps } | OptimizerKind::Muon { betas, eps, .. } => {
                self.add_adamw(update, betas, eps, gradient, error)
            }
            OptimizerKind::Lion { betas } => self.add_lion(betas, gradient, error),
            OptimizerKind::Sgd { momentum, nesterov } => {
                self.add_sgd(update.decay, momentum, nesterov, gradient, error)
            }
        };
        self.moved += (update.rate * most) as f32;
        self.bound += (update.rate * difference) as f32;
    }

    /// The largest step, and the difference of the step. The same holds for the next two.
    fn add_adamw(
        &mut self,
        Update { corrections, largest, .. }: Update,
        (beta1, beta2): (f64, f64),
        epsilon: f64,
        gradient: f64,
        error: f64,
    ) -> (f64, f64) {
        let mean = next_mean(&mut self.first, beta1, gradient) / corrections.0;
        let root = (next_mean(&mut self.second, beta2, gradient * gradient) / corrections.1).sqrt();
        let mean_error = next_mean(&mut self.first_error, beta1, error) / corrections.0;
        let root_error = (next_mean(&mut self.second_error, beta2, error * error) / corrections.1).sqrt();
        if mean_error == 0.0 {
            return (largest, 0.0);
        }
        let step = mean.abs() / (root + epsilon);
        let amplified = (mean_error + step * root_error) / ((root - root_error).max(0.0) + epsilon);
        (largest, amplified.min(step + largest))
    }

    fn add_lion(&mut self, (beta1, beta2): (f64, f64), gradient: f64, error: f64) -> (f64, f64) {
        let mean = |earlier: f32, value: f64| beta1 * f64::from(earlier) + (1.0 - beta1) * value;
        let (direction, direction_error) = (mean(self.first, gradient), mean(self.first_error, error));
        next_mean(&mut self.first, beta2, gradient);
        next_mean(&mut self.first_error, beta2, error);
        let may_turn = direction_error > 0.0 && direction.abs() <= direction_error;
        (1.0, if may_turn { 2.0 } else { 0.0 })
    }

    fn add_sgd(
        &mut self,
        decay: f64,
        momentum: f64,
        nesterov: bool,
        gradient: f64,
        error: f64,
    ) -> (f64, f64) {
        let error = error + decay * f64::from(self.bound);
        let sum = |state: &mut f32, value: f64| {
            let sum = momentum * f64::from(*state) + value;
            *state = sum as f32;
            if nesterov { value + momentum * sum } else { sum }
        };
        (sum(&mut self.first, gradient.abs()), sum(&mut self.first_error, error))
    }
}

/// Of the result of the iteration.
const LARGEST_SINGULAR_VALUE: f64 = 1.21;

/// The roundings of the iteration, in units in the last place of its input.
const ITERATION_ROUNDINGS: f64 = 16.0;

/// The next momentum, and the direction.
fn mean_step(momentum: &mut f64, beta: f64, nesterov: bool, value: f64) -> f64 {
    *momentum = beta * *momentum + (1.0 - beta) * value;
    if nesterov { beta * *momentum + (1.0 - beta) * value } else { *momentum }
}

/// Adds the gradients of a matrix to its momentum. Returns by how much an element of its orthogonal matrix may differ, if the
/// direction may differ by `error` in L2.
fn add_muon(
    elements: &mut [Element],
    (beta, nesterov): (f64, bool),
    gradients: &[f32],
    factor: f64,
    error: f64,
) -> f64 {
    let mut squares = 0.0;
    for (element, &gradient) in elements.iter_mut().zip(gradients) {
        let mut momentum = f64::from(element.first);
        squares += mean_step(&mut momentum, beta, nesterov, f64::from(gradient) * factor).powi(2);
        element.first = momentum as f32;
    }
    let rounding = ITERATION_ROUNDINGS * f64::from(f32::EPSILON) / 2.0;
    let relative = 2.0 * error / squares.sqrt().max(1e-30) + rounding;
    (AMPLIFICATION * relative).min(2.0 * LARGEST_SINGULAR_VALUE)
}

/// The next value of a mean that forgets by `beta`.
fn next_mean(mean: &mut f32, beta: f64, value: f64) -> f64 {
    let next = beta * f64::from(*mean) + (1.0 - beta) * value;
    *mean = next as f32;
    next
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kintsugi_plan::config::ConfigSource;

    use super::*;
    use crate::verify::{Bounds, Recording, Reference, compare};

    /// The gradients of a bias in three steps, about 0.01, with two elements that are almost zero.
    fn gradients() -> [Vec<f64>; 3] {
        [1, 2, 3].map(|step| {
            let ordinary = |i: usize| 0.01 * (1.0 + (i * 37 % 11) as f64 / 10.0) * (1.0 + 0.1 * step as f64);
            let mut values: Vec<f64> = (0..64).map(ordinary).collect();
            values[5] = 4e-6 / f64::from(step);
            values[9] = 1e-9;
            values
        })
    }

    /// Gradients that differ by 1.3e-6, relatively, in L2: every element by as much, up or down.
    fn disturbed(gradients: &[Vec<f64>; 3]) -> [Vec<f64>; 3] {
        gradients.clone().map(|values| {
            let mean = (values.iter().map(|g| g * g).sum::<f64>() / 64.0).sqrt();
            let sign = |i: usize| if i.is_multiple_of(2) { 1.0 } else { -1.0 };
            values.iter().enumerate().map(|(i, g)| g + 1.3e-6 * mean * sign(i)).collect()
        })
    }

    fn whole(values: &[f64]) -> WholeParameters {
        WholeParameters::from([(NAME.to_owned(), values.iter().map(|&x| x as f32).collect())])
    }

    /// The recording of a run whose weights started at zero.
    fn recording(gradients: &[Vec<f64>; 3], weights: &[f64]) -> Recording {
        Recording {
            losses: vec![1.0],
            norms: vec![1.0],
            gradients: whole(&gradients[0]),
            weights: whole(weights),
            diverged: BTreeSet::new(),
            rotated: [0, 8],
        }
    }

    const RATE: f64 = 1e-3;

    const NAME: &str = "layer.0.query_weight";

    /// An optimizer by its definition, from zero. Only SGD has decay.
    fn train(plan: &Plan, gradients: &[Vec<f64>; 3]) -> Vec<f64> {
        let train = |i: usize| {
            let (mut weight, mut first, mut second) = (0.0, 0.0, 0.0);
            for (step, values) in (1..).zip(gradients) {
                let g = values[i];
                weight -= RATE
                    * match plan.optimizer.kind {
                        OptimizerKind::AdamW { betas: (beta1, beta2), eps } => {
                            first = beta1 * first + (1.0 - beta1) * g;
                            second = beta2 * second + (1.0 - beta2) * g * g;
                            let root = (second / (1.0 - beta2.powi(step))).sqrt();
                            (first / (1.0 - beta1.powi(step))) / (root + eps)
                        }
                        OptimizerKind::Lion { betas: (beta1, beta2) } => {
                            let direction: f64 = beta1 * first + (1.0 - beta1) * g;
                            first = beta2 * first + (1.0 - beta2) * g;
                            direction.signum()
                        }
                        OptimizerKind::Muon { .. } => unreachable!("a test of its own"),
                        OptimizerKind::Sgd { momentum, nesterov } => {
                            let g = g + plan.optimizer.weight_decay * weight;
                            first = momentum * first + g;
                            if nesterov { g + momentum * first } else { first }
                        }
                    };
            }
            weight
        };
        (0..64).map(train).collect()
    }

    fn reference(plan: &Plan, gradients: &[Vec<f64>; 3]) -> (Reference, Vec<f64>) {
        let bounds = Bounds::of(plan);
        let mut weight_bounds = WeightBounds::new(plan, bounds.element_gradient().expect("in fp32"));
        for values in gradients {
            weight_bounds.add(&whole(values), 1.0, RATE);
        }
        let weights = train(plan, gradients);
        let weight_bounds = Some(weight_bounds.of(&whole(&weights)));
        (Reference { recording: recording(gradients, &weights), weight_bounds }, weights)
    }

    #[test]
    fn weights_that_follow_from_small_differences_of_gradients_are_accepted() {
        let (plan, gradients) = (ConfigSource::demo().plan().expect("the demo"), gradients());
        let (reference, _) = reference(&plan, &gradients);
        let other = disturbed(&gradients);
        let difference = compare(&reference, &recording(&other, &train(&plan, &other)));
        assert!((1.2e-6..1.4e-6).contains(&difference.gradient), "{difference:?}");
        assert!(difference.weight > 1e-2, "an element turned around: {difference:?}");
        assert!(Bounds::of(&plan).hold(&difference), "{difference:?}");
    }

    #[test]
    fn a_weight_that_its_gradients_cannot_explain_is_refused() {
        let (plan, gradients) = (ConfigSource::demo().plan().expect("the demo"), gradients());
        let (reference, weights) = reference(&plan, &gradients);
        let differs = |element: usize, by: f64| {
            let mut weights = weights.clone();
            weights[element] += by;
            let difference = compare(&reference, &recording(&gradients, &weights));
            (Bounds::of(&plan).broken_by(&difference), difference.unexplained_of)
        };
        let refused = (vec!["weight"], NAME.to_owned());
        assert_eq!(differs(0, 1e-3 * RATE), refused, "an ordinary element, by a thousandth of a step");
        assert_eq!(
            differs(9, 7.0 * RATE),
            refused,
            "no gradients turn an element further than there and back"
        );
        assert_eq!(differs(0, f64::NAN), refused);
        assert!(differs(9, RATE).0.is_empty());
    }

    /// The bounds of the other optimizers, and by how much of them runs whose gradients differ are apart.
    fn shares(settings: &str, disturbed: &[Vec<f64>; 3]) -> (WholeParameters, Vec<f64>) {
        let plan = ConfigSource::demo().sets(settings.split_whitespace()).plan().expect("a legal config");
        let gradients = gradients();
        let (reference, weights) = reference(&plan, &gradients);
        let (bounds, other) = (reference.weight_bounds.expect("in fp32"), train(&plan, disturbed));
        let differences = weights.iter().zip(other).map(|(a, b)| (a - b).abs());
        let shares = differences.zip(&bounds[NAME]).map(|(by, &bound)| by / f64::from(bound)).collect();
        (bounds, shares)
    }

    #[test]
    fn lion_turns_only_where_its_direction_is_almost_zero() {
        let (bounds, shares) = shares("optimizer.name=lion", &disturbed(&gradients()));
        assert!(shares.iter().all(|&share| share <= 1.0), "{shares:?}");
        assert!(shares[9] > 0.3, "an element turned around: {shares:?}");
        let bound = |element: usize| f64::from(bounds[NAME][element]) / RATE;
        assert!((5.9..6.1).contains(&bound(9)), "there and back in each of three steps: {}", bound(9));
        assert!(bound(0) < 1e-4, "rounding alone: {}", bound(0));
    }

    #[test]
    fn sgd_amplifies_nothing_but_what_its_momentum_keeps() {
        for settings in [
            "optimizer.name=sgd",
            "optimizer.name=sgd optimizer.nesterov=true optimizer.weight_decay=10",
            "optimizer.name=sgd optimizer.momentum=0",
        ] {
            let (bounds, shares) = shares(settings, &disturbed(&gradients()));
            assert!(shares.iter().all(|&share| share <= 1.0), "{settings}: {shares:?}");
            assert!(shares[1] > 0.01, "{settings}: the bound is of the size of the difference: {shares:?}");
            // Nine gradients of 0.02 that differ by 1e-5 times √(2 ln 64) times two.
            assert!(
                bounds[NAME].iter().all(|&bound| f64::from(bound) < 2e-5 * RATE),
                "{settings}: {bounds:?}"
            );
        }
    }

    /// The iteration on a singular value.
    fn iterated(mut value: f64) -> f64 {
        for _ in 0..5 {
            let square = value * value;
            value *= 3.4445 - 4.775 * square + 2.0315 * square * square;
        }
        value
    }

    #[test]
    fn the_iteration_amplifies_no_more_than_its_slope_at_zero() {
        let values: Vec<f64> = (0..=100_000).map(|i| f64::from(i) * 1e-5).collect();
        let slope = |pair: &[f64]| ((iterated(pair[1]) - iterated(pair[0])) / (pair[1] - pair[0])).abs();
        let steepest = values.windows(2).map(slope).fold(0.0, f64::max);
        assert!((0.99..=1.0).contains(&(steepest / AMPLIFICATION)), "{steepest}");
        let largest = values.iter().map(|&value| iterated(value)).fold(0.0, f64::max);
        assert!((1.0..LARGEST_SINGULAR_VALUE).contains(&largest), "{largest}");
    }

    #[test]
    fn muon_follows_the_gradients_of_a_whole_matrix() {
        let settings = "optimizer.name=muon optimizer.nesterov=false".split_whitespace();
        let plan = ConfigSource::demo().sets(settings).plan().expect("a legal config");
        let bound_of = |gradients: &[Vec<f64>; 3]| {
            let mut bounds = WeightBounds::new(&plan, 1e-5);
            for values in gradients {
                bounds.add(&whole(values), 1.0, RATE);
            }
            f64::from(bounds.of(&whole(&[0.0; 64]))[NAME][9])
        };
        let shape_factor = 0.2 * (plan.model.hidden as f64).sqrt();
        let step = RATE * shape_factor * AMPLIFICATION;
        let constant = bound_of(&[1, 2, 3].map(|_| vec![0.01; 64])) / (3.0 * step);
        assert!((2e-5..2.3e-5).contains(&constant), "twice the bound on gradients, and rounding: {constant}");
        // The momentum nearly cancels, and what it may differ by does not.
        let signs = [1.0, -0.95, 1e-9].map(|sign| vec![0.01 * sign; 64]);
        assert!(bound_of(&signs) > 20.0 * 2e-5 * step, "{}", bound_of(&signs) / step);
    }

    #[test]
    fn an_element_without_gradients_stays() {
        let (plan, mut gradients) = (ConfigSource::demo().plan().expect("the demo"), gradients());
        for values in &mut gradients {
            values[3] = 0.0;
        }
        let (reference, _) = reference(&plan, &gradients);
        let bound = reference.weight_bounds.expect("in fp32")[NAME][3];
        assert!(f64::from(bound) < 1e-5 * RATE, "only rounding: {bound:e}");
    }
}
