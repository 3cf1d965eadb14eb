//! Which samples an evaluation reads, and in which global batches.
//!
//! An evaluation reads the first samples of every source of the validation split. They do not depend on the seed, the
//! layout or the batch size. A global batch holds samples of one source only, so its mean loss is that source's. When
//! fewer samples are left than fill a batch, a batch takes a number of samples that divides its size. It contains each of
//! them equally often, so its mean loss is the mean of those samples.

use kintsugi_data::{Blend, DataError, Dataset, Split, ValidationSource};
use kintsugi_plan::Plan;

/// The global batches of an evaluation. Each sample counts once.
#[derive(Clone, Debug)]
pub(crate) struct ValidationBatches {
    /// The sources, each with the number of samples to read.
    pub sources: Vec<(ValidationSource, u64)>,
    runs: Vec<BatchRun>,
    global: u64,
}

/// Consecutive global batches with the same number of samples each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchRun {
    /// Index of the source.
    pub source: usize,
    /// Distinct samples in each batch.
    pub samples: u64,
    /// Number of batches.
    pub batches: u64,
    first_batch: u64,
    first_sample: u64,
}

impl ValidationBatches {
    /// Divides `samples` samples among the sources by weight, at least one each; `None` takes all samples. If a source has
    /// too few, the others make up for it.
    pub fn new(parts: Vec<ValidationSource>, samples: Option<u64>, global: u64) -> ValidationBatches {
        let counts = match samples {
            Some(samples) => shared(&parts, samples),
            None => parts.iter().map(|part| part.samples.unwrap_or(u64::MAX)).collect(),
        };
        let sources: Vec<(ValidationSource, u64)> = parts.into_iter().zip(counts).collect();
        let mut batches = ValidationBatches { sources, runs: Vec::new(), global };
        let mut first_sample = 0;
        for source in 0..batches.sources.len() {
            let (part, samples) = &batches.sources[source];
            let (there, samples) = (part.samples.unwrap_or(*samples), *samples);
            batches.add(source, first_sample, samples);
            first_sample += there;
        }
        batches
    }

    /// Adds batches for the next `left` samples of a source.
    fn add(&mut self, source: usize, mut first_sample: u64, mut left: u64) {
        while left > 0 {
            let most = self.global.min(left);
            let divides = |&samples: &u64| self.global.is_multiple_of(samples);
            let samples = (1..=most).rev().find(divides).expect("one sample divides any batch");
            let batches = if samples == self.global { left / samples } else { 1 };
            let first_batch = self.batches();
            self.runs.push(BatchRun { source, samples, batches, first_batch, first_sample });
            first_sample += batches * samples;
            left -= batches * samples;
        }
    }

    /// Number of batches in total.
    pub fn batches(&self) -> u64 {
        self.runs.last().map_or(0, |run| run.first_batch + run.batches)
    }

    /// The number of every batch, and the run that it belongs to.
    pub fn iter(&self) -> impl Iterator<Item = (u64, BatchRun)> {
        let of =
            |run: &BatchRun| (run.first_batch..run.first_batch + run.batches).zip(std::iter::repeat(*run));
        self.runs.iter().flat_map(of)
    }

    /// The sample at `index` of the concatenated batches.
    fn sample(&self, index: u64) -> u64 {
        let (batch, place) = (index / self.global, index % self.global);
        let after = self.runs.partition_point(|run| run.first_batch <= batch);
        let run = self.runs[after - 1];
        run.first_sample + (batch - run.first_batch) * run.samples + place % run.samples
    }
}

