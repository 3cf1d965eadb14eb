//! A plan's dataset, and the tokens that a rank reads from it.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;

use kintsugi_data::{
    DataError, Dataset, Demo, MicroBatch, PackedBlend, PackedOptions, Sampler, Split, TokenFile, Tokenizer,
};
use kintsugi_plan::{Data, DataSource, MAX_STEPS, Op, Plan, Program, TokenData};
use kintsugi_rank::{TokenSource, Tokens};

use crate::Worker;
use crate::job::RankActivity;

/// Opens the plan's dataset. Fails if a file is missing, has another format or does not fit the model.
pub fn dataset(plan: &Plan) -> Result<Box<dyn Dataset>, DataError> {
    open(plan, Split::Validation, plan.run.eval_every > 0)
}

/// Opens the plan's dataset for an evaluation of `split`: the validation split of the returned dataset is `split`.
pub fn evaluation_dataset(plan: &Plan, split: Split) -> Result<Box<dyn Dataset>, DataError> {
    open(plan, split, true)
}

/// Opens the plan's dataset with `validation` as its validation split. Checks the length of that split if `evaluates`.
fn open(plan: &Plan, validation: Split, evaluates: bool) -> Result<Box<dyn Dataset>, DataError> {
    match &plan.data {
        Data::Demo => Ok(Box::new(Demo::new(plan.run.seed).validated_on(validation))),
        Data::Tokens(tokens) => {
            check_tokenizer(plan, tokens)?;
            if let Some(folder) = &plan.init {
                check_vocabulary(plan, tokens, folder)?;
            }
            let files = |sources: &[DataSource]| {
                sources.iter().map(|source| (source.path.clone(), source.weight)).collect()
            };
            let packed = PackedBlend::open(&PackedOptions {
                sources: files(&tokens.sources),
                split: tokens.split,
                validation: files(&tokens.validation),
                sequence: plan.batch.sequence,
                vocab: plan.model.vocab,
                seed: plan.run.seed,
                documents: tokens.mask_documents,
            })?;
            let packed = packed.validated_on(validation);
            if evaluates {
                packed.check_length(Split::Validation)?;
            }
            Ok(Box::new(packed))
        }
    }
}

/// The plan with its length in steps, if it is given in epochs: until the dataset's sources have all been read as often.
pub fn with_steps(mut plan: Plan, dataset: &dyn Dataset) -> Result<Plan, DataError> {
    let Some(epochs) = plan.run.epochs else { return Ok(plan) };
    let wrong = |rule: &str| Err(DataError::Value(format!("run.epochs = {epochs} {rule}; use run.steps")));
    let global = plan.batch.global as u64;
    let read = |steps: u64| dataset.epochs(steps * global).into_iter().map(|(_, epochs)| epochs);
    if read(0).next().is_none() {
        return wrong("needs token files, because the demo's data have no end");
    }
    let are_enough = |steps: u64| read(steps).all(|read| read >= epochs);
    if !are_enough(MAX_STEPS) {
        return wrong(&format!("is more than the {MAX_STEPS} steps that a run has at most"));
    }
    // The fewest steps that are enough are above `fewer` and at most `enough`.
    let (mut fewer, mut enough) = (0, MAX_STEPS);
    while fewer + 1 < enough {
        let middle = fewer.midpoint(enough);
        if are_enough(middle) { enough = middle } else { fewer = middle }
    }
    plan.run = plan.run.with_steps(enough);
    Ok(plan)
}

/// The name of the tokenizer of a plan's data: the configured one, or else the one that made the files of the first source,
/// if it is known.
pub fn tokenizer(plan: &Plan) -> Result<Option<String>, DataError> {
    match &plan.data {
        Data::Demo => Ok(None),
        Data::Tokens(TokenData { tokenizer: Some(name), .. }) => Ok(Some(name.clone())),
        Data::Tokens(tokens) => Ok(TokenFile::open(&tokens.sources[0].path)?.tokenizer()),
    }
}

