//! Which samples a replica reads: step, replica and micro-batch to sample indices.
//!
//! The order of samples belongs to the run, not to its layout: step `s` reads samples `s·global .. (s+1)·global`,
//! each replica a contiguous share of them and each micro-batch a contiguous part of that.

use std::ops::Range;

use crate::{Dataset, Split};

/// How a global batch is dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    sequence: usize,
    global_batch: usize,
    micro_batch: usize,
    dp: usize,
}

impl Sampler {
    /// Samples of `sequence` targets, `global_batch` of them a step, over `dp` replicas in micro-batches of
    /// `micro_batch`. The plan has checked that this divides evenly.
    pub fn new(sequence: usize, global_batch: usize, micro_batch: usize, dp: usize) -> Sampler {
        assert!(
            global_batch.is_multiple_of(micro_batch * dp),
            "a global batch of {global_batch} is no multiple of {micro_batch} samples x {dp} replicas"
        );
        Sampler { sequence, global_batch, micro_batch, dp }
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

    /// Fills `tokens` and `targets`, both `[micro_batch, sequence]`, with one micro-batch.
    ///
    /// The vectors keep their memory: after the first call nothing is allocated.
    pub fn batch(
        &self,
        dataset: &dyn Dataset,
        split: Split,
        (step, replica, micro): (u64, usize, usize),
        tokens: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) {
        let elements = self.micro_batch * self.sequence;
        // A sample's last token is a target only: it lies where the next sample's first token will overwrite it.
        tokens.resize(elements + 1, 0);
        targets.clear();
        for (row, index) in self.indices(step, replica, micro).enumerate() {
            let first = row * self.sequence;
            let sample = &mut tokens[first..=first + self.sequence];
            dataset.sample(split, index, sample);
            targets.extend_from_slice(&sample[1..]);
        }
        tokens.truncate(elements);
    }
}
