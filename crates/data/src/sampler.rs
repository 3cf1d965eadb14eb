//! Maps step, replica and micro-batch to sample indices.
//!
//! The order of samples does not depend on the layout: step `s` reads samples `s·global .. (s+1)·global`. Each replica reads a
//! contiguous share of them, and each micro-batch a contiguous part of that share.

use std::ops::Range;

use crate::{DataError, Dataset, Split};

/// One micro-batch, `[micro_batch, sequence]` each. The vectors are reused, so only the first micro-batch allocates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MicroBatch {
    /// Input ids.
    pub tokens: Vec<u32>,
    /// Target ids.
    pub targets: Vec<u32>,
    /// The start of each token's document in its sample. Empty unless requested.
    pub starts: Vec<u32>,
}

/// How a global batch is distributed over replicas and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    sequence: usize,
    global_batch: usize,
    micro_batch: usize,
    dp: usize,
    starts: bool,
}

impl Sampler {
    /// A sampler of `global_batch` samples of `sequence` targets per step, over `dp` replicas in micro-batches of `micro_batch`.
    /// The plan has checked that these numbers divide evenly.
    pub fn new(sequence: usize, global_batch: usize, micro_batch: usize, dp: usize) -> Sampler {
        assert!(
            global_batch.is_multiple_of(micro_batch * dp),
            "a global batch of {global_batch} is not a multiple of {micro_batch} samples x {dp} replicas"
        );
        Sampler { sequence, global_batch, micro_batch, dp, starts: false }
    }

    /// Sets whether batches have document starts.
    #[must_use]
    pub fn with_starts(self, starts: bool) -> Sampler {
        Sampler { starts, ..self }
    }

    /// Micro-batches of one replica in one step.
    pub fn micro_batches(&self) -> usize {
        self.global_batch / (self.micro_batch * self.dp)
    }

    /// The indices of the samples of one micro-batch.
    pub fn indices(&self, step: u64, replica: usize, micro: usize) -> Range<u64> {
        debug_assert!(replica < self.dp && micro < self.micro_batches());
        let within = (replica * self.micro_batches() + micro) * self.micro_batch;
        let first = step * self.global_batch as u64 + within as u64;
        first..first + self.micro_batch as u64
    }

    /// Fills `batch` with one micro-batch.
    pub fn batch(
        &self,
        dataset: &dyn Dataset,
        split: Split,
        step: u64,
        replica: usize,
        micro: usize,
        batch: &mut MicroBatch,
    ) -> Result<(), DataError> {
        let MicroBatch { tokens, targets, starts } = batch;
        let elements = self.micro_batch * self.sequence;
        // The last token of a sample is only a target. The next sample's first token overwrites it.
        tokens.resize(elements + 1, 0);
        targets.clear();
        starts.resize(if self.starts { elements } else { 0 }, 0);
        for (row, index) in self.indices(step, replica, micro).enumerate() {
            let first = row * self.sequence;
            let sample = &mut tokens[first..=first + self.sequence];
            dataset.sample(split, index, sample)?;
            targets.extend_from_slice(&sample[1..]);
            if self.starts {
                dataset.starts(split, index, &mut starts[first..first + self.sequence])?;
            }
        }
        tokens.truncate(elements);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Token `t` of sample `i` is `100·i + t`, with a thousand more in the other split.
    struct Numbers;

    impl Dataset for Numbers {
        fn vocab(&self) -> usize {
            usize::MAX
        }

        fn floor(&self, _sequence: usize) -> Option<f64> {
            None
        }

        fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
            let first = 100 * index as u32 + if split == Split::Train { 0 } else { 1_000_000 };
            for (token, value) in out.iter_mut().zip(first..) {
                *token = value;
            }
            Ok(())
        }

        fn starts(&self, _split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
            out.fill(index as u32);
            Ok(())
        }
    }

    /// A whole step as one micro-batch, replica after replica, micro-batch after micro-batch.
    fn step(sampler: Sampler, split: Split, step: u64) -> MicroBatch {
        let (mut batch, mut all) = (MicroBatch::default(), MicroBatch::default());
        for replica in 0..sampler.dp {
            for micro in 0..sampler.micro_batches() {
                sampler.batch(&Numbers, split, step, replica, micro, &mut batch).unwrap();
                let MicroBatch { tokens, targets, starts } = &batch;
                assert_eq!([tokens.len(), targets.len()], [sampler.micro_batch * sampler.sequence; 2]);
                all.tokens.extend_from_slice(tokens);
                all.targets.extend_from_slice(targets);
                all.starts.extend_from_slice(starts);
            }
        }
        all
    }

    #[test]
    fn every_layout_reads_the_same_samples_in_the_same_order() {
        for number in 0..3_u64 {
            let samples = 24 * number as u32..24 * (number as u32 + 1);
            let tokens: Vec<u32> = samples.flat_map(|i| 100 * i..100 * i + 5).collect();
            let targets = tokens.iter().map(|token| token + 1).collect();
            let starts = tokens.iter().map(|token| token / 100).collect();
            let expected = MicroBatch { tokens, targets, starts };
            for (micro_batch, dp) in [(24, 1), (1, 1), (4, 1), (4, 2), (1, 24), (2, 3), (3, 8), (12, 2)] {
                let sampler = Sampler::new(5, 24, micro_batch, dp);
                let dealt = step(sampler.with_starts(true), Split::Train, number);
                assert_eq!(dealt, expected, "micro {micro_batch}, dp {dp}");
                let without = MicroBatch { starts: Vec::new(), ..expected.clone() };
                assert_eq!(step(sampler, Split::Train, number), without, "nobody asked for starts");
            }
        }
    }

    #[test]
    fn the_split_is_passed_on() {
        let tokens = step(Sampler::new(2, 2, 1, 2), Split::Validation, 0).tokens;
        assert_eq!(tokens, [1_000_000, 1_000_001, 1_000_100, 1_000_101]);
    }

    #[test]
    fn the_vectors_are_reused() {
        let sampler = Sampler::new(64, 8, 4, 1).with_starts(true);
        let pointers = |batch: &MicroBatch| [&batch.tokens, &batch.targets, &batch.starts].map(Vec::as_ptr);
        let mut batch = MicroBatch::default();
        sampler.batch(&Numbers, Split::Train, 0, 0, 0, &mut batch).unwrap();
        let before = pointers(&batch);
        sampler.batch(&Numbers, Split::Train, 1, 0, 1, &mut batch).unwrap();
        assert_eq!(pointers(&batch), before);
    }

    #[test]
    #[should_panic(expected = "not a multiple of 3 samples x 4 replicas")]
    fn a_batch_that_does_not_divide_is_refused() {
        Sampler::new(64, 32, 3, 4);
    }
}
