//! Generation: extends texts token by token with KV caches, with any layout.
//!
//! All ranks of a replica keep the same texts. The last stage samples the tokens and shares them with every stage, so every
//! rank knows what to feed next and when to stop.

mod batch;
mod error;
mod sampling;

pub use error::{GenerateError, check_prompts};
pub use sampling::Sampling;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_plan::Plan;
use kintsugi_rank::{Purpose, Store};

use crate::job::run_ranks;
use crate::threads::spawn;
use crate::{Job, JobError, MemoryChoice, RankError, Worker};
use batch::{StopCondition, TextBatch};

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// The most new tokens of a text.
    pub tokens: usize,
    /// Tokens that end a text. The end token is part of the text.
    pub end_at: Vec<u32>,
    /// Only tokens below this are sampled: a model's vocabulary may be larger than its tokenizer's.
    pub vocab: usize,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
}

/// A newly sampled token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewToken {
    /// Index of the prompt.
    pub prompt: usize,
    /// The token.
    pub token: u32,
}

/// The result of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationResult {
    /// The new tokens of every prompt.
    pub tokens: Vec<Vec<u32>>,
    /// Seconds until every prompt had its first new token, on the slowest replica.
    pub prompts_s: f64,
    /// Seconds for all further tokens, on the slowest replica.
    pub tokens_s: f64,
}

impl GenerationResult {
    /// New tokens per second. The first token of each text does not count: its time is part of the prompt's.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let tokens: usize = self.tokens.iter().map(|tokens| tokens.len().saturating_sub(1)).sum();
        (tokens > 0).then(|| tokens as f64 / self.tokens_s)
    }
}

/// Continues every prompt with weights from a store. Calls `on_token` for every token as it is sampled.
///
/// The plan must come from [`Plan::for_generation`]. Returns the error of [`check_prompts`] if that rejects the prompts.
pub fn generate(
    plan: &Plan,
    weights: &dyn Store,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    mut on_token: impl FnMut(NewToken),
) -> Result<GenerationResult, GenerateError> {
    check_prompts(plan, prompts, options)?;
    let job = Job::new(Arc::new(plan.clone()), options.memory.clone());
    let world = job.world();
    let mut tokens = vec![Vec::new(); prompts.len()];
    let (sender, received) = channel();
    let events = Mutex::new(Some(sender));
    let times = thread::scope(|scope| {
        let running = spawn(scope, "job", || {
            let times = run_ranks(Purpose::Inference, &job, &world, |worker| {
                worker.load(weights)?;
                // One rank of each replica reports.
                let reports = worker.at.pp() == 0 && worker.at.tp() == 0;
                let events = reports.then(|| events.lock().expect("nobody panics with it").clone()).flatten();
                generate_rank(worker, plan, prompts, options, events.as_ref())
            });
            drop(events.lock().map(|mut events| events.take()));
            times
        })
        .map_err(JobError::from)?;
        for new in received {
            tokens[new.prompt].push(new.token);
            on_token(new);
        }
        running.join().expect("the job's thread only waits")
    })?;
    let longest = |time: fn(&Times) -> Duration| times.iter().map(time).max().unwrap_or_default();
    Ok(GenerationResult {
        tokens,
        prompts_s: longest(|times| times.prompts).as_secs_f64(),
        tokens_s: longest(|times| times.tokens).as_secs_f64(),
    })
}

/// The time of a rank's generation.
#[derive(Default)]
struct Times {
    prompts: Duration,
    tokens: Duration,
}

fn generate_rank(
    worker: &mut Worker,
    plan: &Plan,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    events: Option<&Sender<NewToken>>,
) -> Result<Times, RankError> {
    let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let end = StopCondition { tokens: options.tokens, at: options.end_at.clone() };
    let mut times = Times::default();
    for round in plan.rounds(worker.at.dp(), &lengths, options.tokens) {
        let program = plan.generation(worker.at.pp(), round.micro_batches);
        let mut batch = TextBatch::new(&round, prompts, options.sampling, options.vocab, &end);
        worker.rank.start_generation(round.micro_batches, round.samples, round.capacity);
        let mut time = &mut times.prompts;
        while let Some(new) = batch.next_step() {
            let begun = Instant::now();
            worker.rank.expect_tokens(new);
            worker.run(&program, &mut batch, |_, _| {})?;
            let chosen = worker.rank.chosen();
            *time += begun.elapsed();
            time = &mut times.tokens;
            batch.take(&chosen, |prompt, token| {
                if let Some(events) = events {
                    // Sending fails only if the caller has panicked.
                    events.send(NewToken { prompt, token }).ok();
                }
            });
        }
        worker.rank.end_generation();
    }
    Ok(times)
}