/// Checks that the vocabulary of the configured tokenizer fits the model.
fn check_tokenizer(plan: &Plan, tokens: &TokenData) -> Result<(), DataError> {
    let Some(name) = &tokens.tokenizer else { return Ok(()) };
    let (needed, vocab) = (Tokenizer::open(name)?.vocab(), plan.model.vocab);
    if let (Some(folder), true) = (&plan.init, needed > vocab) {
        return Err(other_vocabulary(&format!("data.tokenizer = \"{name}\""), needed, folder, vocab));
    }
    if needed > vocab {
        return Err(DataError::Value(format!(
            "model.vocab = {vocab} is less than the {needed} tokens of data.tokenizer = \"{name}\"; use {needed} or more"
        )));
    }
    Ok(())
}

/// Checks that the vocabulary of the data fits the weights in `folder`, whose vocabulary cannot be changed.
fn check_vocabulary(plan: &Plan, tokens: &TokenData, folder: &Path) -> Result<(), DataError> {
    let vocab = plan.model.vocab;
    for source in tokens.sources.iter().chain(&tokens.validation) {
        let file = TokenFile::open(&source.path)?;
        if let Some(about) = file.about().filter(|about| about.vocab > vocab) {
            let what = format!("{} (tokenizer {})", file.path().display(), about.tokenizer);
            return Err(other_vocabulary(&what, about.vocab, folder, vocab));
        }
    }
    Ok(())
}

fn other_vocabulary(what: &str, needed: usize, folder: &Path, vocab: usize) -> DataError {
    let folder = folder.display();
    DataError::Value(format!(
        "{what} has a vocabulary of {needed} tokens, but the weights of model.init = \"{folder}\" have one of {vocab}; \
         prepare the text with the tokenizer of these weights, as in kintsugi prepare --tokenizer {folder}"
    ))
}

/// Reads a replica's share of global batches.
pub(crate) struct BatchReader<'a> {
    dataset: &'a dyn Dataset,
    sampler: Sampler,
    split: Split,
    replica: usize,
    /// Whether this rank's program loads tokens. The middle stages of a pipeline load none.
    loads: bool,
}

/// A replica's share of one global batch, by micro-batch. It is complete before the program starts, so a program never fails
/// because of its data.
#[derive(Default)]
pub(crate) struct StepTokens(Vec<MicroBatch>);

impl<'a> BatchReader<'a> {
    /// A reader of the batches that `program` loads on a rank.
    pub fn new(
        plan: &Plan,
        dataset: &'a dyn Dataset,
        split: Split,
        worker: &Worker,
        program: &Program,
    ) -> Self {
        let sampler = Sampler::new(plan.batch.sequence, plan.batch.global, plan.batch.micro, plan.mesh.dp())
            .with_starts(plan.masks_documents())
            .with_window(plan.any_window())
            .with_slices(plan.mesh.cp(), worker.at.cp())
            .with_whole_starts(plan.loads_whole_starts());
        let loads = program.ops.iter().any(|op| matches!(op, Op::Load { .. }));
        BatchReader { dataset, sampler, split, replica: worker.at.dp(), loads }
    }

    /// Reads the slices of another rank of cp.
    pub fn of_part(self, plan: &Plan, part: usize) -> Self {
        BatchReader { sampler: self.sampler.with_slices(plan.mesh.cp(), part), ..self }
    }

    /// Reads the global batch of `step` into `tokens` and reuses its memory.
    pub fn read(&self, step: u64, tokens: &mut StepTokens) -> Result<(), DataError> {
        if !self.loads {
            return Ok(());
        }
        RankActivity::Data.set();
        tokens.0.resize_with(self.sampler.micro_batches(), MicroBatch::default);
        for (micro, batch) in tokens.0.iter_mut().enumerate() {
            self.sampler.batch(self.dataset, self.split, step, self.replica, micro, batch)?;
        }
        Ok(())
    }
}

