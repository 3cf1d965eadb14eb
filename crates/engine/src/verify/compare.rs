//! The differences between two recordings, and their bounds.

use std::collections::BTreeSet;

use kintsugi_plan::{Compute, OptimizerKind, Plan};
use kintsugi_rank::WholeParameters;
use serde::Serialize;

use super::noise::{Noise, moved_apart};
use super::{Recording, Reference};

/// The largest relative differences between two recordings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// Largest difference of a step's loss.
    pub loss: f64,
    /// Largest difference of a step's gradient norm.
    pub norm: f64,
    /// Largest L2 difference of a parameter's gradient at the first step.
    pub gradient: f64,
    /// The parameter with that gradient.
    pub gradient_of: String,
    /// L2 difference of all gradients at the first step, as one vector.
    pub all_gradients: f64,
    /// Largest L2 difference of a parameter at the end.
    pub weight: f64,
    /// Largest difference of a weight at the end, divided by its bound in [`Reference::weight_bounds`]. 0 if there are none.
    pub unexplained: f64,
    /// The parameter with that weight.
    pub unexplained_of: String,
    /// L2 difference of all parameters at the end, as one vector.
    pub all_weights: f64,
    /// Parameters whose copies on different ranks are not bit-identical. Training never makes such copies equal again.
    #[serde(rename = "torn")]
    pub diverged: BTreeSet<String>,
}

/// How large each difference may be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bounds {
    /// Bound on losses.
    pub loss: f64,
    /// Bound on gradient norms.
    pub norm: f64,
    /// Bound on the gradients of the first step.
    pub gradient: ParameterBound,
    /// Bound on the weights at the end.
    pub weight: WeightBound,
}

/// A bound on the weights at the end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightBound {
    /// For every element by itself: what the optimizer can make of gradients that differ within their bound
    /// ([`Reference::weight_bounds`]).
    Elements,
    /// For all parameters as one vector. Adam's first steps move every element by the learning rate, whatever the size of
    /// its gradient. If the gradient is only rounding error, as for a bias that starts at zero, its sign is random in 16 bits.
    Together(f64),
}

/// A bound on the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ParameterBound {
    /// For every parameter by itself.
    Each(f64),
    /// For all parameters as one vector. A quantised gradient is rounded by the largest gradient of its block, which may be
    /// that of another parameter.
    Together(f64),
}

impl ParameterBound {
    /// Which of the two differences is bounded: of the worst parameter, or of all.
    pub fn of(self, each: f64, together: f64) -> f64 {
        match self {
            ParameterBound::Each(_) => each,
            ParameterBound::Together(_) => together,
        }
    }

    fn limit(self) -> f64 {
        match self {
            ParameterBound::Each(bound) | ParameterBound::Together(bound) => bound,
        }
    }
}

impl Bounds {
    /// The bounds of a plan: those of its precision, and what its codes add (`noise.rs`).
    pub fn of(plan: &Plan) -> Self {
        let exact = Bounds::of_precision(plan);
        match Noise::of(plan) {
            None => exact,
            Some(noise) => Bounds {
                loss: exact.loss + noise.loss,
                norm: exact.norm + noise.norm,
                gradient: ParameterBound::Together(exact.gradient.limit() + noise.gradient),
                weight: WeightBound::Together(weights_together(plan, exact.gradient.limit()) + noise.weight),
            },
        }
    }

    /// The bound on gradients from which every element's bound on its weight follows, if weights are bounded so.
    pub(super) fn element_gradient(&self) -> Option<f64> {
        (self.weight == WeightBound::Elements).then_some(self.gradient.limit())
    }

    /// The bounds of a precision. In 16 bits a sum rounds differently in every layout: an activation has an error of half
    /// a unit in its last place (2⁻⁹ in bf16, 2⁻¹² in fp16), and gradients are sums of products of such numbers.
    fn of_precision(plan: &Plan) -> Self {
        let compute = plan.precision.compute;
        let (loss, norm, gradient) = match compute {
            Compute::Fp32 => (1e-5, 1e-4, 1e-5),
            Compute::Bf16 => (1e-3, 2e-2, 3e-2),
            Compute::Fp16 => (1e-4, 5e-3, 5e-3),
        };
        let weight = match compute {
            Compute::Fp32 => WeightBound::Elements,
            Compute::Bf16 | Compute::Fp16 => WeightBound::Together(weights_together(plan, gradient)),
        };
        Bounds { loss, norm, gradient: ParameterBound::Each(gradient), weight }
    }

    /// Whether a difference is within the bounds.
    pub fn hold(&self, difference: &Difference) -> bool {
        self.broken_by(difference).is_empty()
    }

