//! What a run must remember about loss spikes, so that it skips the same samples and finds the same spikes when it resumes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The samples that a run skips, and the last steps by which it finds spikes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpikeRecord {
    /// The losses of the last good steps, oldest first. Empty unless the run looks for spikes.
    pub losses: Vec<f32>,
    /// The gradient norms of the same steps.
    pub norms: Vec<f32>,
    /// The samples that are skipped.
    pub skipped: SkippedSamples,
    /// How often the run went back to a checkpoint.
    pub rollbacks: u64,
}

/// Training samples that a run skips, by their index in the dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedSamples(
    /// In order; two of them neither overlap nor touch.
    Vec<Range<u64>>,
);

impl SkippedSamples {
    /// Adds samples, some of which may already be skipped.
    pub fn add(&mut self, samples: Range<u64>) {
        if samples.is_empty() {
            return;
        }
        self.0.push(samples);
        self.0.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(self.0.len());
        for range in self.0.drain(..) {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        self.0 = merged;
    }

    /// Adds the samples that another run skips.
    pub fn add_all(&mut self, other: &SkippedSamples) {
        for range in &other.0 {
            self.add(range.clone());
        }
    }

    /// The index in the dataset of a sample, given its number among the samples that are not skipped, from 0.
    pub fn index(&self, number: u64) -> u64 {
        let mut index = number;
        for range in &self.0 {
            if range.start > index {
                break;
            }
            index += range.end - range.start;
        }
        index
    }

    /// The indices in the dataset from the first to the last of these samples, some of which may already be skipped.
    pub fn indices(&self, numbers: Range<u64>) -> Range<u64> {
        if numbers.is_empty() {
            return 0..0;
        }
        self.index(numbers.start)..self.index(numbers.end - 1) + 1
    }

    /// How many samples are skipped.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Whether no sample is skipped.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the ranges are in order, and none is empty.
    pub(crate) fn is_sound(&self) -> bool {
        self.0.iter().all(|range| range.start < range.end)
            && self.0.windows(2).all(|pair| pair[0].end < pair[1].start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_samples_that_are_not_skipped_are_numbered_without_gaps() {
        let mut skipped = SkippedSamples::default();
        for range in [8..12, 2..4, 12..13, 3..5, 7..7] {
            skipped.add(range);
            assert!(skipped.is_sound(), "{skipped:?}");
        }
        assert_eq!(skipped.count(), 3 + 5);
        let expected: Vec<u64> =
            (0..30).filter(|index| !(2..5).contains(index) && !(8..13).contains(index)).collect();
        let found: Vec<u64> = (0..expected.len() as u64).map(|number| skipped.index(number)).collect();
        assert_eq!(found, expected);
        assert_eq!((skipped.indices(1..4), skipped.indices(4..4)), (1..7, 0..0));
    }
}
