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
        match (stored, parameter.initial) {
            (StoredTensor::Weights, InitialValues::Ones) => out.fill(1.0),
            (StoredTensor::Weights, InitialValues::Normal(deviation)) => {
                let key = mix(self.seed ^ name_hash(&parameter.name()));
                for (value, index) in out.iter_mut().zip(start as u64..) {
                    *value = (deviation * normal(key, index)) as f32;
                }
            }
            (StoredTensor::Weights, InitialValues::Zeros)
            | (StoredTensor::FirstMoment | StoredTensor::SecondMoment, _) => out.fill(0.0),
        }
        Ok(())
    }
}

/// A standard normal number (Box–Muller) that depends only on `key` and `index`.
fn normal(key: u64, index: u64) -> f64 {
    let first = mix(key.wrapping_add(index.wrapping_mul(GOLDEN)));
    let second = mix(first ^ 0xD1B5_4A32_D192_ED03);
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    (-2.0 * unit(first).ln()).sqrt() * (std::f64::consts::TAU * unit(second)).cos()
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
