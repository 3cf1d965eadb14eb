//! Evaluation: the mean loss of a model on the validation split of a dataset, on any layout.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use kintsugi_data::{DataError, Dataset, Split, ValidationPart};
use kintsugi_plan::{Plan, Program};
use kintsugi_rank::{Purpose, Store};
use serde::Serialize;

use crate::deal::{Deal, Dealt};
use crate::job::run_for;
use crate::source::{Batches, StepTokens};
use crate::threads::spawn;
use crate::{Job, JobError, MemoryChoice, RankError, Worker};

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluated {
    /// Mean loss, in nats per token: that of the sources by their weights.
    pub loss: f64,
    /// `e` to the loss.
    pub perplexity: f64,
    /// Tokens whose loss was taken.
    pub tokens: u64,
    /// How many of them a second.
    pub tokens_per_s: f64,
    /// The same for every source, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceLoss>,
}

/// The mean loss on one source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceLoss {
    /// What it is called.
    pub source: String,
    /// Mean loss, in nats per token.
    pub loss: f64,
    /// Tokens whose loss was taken.
    pub tokens: u64,
}

/// How much to evaluate on.
#[derive(Clone, Debug)]
pub struct EvaluateOptions {
    /// How many samples of the validation split, from the first on, shared among its sources by weight; without a number,
    /// all of them.
    pub samples: Option<u64>,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
}

impl EvaluateOptions {
    /// How many global batches of a plan are run.
    pub fn batches(&self, plan: &Plan, dataset: &dyn Dataset) -> u64 {
        Deal::new(dataset.validation(), self.samples, plan.batch.global as u64).batches()
    }
}

/// Evaluates a model with weights from a store; `on_batch` is called with the mean loss of the running source so far after
/// every global batch.
pub fn evaluate(
    plan: &Plan,
    weights: &dyn Store,
    dataset: &dyn Dataset,
    options: &EvaluateOptions,
    on_batch: impl FnMut(f64),
) -> Result<Evaluated, JobError> {
    let job = Job { plan: Arc::new(plan.clone()), memory: options.memory.clone(), fault: None };
    let (sender, received) = channel();
    let voice = Mutex::new(Some(sender));
    let dealt = Dealt::new(dataset, options.samples, plan);
    let results = thread::scope(|scope| {
        let running = spawn(scope, "job", || {
            let results = run_for(Purpose::Inference, &job, |worker| {
                worker.load(weights)?;
                let voice = (worker.number == 0).then(|| voice.lock().expect("taken once").take()).flatten();
                evaluate_rank(worker, plan, &dealt, voice.as_ref())
            });
            drop(voice.lock().map(|mut voice| voice.take()));
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
    dealt: &Dealt,
    voice: Option<&Sender<f64>>,
) -> Result<Evaluated, RankError> {
    let mut evaluation = Evaluation::new(worker, plan, dealt);
    let begun = Instant::now();
    let Losses { loss, mut sources } = evaluation.run(worker, plan, |loss| {
        if let Some(voice) = voice {
            // Nobody listens any more only if the caller has panicked.
            voice.send(loss).ok();
        }
    })?;
    let tokens = sources.iter().map(|source| source.tokens).sum();
    let tokens_per_s = tokens as f64 / begun.elapsed().as_secs_f64();
    if sources.len() == 1 {
        sources.clear();
    }
    Ok(Evaluated { loss, perplexity: loss.exp(), tokens, tokens_per_s, sources })
}

/// Tokens that all ranks together hold for evaluations: some 200 MiB.
const MOST_LOADED_TOKENS: usize = 1 << 24;

/// A rank's evaluations: always over the same samples.
pub(crate) struct Evaluation<'a> {
    program: Program,
    batches: Batches<'a>,
    deal: &'a Deal,
    /// The tokens of the first batches, if they were read beforehand.
    loaded: Vec<StepTokens>,
}

/// What an evaluation came to.
pub(crate) struct Losses {
    /// The mean of the sources by their weights.
    pub loss: f64,
    pub sources: Vec<SourceLoss>,
}

impl<'a> Evaluation<'a> {
    pub fn new(worker: &Worker, plan: &Plan, dealt: &'a Dealt) -> Self {
        let program = plan.evaluation(worker.at.pp, plan.micro_batches());
        let batches = Batches::new(plan, dealt, Split::Validation, worker, &program);
        Evaluation { program, batches, deal: &dealt.deal, loaded: Vec::new() }
    }

    /// Reads tokens now, so that no evaluation fails for its data: those of the first batches, up to a limit for the
    /// memory of all ranks. The rest is read by every evaluation.
    pub fn load(&mut self, plan: &Plan) -> Result<(), DataError> {
        let read = |batch| {
            let mut tokens = StepTokens::default();
            self.batches.read(batch, &mut tokens).map(|()| tokens)
        };
        let batch_tokens = plan.tokens_per_step() * plan.mesh.tp;
        let batches = self.deal.batches().min((MOST_LOADED_TOKENS / batch_tokens) as u64);
        self.loaded = (0..batches).map(read).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Runs all batches; `on_batch` is called with the mean loss of the running source so far.
    pub fn run(
        &mut self,
        worker: &mut Worker,
        plan: &Plan,
        mut on_batch: impl FnMut(f64),
    ) -> Result<Losses, DataError> {
        let mut sums = vec![(0.0, 0); self.deal.sources.len()];
        let mut read = StepTokens::default();
        for (batch, run) in self.deal.iter() {
            let tokens = if let Some(tokens) = self.loaded.get_mut(batch as usize) {
                tokens
            } else {
                self.batches.read(batch, &mut read)?;
                &mut read
            };
            worker.run(&self.program, tokens, |_, _| {});
            let (sum, samples) = &mut sums[run.source];
            *sum += run.samples as f64 * worker.rank.mean_loss(plan.tokens_per_step());
            *samples += run.samples;
            on_batch(*sum / *samples as f64);
        }
        let loss = |((part, _), (sum, samples)): (&(ValidationPart, u64), (f64, u64))| SourceLoss {
            source: part.name.clone(),
            loss: sum / samples as f64,
            tokens: samples * plan.batch.sequence as u64,
        };
        let sources: Vec<SourceLoss> = self.deal.sources.iter().zip(sums).map(loss).collect();
        let weights = || self.deal.sources.iter().map(|(part, _)| part.weight);
        let sum: f64 = weights().zip(&sources).map(|(weight, source)| weight * source.loss).sum();
        Ok(Losses { loss: sum / weights().sum::<f64>(), sources })
    }
}
