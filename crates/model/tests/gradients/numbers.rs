//! Random numbers, and assertions: derivatives, closeness, equal bits.

use std::ops::Range;

use kintsugi_plan::parameters::{InitialValues, UnitLayout};
use kintsugi_spec::splitmix64::{GOLDEN, mix};

/// Random numbers with mean zero and variance one, determined by the seed.
pub fn random(len: usize, seed: u64) -> Vec<f64> {
    let number = |i: usize| {
        let bits = mix((seed << 32 | (i as u64 + 1)).wrapping_mul(GOLDEN));
        let unit = (bits >> 11) as f64 / (1_u64 << 53) as f64;
        (2.0 * unit - 1.0) * 3.0_f64.sqrt()
    };
    (0..len).map(number).collect()
}

/// Token ids below `vocab`; the last id occurs.
pub fn random_tokens(len: usize, vocab: usize, seed: u64) -> Vec<u32> {
    let mut tokens: Vec<u32> =
        random(len, seed).iter().map(|x| (x.abs() * 1e6) as u32 % vocab as u32).collect();
    tokens[len / 2] = vocab as u32 - 1;
    tokens
}

/// Weights of part `part` of `tp` that keep activations around one: norms near one, biases not zero, matrices scaled by
/// their inputs. The parts together are the same for every `tp`.
///
/// Vocabulary padding and buffer padding hold numbers that must not affect any result.
pub fn random_weights(layout: &UnitLayout, tp: usize, part: usize) -> Vec<f64> {
    let mut weights = vec![1e3; layout.len];
    for placed in &layout.placed {
        let parameter = &placed.parameter;
        let whole = random(parameter.valid_elements(), 100 + parameter.kind as u64);
        for (local, to) in weights[placed.range.clone()].iter_mut().enumerate() {
            if let Some(value) = whole.get(parameter.global_index(tp, part, local)) {
                *to = match parameter.initial {
                    InitialValues::Ones => 1.0 + 0.2 * value,
                    InitialValues::Zeros => 0.5 * value,
                    InitialValues::Normal(_) => value / (parameter.shape[1] as f64).sqrt(),
                };
            }
        }
    }
    weights
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Expects `gradient` to be the derivative of `f` at `at`, restricted to `range`, along a random direction.
///
/// The tolerance is relative to the norm of the gradient, since the derivative along a direction may be small by
/// chance; or to one, since some gradients are zero (without rotary positions, that of the key bias).
pub fn assert_derivative(
    what: &str,
    f: impl Fn(&[f64]) -> f64,
    at: &[f64],
    gradient: &[f64],
    range: Range<usize>,
) {
    const STEP: f64 = 1e-5;
    const TOLERANCE: f64 = 1e-6;
    let direction = random(range.len(), 77);
    let moved = |by: f64| {
        let mut moved = at.to_vec();
        moved[range.clone()].iter_mut().zip(&direction).for_each(|(x, d)| *x += by * d);
        f(&moved)
    };
    let numeric = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
    let gradient = &gradient[range.clone()];
    let (along, length) = (dot(gradient, &direction), dot(gradient, gradient).sqrt());
    let close = (numeric - along).abs() <= TOLERANCE * length.max(1.0);
    assert!(close, "{what}: {along} along the gradient of length {length}, {numeric} by differences");
}

/// Checks the derivative separately for every parameter of a unit.
pub fn assert_parameter_derivatives(
    what: &str,
    layout: &UnitLayout,
    f: impl Fn(&[f64]) -> f64,
    at: &[f64],
    gradient: &[f64],
) {
    for placed in &layout.placed {
        let what = format!("{what}, {}", placed.parameter.name());
        assert_derivative(&what, &f, at, gradient, placed.range.clone());
    }
}

/// Expects `left` and `right` to agree to `tolerance`, relative to the largest number or to one.
pub fn assert_close(what: &str, left: &[f64], right: &[f64], tolerance: f64) {
    assert_eq!(left.len(), right.len(), "{what}");
    let largest = right.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
    for (i, (l, r)) in left.iter().zip(right).enumerate() {
        assert!((l - r).abs() <= tolerance * largest, "{what}, element {i}: {l} against {r}");
    }
}

/// Expects the same bits.
pub fn assert_same(what: &str, left: &[f64], right: &[f64]) {
    assert_eq!(left.len(), right.len(), "{what}");
    let differs = left.iter().zip(right).position(|(l, r)| l.to_bits() != r.to_bits());
    assert_eq!(differs, None, "{what}: the first element with other bits");
}
