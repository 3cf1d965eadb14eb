//! Maps step, replica and micro-batch to sample indices.
//!
//! The order of samples does not depend on the layout: step `s` reads samples `s·global .. (s+1)·global`. Each replica reads a
//! contiguous share of them, and each micro-batch a contiguous part of that share.

use std::ops::Range;

use crate::{DataError, Dataset, Split};

/// A rank's part of one micro-batch, `[micro_batch, sequence]` each, or fewer tokens of each sample under context parallelism. The vectors are reused, so only the first micro-batch allocates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MicroBatch {
    /// Input ids.
    pub tokens: Vec<u32>,
    /// Target ids.
    pub targets: Vec<u32>,
    /// The first token of its sample that each token attends to: a list for its document, and a list for a window. Each is there if
    /// it is requested.
    pub starts: Vec<u32>,
    /// A whole sample and its document starts, of which the rank has slices.
    sample: [Vec<u32>; 2],
}

/// How a global batch is distributed over replicas and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    sequence: usize,
    global_batch: usize,
    micro_batch: usize,
    dp: usize,
    starts: bool,
    window: Option<usize>,
    /// The number of context-parallel ranks, and which of them reads.
    context: (usize, usize),
    /// Whether document starts are those of whole samples, not of the slices.
    whole_starts: bool,
}

impl Sampler {
    /// A sampler of `global_batch` samples of `sequence` targets per step, over `dp` replicas in micro-batches of `micro_batch`.
    /// The plan has checked that these numbers divide evenly.
    pub fn new(sequence: usize, global_batch: usize, micro_batch: usize, dp: usize) -> Sampler {
        assert!(
            global_batch.is_multiple_of(micro_batch * dp),
            "a global batch of {global_batch} is not a multiple of {micro_batch} samples x {dp} replicas"
        );
        Sampler {
            sequence,
            global_batch,
            micro_batch,
            dp,
            starts: false,
            window: None,
            context: (1, 0),
            whole_starts: false,
        }
    }

    /// Sets whether batches have document starts.
    #[must_use]
    pub fn with_starts(self, starts: bool) -> Sampler {
        Sampler { starts, ..self }
    }

    /// Sets whether batches have a list for a window of so many tokens, which also respects the document starts if batches have them.
    #[must_use]
    pub fn with_window(self, window: Option<usize>) -> Sampler {
        Sampler { window, ..self }
    }

    /// Sets the slices of every sample that are read: of `2·cp` equal ones, slices `part` and `2·cp − 1 − part`. The plan has
    /// checked that they are equal.
    #[must_use]
    pub fn with_slices(self, cp: usize, part: usize) -> Sampler {
        assert!(self.sequence.is_multiple_of(2 * cp) || cp == 1, "{} tokens in {cp} parts", self.sequence);
        Sampler { context: (cp, part), ..self }
    }

    /// Sets whether document starts are those of whole samples although only slices of the tokens are read.
    #[must_use]
    pub fn with_whole_starts(self, whole_starts: bool) -> Sampler {
        Sampler { whole_starts, ..self }
    }

    /// The ranges of a sample's tokens that are read.
    fn slices(&self) -> [Range<usize>; 2] {
        let (cp, part) = self.context;
        if cp == 1 {
            return [0..self.sequence, self.sequence..self.sequence];
        }
        let slice = self.sequence / (2 * cp);
        [part, 2 * cp - 1 - part].map(|number| number * slice..(number + 1) * slice)
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
        if self.context.0 > 1 {
            return self.sliced_batch(dataset, split, self.indices(step, replica, micro), batch);
        }
        let MicroBatch { tokens, targets, starts, sample: _ } = batch;
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
        self.append_window(starts);
        Ok(())
    }

    /// The same for slices of every sample.
    fn sliced_batch(
        &self,
        dataset: &dyn Dataset,
        split: Split,
        indices: Range<u64>,
        batch: &mut MicroBatch,
    ) -> Result<(), DataError> {
        let MicroBatch { tokens, targets, starts, sample: [sample, documents] } = batch;
        [&mut *tokens, &mut *targets, &mut *starts].into_iter().for_each(Vec::clear);
        sample.resize(self.sequence + 1, 0);
        documents.resize(if self.starts { self.sequence } else { 0 }, 0);
        for index in indices {
            dataset.sample(split, index, sample)?;
            if self.starts {
                dataset.starts(split, index, documents)?;
            }
            for slice in self.slices() {
                tokens.extend_from_slice(&sample[slice.clone()]);
                targets.extend_from_slice(&sample[slice.start + 1..=slice.end]);
                if self.starts && !self.whole_starts {
                    starts.extend_from_slice(&documents[slice]);
                }
            }
            if self.whole_starts {
                starts.extend_from_slice(documents);
            }
        }
        self.append_window(starts);
        Ok(())
    }

