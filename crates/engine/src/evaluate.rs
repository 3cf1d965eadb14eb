//! Evaluation: the mean loss of a model on a part of a dataset, on any layout.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use kintsugi_data::{Dataset, Split};
use kintsugi_plan::Plan;
use kintsugi_rank::{Purpose, Store};
use serde::Serialize;

use crate::job::run_for;
use crate::source::Batches;
use crate::{Job, JobError, MemoryChoice, Worker};

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluated {
    /// Mean loss, in nats per token.
    pub loss: f64,
    /// `e` to the loss.
    pub perplexity: f64,
    /// Tokens whose loss was taken.
    pub tokens: u64,
    /// How many of them a second.
    pub tokens_per_s: f64,
}

/// What to evaluate on.
#[derive(Clone, Debug)]
pub struct EvaluateOptions {
    /// Which part of the dataset.
    pub split: Split,
    /// How many global batches, from the first sample on.
    pub batches: u64,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
}

/// Evaluates a model with weights from a store; `on_batch` hears of the mean loss so far after every global batch.
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
    let results = thread::scope(|scope| {
        let running = scope.spawn(|| {
            let results = run_for(Purpose::Inference, &job, |worker| {
                worker.load(weights);
                let voice = (worker.number == 0).then(|| voice.lock().expect("taken once").take()).flatten();
                evaluate_rank(worker, plan, dataset, options, voice.as_ref())
            });
            drop(voice.lock().map(|mut voice| voice.take()));
            results
        });
        received.iter().for_each(on_batch);
        running.join().expect("the job's thread only waits")
    })?;
    Ok(results[0])
}

fn evaluate_rank(
    worker: &mut Worker,
    plan: &Plan,
    dataset: &dyn Dataset,
    options: &EvaluateOptions,
    voice: Option<&Sender<f64>>,
) -> Evaluated {
    let program = plan.evaluation(worker.at.pp, plan.micro_batches());
    let mut batches = Batches::new(plan, dataset, options.split, worker.at.dp);
    let begun = Instant::now();
    let mut sum = 0.0;
    for batch in 0..options.batches {
        batches.begin(batch);
        worker.run(&program, &mut batches, |_, _| {});
        sum += worker.rank.mean_loss(plan.tokens_per_step());
        if let Some(voice) = voice {
            // Nobody listens any more only if the caller has panicked.
            voice.send(sum / (batch + 1) as f64).ok();
        }
    }
    let (loss, tokens) = (sum / options.batches as f64, options.batches * plan.tokens_per_step() as u64);
    let tokens_per_s = tokens as f64 / begun.elapsed().as_secs_f64();
    Evaluated { loss, perplexity: loss.exp(), tokens, tokens_per_s }
}
