//! How far two recordings are apart, and how far they may be.

use std::collections::BTreeSet;

use kintsugi_plan::Compute;
use kintsugi_rank::Whole;
use serde::Serialize;

use super::Recording;

/// The largest differences of one recording from another, all relative.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Difference {
    /// Of a step's loss.
    pub loss: f64,
    /// Of a step's gradient norm.
    pub norm: f64,
    /// Of a parameter's gradient at the first step, in L2.
    pub gradient: f64,
    /// The parameter with that gradient.
    pub gradient_of: String,
    /// Of a parameter at the end, in L2.
    pub weight: f64,
    /// That parameter.
    pub weight_of: String,
    /// Of all parameters at the end together, in L2.
    pub all_weights: f64,
    /// Parameters of which ranks hold copies that are not the same bits: nothing brings such copies together again.
    pub torn: BTreeSet<String>,
}

/// How large each difference may be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bounds {
    /// Of losses.
    pub loss: f64,
    /// Of gradient norms.
    pub norm: f64,
    /// Of gradients.
    pub gradient: f64,
    /// Of weights.
    pub weight: WeightBound,
}

/// How the weights at the end are held.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightBound {
    /// Every parameter by itself.
    Each(f64),
    /// All of them as one vector. Adam's first steps move every element by the learning rate, whatever the size of
    /// its gradient; where that is all rounding, as in a bias that starts at zero, the sign is chance in 16 bits.
    Together(f64),
}

impl Bounds {
    /// The bounds of a precision. In 16 bits a sum rounds differently in every layout: an activation is off by half
    /// a unit in its last place (2⁻⁹ in bf16, 2⁻¹² in fp16), and gradients are sums of products of such numbers.
    pub fn of(compute: Compute) -> Self {
        match compute {
            Compute::Fp32 => {
                Bounds { loss: 1e-5, norm: 1e-4, gradient: 1e-5, weight: WeightBound::Each(1e-4) }
            }
            Compute::Bf16 => {
                Bounds { loss: 1e-3, norm: 2e-2, gradient: 3e-2, weight: WeightBound::Together(2e-2) }
            }
            Compute::Fp16 => {
                Bounds { loss: 1e-4, norm: 5e-3, gradient: 5e-3, weight: WeightBound::Together(5e-3) }
            }
        }
    }

    /// Whether a difference is within them.
    pub fn hold(&self, difference: &Difference) -> bool {
        self.broken_by(difference).is_empty()
    }

    /// The names of those that a difference breaks.
    pub fn broken_by(&self, difference: &Difference) -> Vec<&'static str> {
        let (weight, weight_bound) = match self.weight {
            WeightBound::Each(bound) => (difference.weight, bound),
            WeightBound::Together(bound) => (difference.all_weights, bound),
        };
        let pairs = [
            ("loss", difference.loss, self.loss),
            ("norm", difference.norm, self.norm),
            ("gradient", difference.gradient, self.gradient),
            ("weight", weight, weight_bound),
        ];
        // Written so that a NaN breaks them.
        let broken =
            pairs.into_iter().filter(|(_, is, bound)| !matches!(is.partial_cmp(bound), Some(o) if o.is_le()));
        let torn = (!difference.torn.is_empty()).then_some("copies");
        broken.map(|(name, ..)| name).chain(torn).collect()
    }
}

/// The largest differences of `other` from `reference`.
///
/// Softmax does not see what the key bias adds to features that are not rotated: its true gradient is zero there, and what is
/// computed is rounding alone, of which Adam makes whole steps. So where no feature is rotated, the key bias is left out of
/// per-parameter checks, and where not all are, of those of weights.
pub fn compare(reference: &Recording, other: &Recording) -> Difference {
    let series = |a: &[f64], b: &[f64]| {
        a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs().max(1e-30)).fold(0.0, worse)
    };
    let [rotated, features] = reference.rotated;
    let (gradient, gradient_of) = largest(&reference.gradients, &other.gradients, rotated > 0);
    let (weight, weight_of) = largest(&reference.weights, &other.weights, rotated == features);
    Difference {
        loss: series(&reference.losses, &other.losses),
        norm: series(&reference.norms, &other.norms),
        gradient,
        gradient_of,
        weight,
        weight_of,
        all_weights: together(&reference.weights, &other.weights),
        torn: other.torn.clone(),
    }
}

fn largest(reference: &Whole, other: &Whole, with_key_bias: bool) -> (f64, String) {
    let mut largest = (0.0, String::new());
    for (name, a) in reference.iter().filter(|(name, _)| with_key_bias || !name.ends_with("key_bias")) {
        let (difference, size) = squares(a, &other[name]);
        let relative = (difference / size.max(1e-60)).sqrt();
        if worse(largest.0, relative).to_bits() != f64::to_bits(largest.0) {
            largest = (relative, name.clone());
        }
    }
    largest
}

fn together(reference: &Whole, other: &Whole) -> f64 {
    let sums = reference.iter().map(|(name, a)| squares(a, &other[name]));
    let (difference, size) = sums.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    (difference / size.max(1e-60)).sqrt()
}

/// The squared L2 norms of `a − b` and of `a`.
fn squares(a: &[f32], b: &[f32]) -> (f64, f64) {
    let pairs = a.iter().zip(b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
    pairs.fold((0.0, 0.0), |(difference, size), (a, b)| (difference + (a - b).powi(2), size + a * a))
}

/// The larger of two, where NaN is larger than anything.
pub fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b <= a { a } else { b }
}