    /// The names of the bounds that a difference exceeds.
    pub fn broken_by(&self, difference: &Difference) -> Vec<&'static str> {
        let gradient = self.gradient.of(difference.gradient, difference.all_gradients);
        let (weight, weight_bound) = match self.weight {
            WeightBound::Elements => (difference.unexplained, 1.0),
            WeightBound::Together(bound) => (difference.all_weights, bound),
        };
        let pairs = [
            ("loss", difference.loss, self.loss),
            ("norm", difference.norm, self.norm),
            ("gradient", gradient, self.gradient.limit()),
            ("weight", weight, weight_bound),
        ];
        // A NaN exceeds every bound.
        let broken =
            pairs.into_iter().filter(|(_, is, bound)| !matches!(is.partial_cmp(bound), Some(o) if o.is_le()));
        let diverged = (!difference.diverged.is_empty()).then_some("copies");
        broken.map(|(name, ..)| name).chain(diverged).collect()
    }
}

/// The bound on all weights as one vector, if gradients may differ by `gradient`. Codes add to it.
fn weights_together(plan: &Plan, gradient: f64) -> f64 {
    let rounding = match plan.precision.compute {
        Compute::Fp32 => 1e-4,
        Compute::Bf16 => 2e-2,
        Compute::Fp16 => 5e-3,
    };
    match plan.optimizer.kind {
        OptimizerKind::AdamW { .. } => rounding,
        OptimizerKind::Lion { .. } | OptimizerKind::Sgd { .. } | OptimizerKind::Muon { .. } => {
            rounding + moved_apart(plan, gradient) / plan.model.init_std
        }
    }
}

/// The largest differences of `other` from `reference`.
///
/// Softmax is invariant to the key bias in features that are not rotated. The true gradient there is zero, the computed one
/// is rounding error, and Adam still makes full steps with it. So the per-parameter checks of weights skip the key bias
/// unless all features are rotated, and those of gradients skip it if no feature is rotated.
pub fn compare(
    Reference { recording: reference, weight_bounds }: &Reference,
    other: &Recording,
) -> Difference {
    let series = |a: &[f64], b: &[f64]| {
        a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs().max(1e-30)).fold(0.0, worse)
    };
    let [rotated, features] = reference.rotated;
    let (gradient, gradient_of) = largest(&reference.gradients, &other.gradients, rotated > 0);
    let (weight, _) = largest(&reference.weights, &other.weights, rotated == features);
    let unexplained =
        |bounds| largest_unexplained(bounds, &reference.weights, &other.weights, rotated == features);
    let (unexplained, unexplained_of) = weight_bounds.as_ref().map(unexplained).unwrap_or_default();
    Difference {
        loss: series(&reference.losses, &other.losses),
        norm: series(&reference.norms, &other.norms),
        gradient,
        gradient_of,
        all_gradients: together(&reference.gradients, &other.gradients),
        weight,
        unexplained,
        unexplained_of,
        all_weights: together(&reference.weights, &other.weights),
        diverged: other.diverged.clone(),
    }
}

/// The largest relative L2 difference of a parameter, and its name.
fn largest(reference: &WholeParameters, other: &WholeParameters, with_key_bias: bool) -> (f64, String) {
    worst(reference, with_key_bias, |name, a| {
        let (difference, size) = squares(a, &other[name]);
        (difference / size.max(1e-60)).sqrt()
    })
}

/// The largest difference of an element divided by its bound, and the name of its parameter.
fn largest_unexplained(
    bounds: &WholeParameters,
    reference: &WholeParameters,
    other: &WholeParameters,
    with_key_bias: bool,
) -> (f64, String) {
    worst(reference, with_key_bias, |name, a| {
        let elements = a.iter().zip(&other[name]).zip(&bounds[name]);
        let share = |((&a, &b), &bound): ((&f32, &f32), &f32)| {
            let difference = (f64::from(a) - f64::from(b)).abs();
            if difference == 0.0 { 0.0 } else { difference / f64::from(bound) }
        };
        elements.map(share).fold(0.0, worse)
    })
}

/// The worst figure of a parameter, and the name of that parameter.
fn worst(
    parameters: &WholeParameters,
    with_key_bias: bool,
    figure: impl Fn(&String, &[f32]) -> f64,
) -> (f64, String) {
    let mut worst = (0.0, String::new());
    for (name, values) in parameters.iter().filter(|(name, _)| with_key_bias || !name.ends_with("key_bias")) {
        let figure = figure(name, values);
        if worse(worst.0, figure).to_bits() != f64::to_bits(worst.0) {
            worst = (figure, name.clone());
        }
    }
    worst
}

fn together(reference: &WholeParameters, other: &WholeParameters) -> f64 {
    let sums = reference.iter().map(|(name, a)| squares(a, &other[name]));
    let (difference, size) = sums.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    (difference / size.max(1e-60)).sqrt()
}

/// The squared L2 norms of `a − b` and of `a`.
fn squares(a: &[f32], b: &[f32]) -> (f64, f64) {
    let pairs = a.iter().zip(b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
    pairs.fold((0.0, 0.0), |(difference, size), (a, b)| (difference + (a - b).powi(2), size + a * a))
}

/// The larger of two numbers. NaN is larger than any number.
pub fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b <= a { a } else { b }
}
