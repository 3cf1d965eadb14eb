//! A keyed permutation of 0..n, which shuffles every epoch without a table of indices.
//!
//! It is a Feistel network over the smallest even number of bits that holds n, with cycle walking: it is applied until the
//! result is below n (Black and Rogaway, CT-RSA 2002). Each element is computed independently, in constant memory.

use kintsugi_spec::splitmix64::mix;

use crate::random::RandomStream;

/// Rounds of the network. Four suffice in theory, but small domains need more to mix well.
const ROUNDS: usize = 8;

/// A permutation of the numbers below a size.
#[derive(Clone, Debug)]
pub struct Permutation {
    size: u64,
    /// Bits of each half. The network permutes numbers of twice as many bits.
    half: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of 0..`size` for `key`. Different keys give unrelated permutations.
    pub fn new(size: u64, key: &[u64]) -> Permutation {
        let bits = 64 - size.saturating_sub(1).leading_zeros();
        let mut stream = RandomStream::new(key);
        Permutation { size, half: bits.div_ceil(2).max(1), keys: std::array::from_fn(|_| stream.next()) }
    }

    /// The number at a place of the permutation.
    pub fn at(&self, place: u64) -> u64 {
        assert!(place < self.size, "place {place} of {}", self.size);
        // The domain is at most four times the size, so this takes at most four iterations on average. It ends, because the
        // cycle returns to the start.
        let mut value = self.round_trip(place);
        while value >= self.size {
            value = self.round_trip(value);
        }
        value
    }

    /// The network: a bijection of the numbers of `2·half` bits.
    fn round_trip(&self, value: u64) -> u64 {
        let mask = (1 << self.half) - 1;
        let halves = (value >> self.half, value & mask);
        let (left, right) =
            self.keys.iter().fold(halves, |(left, right), key| (right, left ^ (mix(right ^ key) & mask)));
        (left << self.half) | right
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(size: u64, key: &[u64]) -> Vec<u64> {
        let permutation = Permutation::new(size, key);
        (0..size).map(|place| permutation.at(place)).collect()
    }

    #[test]
    fn places_and_numbers_are_unrelated() {
        // Of 8 numbers: each should stand in each place equally often.
        let mut counts = [[0_i64; 8]; 8];
        for seed in 0..8000 {
            for (place, number) in order(8, &[seed]).into_iter().enumerate() {
                counts[place][number as usize] += 1;
            }
        }
        // Five standard deviations of a count of 1000.
        assert!(counts.iter().flatten().all(|count| (count - 1000).abs() < 150), "{counts:?}");
    }

    #[test]
    fn neighbours_do_not_stay_together() {
        let order = order(10_000, &[1]);
        let together = order.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
        assert!(together < 15, "{together} pairs; two are expected");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_number_comes_once(size in 1_u64..3000, seed: u64, epoch in 0_u64..100) {
            let mut numbers = order(size, &[seed, epoch]);
            numbers.sort_unstable();
            prop_assert!(numbers.into_iter().eq(0..size));
        }

        #[test]
        fn another_key_is_another_order(size in 100_u64..3000, seed: u64, epoch in 0_u64..100) {
            prop_assert_ne!(order(size, &[seed, epoch]), order(size, &[seed, epoch + 1]));
            prop_assert_ne!(order(size, &[seed, epoch]), order(size, &[seed ^ 1, epoch]));
            prop_assert_eq!(order(size, &[seed, epoch]), order(size, &[seed, epoch]));
        }

        #[test]
        fn any_size_works(size in 1_u64.., place: u64, seed: u64) {
            let permutation = Permutation::new(size, &[seed]);
            prop_assert!(permutation.at(place % size) < size);
            // Two places never share a number.
            if size > 1 {
                let other = (place % size + 1) % size;
                prop_assert_ne!(permutation.at(place % size), permutation.at(other));
            }
        }
    }
}
