//! Evaluation: the mean loss of a model on the validation split of a dataset, with any layout.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use kintsugi_data::{DataError, Dataset, Split, ValidationSource};
use kintsugi_plan::{Plan, Program};
use kintsugi_rank::{Purpose, Store};
use kintsugi_spec::work::Pause;
use serde::Serialize;

use crate::job::run_ranks;
use crate::source::{BatchReader, StepTokens};
use crate::threads::spawn;
use crate::validation_batches::{ValidationBatches, ValidationDataset};
use crate::{Job, JobError, MemoryChoice, RankError, Worker};

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluationResult {
    /// Mean loss in nats per token: the mean over the sources by their weights.
    pub loss: f64,
    /// `e` to the loss.
    pub perplexity: f64,
    /// Tokens whose loss was taken.
    pub tokens: u64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// The loss of every source, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceLoss>,
}

/// The mean loss on one source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceLoss {
    /// The source's name.
    pub source: String,
    /// Mean loss, in nats per token.
    pub loss: f64,
    /// Tokens whose loss was taken.
    pub tokens: u64,
}

/// How much to evaluate on.
#[derive(Clone, Debug)]
pub struct EvaluateOptions {
    /// How many samples of the validation split to read, divided among its sources by weight. `None` reads all.
    pub samples: Option<u64>,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
}

impl EvaluateOptions {
    /// Number of global batches of a plan.
    pub fn batches(&self, plan: &Plan, dataset: &dyn Dataset) -> u64 {
        ValidationBatches::new(dataset.validation(), self.samples, plan.batch.global as u64).batches()
    }
}

/// Evaluates a model with weights from a store. After every global batch, calls `on_batch` with the mean loss of the
/// current source so far.
pub fn evaluate(
    plan: &Plan,
    weights: &dyn Store,
    dataset: &dyn Dataset,
    options: &EvaluateOptions,
    on_batch: impl FnMut(f64),
) -> Result<EvaluationResult, JobError> {
    let job = Job::new(Arc::new(plan.clone()), options.memory.clone());
    let world = job.world();
    let (sender, received) = channel();
    let events = Mutex::new(Some(sender));
    let validation = ValidationDataset::new(dataset, options.samples, plan);
    let results = thread::scope(|scope| {
        let running = spawn(scope, "job", || {
            let results = run_ranks(Purpose::Inference, &job, &world, |worker| {
                worker.load(weights)?;
                let events =
                    (worker.number == 0).then(|| events.lock().expect("taken once").take()).flatten();
                evaluate_rank(worker, plan, &validation, events.as_ref())
            });
            drop(events.lock().map(|mut events| events.take()));
            results
        })?;
        received.iter().for_each(on_batch);
        running.join().expect("the job's thread only waits")
    })?;
    Ok(results.into_iter().next().expect("there is a rank"))
}

fn evaluate_rank(
    worker: &mut Worker,
    plan: &Plan,
    validation: &ValidationDataset,
    events: Option<&Sender<f64>>,
) -> Result<EvaluationResult, RankError> {
    let mut evaluation = Evaluation::new(worker, plan, validation);
    let begun = Instant::now();
    let Losses { loss, mut sources } = evaluation.run(worker, plan, |loss| {
        if let Some(events) = events {
            // Sending fails only if the caller has panicked.
            events.send(loss).ok();
        }
    })?;
    let tokens = sources.iter().map(|source| source.tokens).sum();
    let tokens_per_s = tokens as f64 / begun.elapsed().as_secs_f64();
    if sources.len() == 1 {
        sources.clear();
    }
    Ok(EvaluationResult { loss, perplexity: loss.exp(), tokens, tokens_per_s, sources })
}

/// The most tokens that all ranks together keep in memory for evaluations: about 200 MiB.
const MAX_LOADED_TOKENS: usize = 1 << 24;

/// Evaluates on one rank, always with the same samples.
pub(crate) struct Evaluation<'a> {
    program: Program,
    reader: BatchReader<'a>,
    batches: &'a ValidationBatches,
    /// The tokens of the first batches, if they were read in advance.
    loaded: Vec<StepTokens>,
}

/// The losses of one evaluation.
pub(crate) struct Losses {
    /// The mean over the sources by their weights.
    pub loss: f64,
    pub sources: Vec<SourceLoss>,
}

impl<'a> Evaluation<'a> {
    pub fn new(worker: &Worker, plan: &Plan, validation: &'a ValidationDataset) -> Self {
        let program = plan.evaluation(worker.at.pp(), plan.micro_batches());
        let reader = BatchReader::new(plan, validation, Split::Validation, worker, &program);
        Evaluation { program, reader, batches: &validation.batches, loaded: Vec::new() }
    }

    /// Reads tokens in advance, so that a later evaluation does not fail because of its data. Reads the first batches, up
    /// to a limit on the memory of all ranks; every evaluation reads the rest.
    pub fn load(&mut self, plan: &Plan) -> Result<(), DataError> {
        let read = |batch| {
            let mut tokens = StepTokens::default();
            self.reader.read(batch, &mut tokens).map(|()| tokens)
        };
        let batch_tokens = plan.tokens_per_step() * plan.mesh.tp();
        let batches = self.batches.batches().min((MAX_LOADED_TOKENS / batch_tokens) as u64);
        self.loaded = (0..batches).map(read).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Runs all batches. Calls `on_batch` after each with the mean loss of the current source so far.
    pub fn run(
        &mut self,
        worker: &mut Worker,
        plan: &Plan,
        mut on_batch: impl FnMut(f64),
    ) -> Result<Losses, RankError> {
        let mut sums = vec![(0.0, 0); self.batches.sources.len()];
        let mut read = StepTokens::default();
        for (batch, run) in self.batches.iter() {
            let tokens = if let Some(tokens) = self.loaded.get_mut(batch as usize) {
                tokens
            } else {
                let pause = Pause::begin();
                self.reader.read(batch, &mut read)?;
                drop(pause);
                &mut read
            };
            worker.run(&self.program, tokens, |_, _| {})?;
            let (sum, samples) = &mut sums[run.source];
            *sum += run.samples as f64 * worker.rank.mean_loss(plan.tokens_per_step());
            *samples += run.samples;
            on_batch(*sum / *samples as f64);
        }
        let loss = |((part, _), (sum, samples)): (&(ValidationSource, u64), (f64, u64))| SourceLoss {
            source: part.name.clone(),
            loss: sum / samples as f64,
            tokens: samples * plan.batch.sequence as u64,
        };
        let sources: Vec<SourceLoss> = self.batches.sources.iter().zip(sums).map(loss).collect();
        let weights = || self.batches.sources.iter().map(|(part, _)| part.weight);
        let sum: f64 = weights().zip(&sources).map(|(weight, source)| weight * source.loss).sum();
        Ok(Losses { loss: sum / weights().sum::<f64>(), sources })
    }
}
