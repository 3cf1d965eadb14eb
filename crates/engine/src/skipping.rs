//! A dataset without the samples that a run skips.

use kintsugi_checkpoint::SkippedSamples;
use kintsugi_data::{DataError, Dataset, Split, ValidationSource};

/// A dataset whose training samples are numbered without the skipped ones, so that a run on any layout reads its batches as if these
/// did not exist.
pub struct WithoutSkipped<'a> {
    /// The whole dataset.
    pub dataset: &'a dyn Dataset,
    /// What is skipped.
    pub skipped: SkippedSamples,
}

impl WithoutSkipped<'_> {
    fn index(&self, split: Split, index: u64) -> u64 {
        match split {
            Split::Train => self.skipped.index(index),
            Split::Validation => index,
        }
    }
}

impl Dataset for WithoutSkipped<'_> {
    fn vocab(&self) -> usize {
        self.dataset.vocab()
    }

    fn floor(&self, sequence: usize) -> Option<f64> {
        self.dataset.floor(sequence)
    }

    fn validation(&self) -> Vec<ValidationSource> {
        self.dataset.validation()
    }

    fn epochs(&self, samples: u64) -> Vec<(String, f64)> {
        self.dataset.epochs(self.skipped.index(samples))
    }

    fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        self.dataset.sample(split, self.index(split, index), out)
    }

    fn starts(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        self.dataset.starts(split, self.index(split, index), out)
    }
}
