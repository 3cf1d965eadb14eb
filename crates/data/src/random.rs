//! A counter-based random generator (SplitMix64): number `n` of a stream is a pure function of the stream's key and `n`.

use kintsugi_spec::splitmix64::{GOLDEN, mix};

/// The random numbers of one key.
#[derive(Clone, Debug)]
pub struct RandomStream {
    counter: u64,
}

impl RandomStream {
    /// The stream of a key. Different keys give unrelated streams.
    pub fn new(key: &[u64]) -> RandomStream {
        RandomStream { counter: key.iter().fold(0, |hash, &part| mix((hash ^ part).wrapping_add(GOLDEN))) }
    }

    /// The next 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.counter = self.counter.wrapping_add(GOLDEN);
        mix(self.counter)
    }

    /// A number in `0..1`, without 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number below `bound`, by the high half of a product: the bias is at most `bound` / 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_of_a_zero_counter_is_splitmix64_with_seed_zero() {
        let mut stream = RandomStream { counter: 0 };
        let expected = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        assert_eq!(expected.map(|_| stream.next()), expected);
    }

    #[test]
    fn every_part_of_the_key_matters_and_so_does_its_place() {
        let first = |key: &[u64]| RandomStream::new(key).next();
        let keys: [&[u64]; 5] = [&[1, 2, 3], &[0, 2, 3], &[1, 0, 3], &[1, 2, 0], &[3, 2, 1]];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| first(a) != first(b)), "{a:?}");
        }
    }

    #[test]
    fn numbers_below_a_bound_are_uniform() {
        let mut stream = RandomStream::new(&[7]);
        let mut counts = [0_i64; 10];
        for _ in 0..100_000 {
            counts[stream.below(10) as usize] += 1;
        }
        // Five standard deviations of a count of 10,000.
        assert!(counts.iter().all(|count| (count - 10_000).abs() < 475), "{counts:?}");
    }
}
