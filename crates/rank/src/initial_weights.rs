//! Initial weights from a counter-based random generator. The value of an element depends only on the seed, its parameter
//! and its index in the whole parameter, so every layout starts from the same weights.

use kintsugi_plan::parameters::InitialValues;
use kintsugi_spec::splitmix64::{GOLDEN, mix};

use crate::{Elements, Store, StoreError, StoredTensor};

/// The initial weights of a seed.
#[derive(Clone, Copy, Debug)]
pub struct InitialWeights {
    /// The seed.
    pub seed: u64,
}

impl Store for InitialWeights {
    fn read(&self, elements: Elements, out: &mut [f32]) -> Result<(), StoreError> {
        let Elements { parameter, stored, start } = elements;
        let is_state = !matches!(stored, StoredTensor::Weights | StoredTensor::Average);
        match parameter.initial {
            _ if is_state => out.fill(0.0),
            InitialValues::Ones => out.fill(1.0),
            InitialValues::Normal(deviation) => {
                let key = mix(self.seed ^ name_hash(&parameter.name()));
                for (value, index) in out.iter_mut().zip(start as u64..) {
                    *value = (deviation * normal(key, index)) as f32;
                }
            }
            InitialValues::Zeros => out.fill(0.0),
        }
        Ok(())
    }
}

/// A standard normal number (Box–Muller) that depends only on `key` and `index`.
///
/// The logarithm and the sine are our own polynomials, without branches and without calls, so that the compiler vectorises the loop
/// over the elements. Their results are the same on every machine, which those of the system's library need not be.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "the loop over the elements is vectorised only if everything is in it"
)]
fn normal(key: u64, index: u64) -> f64 {
    let first = mix(key.wrapping_add(index.wrapping_mul(GOLDEN)));
    let second = mix(first ^ 0xD1B5_4A32_D192_ED03);
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    // cos(2πu) = sin(2πw) with w in [−¼, ¼].
    let quarter = (unit(second) - 0.5).abs() - 0.25;
    (-2.0 * ln(unit(first))).sqrt() * sin(std::f64::consts::TAU * quarter)
}

/// The natural logarithm of a normal number in (0, 1].
#[inline(always)]
#[allow(clippy::inline_always, reason = "as for `normal`")]
fn ln(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    /// 2⁵²: its last bits, read as an integer, are the integer that was added to it.
    const INTEGERS: u64 = 0x4330_0000_0000_0000;
    let exponent = f64::from_bits((x.to_bits() >> 52) | INTEGERS) - f64::from_bits(INTEGERS) - 1023.0;
    let mantissa = f64::from_bits((x.to_bits() & MANTISSA) | 1.0_f64.to_bits());
    // x = m·2ᵉ with m in (√½, √2].
    let large = mantissa > std::f64::consts::SQRT_2;
    let m = if large { 0.5 * mantissa } else { mantissa };
    let e = if large { exponent + 1.0 } else { exponent };
    // ln m = 2·artanh(s), by its series: the first term that is left out is below 2⁻⁵⁴ of the sum.
    let s = (m - 1.0) / (m + 1.0);
    let terms = (0..=10).rev().fold(0.0, |sum, k| sum * (s * s) + 1.0 / f64::from(2 * k + 1));
    e * std::f64::consts::LN_2 + 2.0 * s * terms
}

/// The sine of a number in [−π/2, π/2], by its series: the first term that is left out is below 2⁻⁵⁸.
#[inline(always)]
#[allow(clippy::inline_always, reason = "as for `normal`")]
fn sin(x: f64) -> f64 {
    let terms =
        (1..=10).rev().fold(1.0, |sum, k| 1.0 - sum * (x * x) * (1.0 / f64::from(2 * k * (2 * k + 1))));
    x * terms
}

/// FNV-1a, so that a name has the same hash on every machine and in every version.
fn name_hash(name: &str) -> u64 {
    name.bytes()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs with the same seed start from the same weights in every version.
    #[test]
    fn the_numbers_of_a_seed_stay() {
        let key = mix(1 ^ name_hash("table.table"));
        let expected = [0.397_566_684_962_5, 0.832_187_272_341_7, 0.634_050_414_935_8];
        for (index, expected) in [0, 1, 1000].into_iter().zip(expected) {
            assert!((normal(key, index) - expected).abs() < 1e-12, "{index}: {}", normal(key, index));
        }
    }

    #[test]
    fn logarithm_and_sine_are_those_of_the_library() {
        for i in 0..200_000_u64 {
            let unit = ((mix(i) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            assert!((ln(unit) - unit.ln()).abs() <= 4e-16 * unit.ln().abs().max(1.0), "ln {unit}");
            let angle = (unit - 0.5) * std::f64::consts::PI;
            assert!((sin(angle) - angle.sin()).abs() <= 4e-16, "sin {angle}");
        }
        for unit in [f64::EPSILON / 4.0, 0.5, std::f64::consts::FRAC_1_SQRT_2, 1.0 - f64::EPSILON / 2.0, 1.0]
        {
            assert!((ln(unit) - unit.ln()).abs() <= 2e-16 * unit.ln().abs(), "ln {unit}");
        }
    }

    #[test]
    fn numbers_are_normal() {
        let n = 100_000;
        let numbers: Vec<f64> = (0..n).map(|i| normal(42, i)).collect();
        let mean = numbers.iter().sum::<f64>() / n as f64;
        let variance = numbers.iter().map(|x| x * x).sum::<f64>() / n as f64;
        let fourth = numbers.iter().map(|x| x.powi(4)).sum::<f64>() / n as f64;
        let neighbours = numbers.windows(2).map(|w| w[0] * w[1]).sum::<f64>() / n as f64;
        // Four standard errors of each estimate.
        assert!(mean.abs() < 0.013 && (variance - 1.0).abs() < 0.018, "mean {mean}, variance {variance}");
        assert!((fourth - 3.0).abs() < 0.13 && neighbours.abs() < 0.013, "fourth {fourth}, {neighbours}");
    }
}
