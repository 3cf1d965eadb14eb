//! A plan's dataset, and a rank's micro-batches from it.

use kintsugi_data::{
    DataError, Dataset, Demo, MicroBatch, Packed, PackedOptions, Sampler, Split, TokenFile, Tokenizer,
};
use kintsugi_plan::{Data, DataSource, Plan, TokenData};
use kintsugi_rank::{Source, Tokens};

/// The plan's dataset. Files that are not there, are something else or do not go with the model are refused.
pub fn dataset(plan: &Plan) -> Result<Box<dyn Dataset>, DataError> {
    open(plan, Split::Validation, plan.run.eval_every > 0)
}

/// The plan's dataset for an evaluation on one of its splits, which is the validation split of what is given.
pub fn evaluation_dataset(plan: &Plan, split: Split) -> Result<Box<dyn Dataset>, DataError> {
    open(plan, split, true)
}

/// The plan's dataset with `validation` as its validation split, which is looked at if it `evaluates`.
fn open(plan: &Plan, validation: Split, evaluates: bool) -> Result<Box<dyn Dataset>, DataError> {
    match &plan.data {
        Data::Demo => Ok(Box::new(Demo::new(plan.run.seed).validated_on(validation))),
        Data::Tokens(tokens) => {
            check_tokenizer(plan, tokens)?;
            let files = |sources: &[DataSource]| {
                sources.iter().map(|source| (source.path.clone(), source.weight)).collect()
            };
            let packed = Packed::open(&PackedOptions {
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

/// The name of the tokenizer of a plan's data: the one that the configuration names, or else the one that the first
/// source's files were made with, where that is known.
pub fn tokenizer(plan: &Plan) -> Result<Option<String>, DataError> {
    match &plan.data {
        Data::Demo => Ok(None),
        Data::Tokens(TokenData { tokenizer: Some(name), .. }) => Ok(Some(name.clone())),
        Data::Tokens(tokens) => Ok(TokenFile::open(&tokens.sources[0].path)?.tokenizer()),
    }
}

/// A tokenizer that was named must be one that the model can have.
fn check_tokenizer(plan: &Plan, tokens: &TokenData) -> Result<(), DataError> {
    let Some(name) = &tokens.tokenizer else { return Ok(()) };
    let (needed, vocab) = (Tokenizer::open(name)?.vocab(), plan.model.vocab);
    if needed > vocab {
        return Err(DataError::Value(format!(
            "model.vocab = {vocab} is less than the {needed} tokens of data.tokenizer = \"{name}\"; use {needed} or more"
        )));
    }
    Ok(())
}

/// The samples of one replica, step by step.
pub(crate) struct Batches<'a> {
    dataset: &'a dyn Dataset,
    sampler: Sampler,
    split: Split,
    replica: usize,
    /// The step whose global batch is read.
    step: u64,
    /// The step whose first micro-batch is made already.
    ahead: Option<u64>,
    made: MicroBatch,
}

impl<'a> Batches<'a> {
    pub fn new(plan: &Plan, dataset: &'a dyn Dataset, split: Split, replica: usize) -> Self {
        let sampler = Sampler::new(plan.batch.sequence, plan.batch.global, plan.batch.micro, plan.mesh.dp)
            .with_starts(plan.masks_documents());
        Batches { dataset, sampler, split, replica, step: 0, ahead: None, made: MicroBatch::default() }
    }

    /// Reads the global batch of `step` from now on.
    pub fn begin(&mut self, step: u64) {
        self.step = step;
    }

    /// Makes the first micro-batch of `step` now, while the device is busy with the step before.
    pub fn prepare(&mut self, step: u64) {
        self.make(step, 0);
        self.ahead = Some(step);
    }

    fn make(&mut self, step: u64, micro: usize) {
        let Batches { dataset, sampler, split, replica, made, .. } = self;
        // A rank has no other way to fail: this takes the job down with the sentence.
        let result = sampler.batch(*dataset, *split, step, *replica, micro, made);
        result.unwrap_or_else(|error| panic!("{error}"));
    }
}

impl Source for Batches<'_> {
    fn batch(&mut self, micro: usize) -> Option<Tokens<'_>> {
        let made = micro == 0 && self.ahead.take() == Some(self.step);
        if !made {
            self.make(self.step, micro);
        }
        let MicroBatch { tokens, targets, starts } = &self.made;
        Some(Tokens { inputs: tokens, targets, starts })
    }
}
