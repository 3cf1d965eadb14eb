//! Evaluation: the mean loss of a model on a part of a dataset, on any layout.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use kintsugi_data::{DataError, Dataset, Split};
use kintsugi_plan::Plan;
use kintsugi_rank::{Purpose, Store};
use serde::Serialize;

use crate::job::run_for;
use crate::source::{Batches, StepTokens};
use crate::threads::spawn;
use crate::{Job, JobError, MemoryChoice, RankError, Worker};

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
    /// How many samples, from the first on.
    pub samples: u64,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
}

impl EvaluateOptions {
    /// How many global batches of a plan are run.
    pub fn batches(&self, plan: &Plan) -> u64 {
        Deal { samples: self.samples, global: plan.batch.global as u64 }.batches().count() as u64
    }
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
    let deal = Deal { samples: options.samples, global: plan.batch.global as u64 };
    let dataset = Dealt { dataset, deal };
    let results = thread::scope(|scope| {
        let running = spawn(scope, "job", || {
            let results = run_for(Purpose::Inference, &job, |worker| {
                worker.load(weights)?;
                let voice = (worker.number == 0).then(|| voice.lock().expect("taken once").take()).flatten();
                evaluate_rank(worker, plan, &dataset, options.split, voice.as_ref())
            });
            drop(voice.lock().map(|mut voice| voice.take()));
            results
        })?;
        received.iter().for_each(on_batch);
        running.join().expect("the job's thread only waits")
    })?;
    Ok(results[0])
}

fn evaluate_rank(
    worker: &mut Worker,
    plan: &Plan,
    dealt: &Dealt,
    split: Split,
    voice: Option<&Sender<f64>>,
) -> Result<Evaluated, RankError> {
    let program = plan.evaluation(worker.at.pp, plan.micro_batches());
    let batches = Batches::new(plan, dealt, split, worker, &program);
    let mut tokens = StepTokens::default();
    let begun = Instant::now();
    let (mut sum, mut samples) = (0.0, 0);
    for (batch, part) in (0..).zip(dealt.deal.batches()) {
        batches.read(batch, &mut tokens)?;
        worker.run(&program, &mut tokens, |_, _| {});
        sum += part.samples as f64 * worker.rank.mean_loss(plan.tokens_per_step());
        samples += part.samples;
        if let Some(voice) = voice {
            // Nobody listens any more only if the caller has panicked.
            voice.send(sum / samples as f64).ok();
        }
    }
    let (loss, tokens) = (sum / samples as f64, samples * plan.batch.sequence as u64);
    let tokens_per_s = tokens as f64 / begun.elapsed().as_secs_f64();
    Ok(Evaluated { loss, perplexity: loss.exp(), tokens, tokens_per_s })
}

/// Samples dealt out in global batches of a fixed size, each counted once.
///
/// What is left when all whole batches are full goes into further ones, each with as many samples as divide it, so that
/// every sample is in it equally often and the batch's mean is the mean of those samples.
#[derive(Clone, Copy, Debug)]
struct Deal {
    samples: u64,
    global: u64,
}

/// The samples of a batch: so many, from the first on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    first: u64,
    samples: u64,
}

impl Deal {
    fn batches(self) -> impl Iterator<Item = Part> {
        let mut first = 0;
        std::iter::from_fn(move || {
            let most = self.global.min(self.samples - first);
            let samples = (1..=most).rev().find(|&samples| self.global.is_multiple_of(samples))?;
            let part = Part { first, samples };
            first += samples;
            Some(part)
        })
    }

    /// The sample in place `index` of all batches laid end to end.
    fn sample(self, index: u64) -> u64 {
        let (batch, place) = (index / self.global, index % self.global);
        let whole = self.samples / self.global;
        if batch < whole {
            return index;
        }
        let left = Deal { samples: self.samples % self.global, ..self };
        let part = left.batches().nth((batch - whole) as usize).expect("no more batches are read than dealt");
        whole * self.global + part.first + place % part.samples
    }
}

/// A dataset as a deal has it.
struct Dealt<'a> {
    dataset: &'a dyn Dataset,
    deal: Deal,
}

impl Dataset for Dealt<'_> {
    fn vocab(&self) -> usize {
        self.dataset.vocab()
    }

    fn floor(&self, sequence: usize) -> Option<f64> {
        self.dataset.floor(sequence)
    }

    fn sample(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        self.dataset.sample(split, self.deal.sample(index), out)
    }

    fn starts(&self, split: Split, index: u64, out: &mut [u32]) -> Result<(), DataError> {
        self.dataset.starts(split, self.deal.sample(index), out)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_sample_is_counted_once() {
        for (samples, global) in
            [(0, 4), (1, 1), (1, 8), (7, 8), (8, 8), (23, 12), (112, 9), (5, 24), (30, 7)]
        {
            let deal = Deal { samples, global };
            let parts: Vec<Part> = deal.batches().collect();
            assert_eq!(parts.iter().map(|part| part.samples).sum::<u64>(), samples);
            let mut shares = BTreeMap::new();
            for (batch, part) in (0..).zip(&parts) {
                for place in 0..global {
                    let sample = deal.sample(batch * global + place);
                    assert!((part.first..part.first + part.samples).contains(&sample));
                    *shares.entry(sample).or_insert(0) += part.samples;
                }
            }
            // A batch's mean counts as often as it has samples, and a place in it is one of `global`.
            let expected: BTreeMap<u64, u64> = (0..samples).map(|sample| (sample, global)).collect();
            assert_eq!(shares, expected, "{samples} samples in batches of {global}");
        }
    }
}