    /// Appends the list for the window to that for documents, which may be empty.
    fn append_window(&self, starts: &mut Vec<u32>) {
        let Some(window) = self.window else { return };
        let slices = if self.whole_starts { [0..self.sequence, 0..0] } else { self.slices() };
        let documents = starts.len();
        for position in (0..self.micro_batch).flat_map(|_| slices.clone().into_iter().flatten()) {
            let first = (position + 1).saturating_sub(window) as u32;
            let row = starts.len() - documents;
            let document = if documents > 0 { starts[row] } else { 0 };
            starts.push(first.max(document));
        }
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
                let MicroBatch { tokens, targets, starts, .. } = &batch;
                assert_eq!([tokens.len(), targets.len()], [sampler.micro_batch * sampler.sequence; 2]);
                all.tokens.extend_from_slice(tokens);
                all.targets.extend_from_slice(targets);
                all.starts.extend_from_slice(starts);
            }
        }
        all
    }

    #[test]
    fn a_window_follows_the_documents_as_another_list() {
        let starts = |sampler: Sampler, replica| {
            let mut batch = MicroBatch::default();
            sampler.batch(&Numbers, Split::Train, 0, replica, 0, &mut batch).unwrap();
            batch.starts
        };
        let window = Sampler::new(12, 4, 1, 4).with_window(Some(5));
        assert_eq!(starts(window, 0), [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7]);
        let slices = window.with_slices(3, 1);
        assert_eq!(starts(slices, 0), [0, 0, 4, 5], "positions 2, 3, 8 and 9");
        assert_eq!(starts(slices.with_whole_starts(true), 0).len(), 12);
        // The documents of sample 3 begin at 3.
        let both = starts(window.with_starts(true), 3);
        assert_eq!(both[..12], [3; 12]);
        assert_eq!(both[12..], [3, 3, 3, 3, 3, 3, 3, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn every_layout_reads_the_same_samples_in_the_same_order() {
        for number in 0..3_u64 {
            let samples = 24 * number as u32..24 * (number as u32 + 1);
            let tokens: Vec<u32> = samples.flat_map(|i| 100 * i..100 * i + 5).collect();
            let targets = tokens.iter().map(|token| token + 1).collect();
            let starts = tokens.iter().map(|token| token / 100).collect();
            let expected = MicroBatch { tokens, targets, starts, ..MicroBatch::default() };
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
    fn the_slices_of_all_context_parallel_ranks_are_the_samples() {
        let whole = Sampler::new(12, 4, 2, 2).with_starts(true);
        let mut batches = [(); 4].map(|()| MicroBatch::default());
        for (part, batch) in batches[..3].iter_mut().enumerate() {
            whole.with_slices(3, part).batch(&Numbers, Split::Train, 1, 1, 0, batch).unwrap();
        }
        assert_eq!(batches[0].tokens, [600, 601, 610, 611, 700, 701, 710, 711]);
        assert_eq!(batches[1].targets, [603, 604, 609, 610, 703, 704, 709, 710]);
        assert_eq!(batches[2].starts, [6, 6, 6, 6, 7, 7, 7, 7]);
        let all_to_all = whole.with_slices(3, 2).with_whole_starts(true);
        all_to_all.batch(&Numbers, Split::Train, 1, 1, 0, &mut batches[3]).unwrap();
        assert_eq!((batches[3].tokens.len(), batches[3].starts.len()), (8, 24));
        whole.batch(&Numbers, Split::Train, 1, 1, 0, &mut batches[3]).unwrap();
        let [mut all, mut expected] = [&batches[..3], &batches[3..]].map(|batches| {
            batches.iter().flat_map(|batch| batch.tokens.iter().zip(&batch.targets)).collect::<Vec<_>>()
        });
        all.sort();
        expected.sort();
        assert_eq!(all, expected);
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