impl TokenSource for StepTokens {
    fn batch(&mut self, micro: usize) -> Option<Tokens<'_>> {
        let MicroBatch { tokens, targets, starts, .. } = &self.0[micro];
        Some(Tokens { inputs: tokens, targets, starts })
    }
}

/// Reads the tokens of the current step and of the next ones.
///
/// A rank that cannot read its tokens cannot run the step, and all ranks must stop after the same step. So a rank reads its
/// tokens early enough to ask the others to stop: the request is part of the all-reduce at the end of an earlier step.
pub(crate) struct ReadAhead<'a> {
    batches: BatchReader<'a>,
    /// Global batches that have not been read yet.
    unread: Range<u64>,
    /// Batches that have been read, oldest first.
    ready: VecDeque<StepTokens>,
    /// The memory of a finished step's tokens, for reuse.
    spare: StepTokens,
    failure: Option<DataError>,
}

impl<'a> ReadAhead<'a> {
    /// Reads the first `ahead` of the global batches `all`. If that fails, no step has run yet.
    pub fn new(batches: BatchReader<'a>, all: Range<u64>, ahead: u64) -> Result<Self, DataError> {
        let mut ready = VecDeque::new();
        let first = all.start..all.end.min(all.start + ahead);
        let unread = first.end..all.end;
        for batch in first {
            let mut tokens = StepTokens::default();
            batches.read(batch, &mut tokens)?;
            ready.push_back(tokens);
        }
        Ok(ReadAhead { batches, unread, ready, spare: StepTokens::default(), failure: None })
    }

    /// Reads one more global batch, if there is one. Returns whether all reads have succeeded so far.
    pub fn read_next(&mut self) -> bool {
        if self.failure.is_none()
            && let Some(batch) = self.unread.next()
        {
            let mut tokens = std::mem::take(&mut self.spare);
            match self.batches.read(batch, &mut tokens) {
                Ok(()) => self.ready.push_back(tokens),
                Err(error) => self.failure = Some(error),
            }
        }
        self.failure.is_none()
    }

    /// The tokens of the current step.
    pub fn current(&mut self) -> &mut StepTokens {
        self.ready.front_mut().expect("a step begins when its tokens are here")
    }

    /// Frees the tokens of the current step for reuse.
    pub fn finish_step(&mut self) {
        self.spare = self.ready.pop_front().unwrap_or_default();
    }

    /// Why the next global batch could not be read, if it could not.
    pub fn into_failure(self) -> Option<DataError> {
        self.failure
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    /// Two sources that take turns, the second of which has twice as many samples.
    struct Two;

    impl Dataset for Two {
        fn vocab(&self) -> usize {
            128
        }

        fn floor(&self, _sequence: usize) -> Option<f64> {
            None
        }

        fn epochs(&self, samples: u64) -> Vec<(String, f64)> {
            [100.0, 200.0].map(|all| (String::new(), samples as f64 / 2.0 / all)).to_vec()
        }

        fn sample(&self, _split: Split, _index: u64, _out: &mut [u32]) -> Result<(), DataError> {
            unreachable!("nothing is read")
        }
    }

    #[test]
    fn epochs_end_when_every_source_has_been_read_as_often() {
        let steps = |dataset: &dyn Dataset, epochs: &str| {
            let plan = ConfigSource::demo().set("batch.global=32").set(format!("run.epochs={epochs}"));
            let plan = with_steps(plan.plan().expect("a legal config"), dataset);
            plan.map(|plan| (plan.run.steps, plan.run.epochs)).map_err(|error| error.to_string())
        };
        // 400 samples for an epoch of the second source.
        assert_eq!(steps(&Two, "1"), Ok((13, None)));
        assert_eq!(steps(&Two, "0.5"), Ok((7, None)));
        assert_eq!(steps(&Two, "8"), Ok((100, None)));
        let demo = steps(&Demo::new(1), "1").expect_err("it has no end");
        assert!(demo.contains("run.epochs = 1 needs token files"), "{demo}");
        assert!(steps(&Two, "1e9").expect_err("too long").contains("more than the"));
    }
}
