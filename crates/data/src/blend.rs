//! Selects the source of each sample, by weight.
//!
//! The first source takes its share of all samples, spread evenly (as in Bresenham's algorithm). The second takes its share of
//! the rest, and so on. So the source of a sample, and its number within that source, depend only on its index, and after n
//! samples every source has its share to within a few samples.

/// The weights of sources, as integers.
#[derive(Clone, Debug)]
pub struct Blend {
    weights: Vec<u64>,
}

/// The approximate sum of the weights, which sets their resolution.
const WHOLE: f64 = (1_u64 << 40) as f64;

impl Blend {
    /// The blend of sources with these weights, all above 0.
    pub fn new(weights: &[f64]) -> Blend {
        let sum: f64 = weights.iter().sum();
        let whole = |weight: &f64| ((weight / sum * WHOLE).round() as u64).max(1);
        Blend { weights: weights.iter().map(whole).collect() }
    }

    /// How many of the first `samples` samples come from each source.
    pub fn counts(&self, samples: u64) -> Vec<u64> {
        let mut total: u128 = self.weights.iter().map(|&weight| u128::from(weight)).sum();
        let mut left = u128::from(samples);
        let count = |&weight: &u64| {
            let taken = left * u128::from(weight) / total;
            left -= taken;
            total -= u128::from(weight);
            taken as u64
        };
        self.weights.iter().map(count).collect()
    }

    /// The source of sample `index`, and how many samples of that source come before it.
    pub fn place(&self, index: u64) -> (usize, u64) {
        let mut total: u128 = self.weights.iter().map(|&weight| u128::from(weight)).sum();
        let mut index = index;
        for (source, &weight) in self.weights.iter().enumerate() {
            let taken_of = |samples: u128| samples * u128::from(weight) / total;
            let taken = taken_of(u128::from(index));
            if taken_of(u128::from(index) + 1) > taken {
                return (source, taken as u64);
            }
            index -= taken as u64;
            total -= u128::from(weight);
        }
        unreachable!("the last source takes all that is left")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_source_takes_all() {
        let blend = Blend::new(&[0.3]);
        assert!((0..1000).all(|index| blend.place(index) == (0, index)));
        assert_eq!(blend.place(u64::MAX), (0, u64::MAX));
    }

    #[test]
    fn halves_alternate() {
        let blend = Blend::new(&[1.0, 1.0]);
        let sources: Vec<usize> = (0..6).map(|index| blend.place(index).0).collect();
        assert_eq!(sources, [1, 0, 1, 0, 1, 0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_source_counts_up_and_has_its_share(weights in prop::collection::vec(0.01_f64..10.0, 1..8)) {
            let (blend, sum) = (Blend::new(&weights), weights.iter().sum::<f64>());
            let mut counts = vec![0; weights.len()];
            for index in 0..2000 {
                let (source, before) = blend.place(index);
                prop_assert_eq!(before, counts[source]);
                prop_assert_eq!(&blend.counts(index), &counts);
                counts[source] += 1;
                for (count, weight) in counts.iter().zip(&weights) {
                    let share = (index + 1) as f64 * weight / sum;
                    prop_assert!((*count as f64 - share).abs() <= weights.len() as f64, "{:?}", counts);
                }
            }
        }

        #[test]
        fn any_weight_and_index_works(weights in prop::collection::vec(1e-30_f64..1e30, 1..5), index: u64) {
            prop_assert!(Blend::new(&weights).place(index).0 < weights.len());
        }
    }
}