/// The number of samples to read from each source if `samples` are read in total.
fn shared(parts: &[ValidationSource], samples: u64) -> Vec<u64> {
    let room = |number: usize, count: u64| parts[number].samples.unwrap_or(u64::MAX) - count;
    let mut counts = vec![0; parts.len()];
    let mut left = samples;
    // Every iteration uses up the samples that are left, or all samples of a source.
    while left > 0 {
        let open: Vec<usize> = (0..parts.len()).filter(|&number| room(number, counts[number]) > 0).collect();
        if open.is_empty() {
            break;
        }
        let weights: Vec<f64> = open.iter().map(|&number| parts[number].weight).collect();
        for (&number, share) in open.iter().zip(Blend::new(&weights).counts(left)) {
            let taken = share.min(room(number, counts[number]));
            counts[number] += taken;
            left -= taken;
        }
    }
    let at_least_one = |(part, count): (&ValidationSource, u64)| count.max(part.samples.unwrap_or(1).min(1));
    parts.iter().zip(counts).map(at_least_one).collect()
}

/// A dataset whose validation split is in the order of [`ValidationBatches`].
pub(crate) struct ValidationDataset<'a> {
    dataset: &'a dyn Dataset,
    pub batches: ValidationBatches,
}

impl<'a> ValidationDataset<'a> {
    /// Divides the validation split of a dataset into the global batches of a plan.
    pub fn new(dataset: &'a dyn Dataset, samples: Option<u64>, plan: &Plan) -> Self {
        ValidationDataset {
            dataset,
            batches: ValidationBatches::new(dataset.validation(), samples, plan.batch.global as u64),
        }
    }
}

impl Dataset for ValidationDataset<'_> {
    fn vocab(&self) -> usize {
        self.dataset.vocab()
    }

    fn floor(&self, sequence: usize) -> Option<f64> {
        self.dataset.floor(sequence)
    }

    fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        self.dataset.sample(split, self.batches.sample(index), out)
    }

    fn starts(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        self.dataset.starts(split, self.batches.sample(index), out)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn part(name: &str, weight: f64, samples: Option<u64>) -> ValidationSource {
        ValidationSource { name: name.to_owned(), weight, samples }
    }

    #[test]
    fn every_sample_is_counted_once() {
        for (samples, global) in
            [(0, 4), (1, 1), (1, 8), (7, 8), (8, 8), (23, 12), (112, 9), (5, 24), (30, 7)]
        {
            let batches = ValidationBatches::new(vec![part("a", 1.0, Some(samples))], None, global);
            assert_eq!(batches.iter().map(|(_, run)| run.samples).sum::<u64>(), samples);
            assert_eq!(batches.iter().count() as u64, batches.batches());
            let mut shares = BTreeMap::new();
            for (batch, run) in batches.iter() {
                for place in 0..global {
                    *shares.entry(batches.sample(batch * global + place)).or_insert(0) += run.samples;
                }
            }
            // A batch's mean has the weight of its samples, and each of the `global` places in it an equal share.
            let expected: BTreeMap<u64, u64> = (0..samples).map(|sample| (sample, global)).collect();
            assert_eq!(shares, expected, "{samples} samples in batches of {global}");
        }
    }

    #[test]
    fn sources_share_the_samples_and_no_batch() {
        let parts = || vec![part("a", 3.0, Some(100)), part("b", 1.0, Some(2)), part("c", 4.0, None)];
        let read = |samples, global| {
            let batches = ValidationBatches::new(parts(), Some(samples), global);
            let mut read = BTreeMap::<usize, Vec<u64>>::new();
            for (batch, run) in batches.iter() {
                let samples = read.entry(run.source).or_default();
                for place in 0..global {
                    samples.push(batches.sample(batch * global + place));
                }
                samples.sort_unstable();
                samples.dedup();
            }
            read.into_values().collect::<Vec<_>>()
        };
        let counts = |samples, global| read(samples, global).iter().map(Vec::len).collect::<Vec<_>>();
        for global in [1, 4, 7] {
            assert_eq!(
                counts(32, global),
                [12, 2, 18],
                "the second has no more, and the others have the rest"
            );
            assert_eq!(counts(1, global), [1, 1, 1], "at least one of each");
        }
        assert_eq!(read(8, 4), [vec![0, 1, 2], vec![100], vec![102, 103, 104, 105]]);
    }
}
