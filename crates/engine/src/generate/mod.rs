//! Generation: texts grow token by token, over caches of keys and values, on any layout.
//!
//! All ranks of a replica keep the same texts. The last stage chooses, every stage learns what was chosen, and so
//! every rank knows what to feed next and when to end.

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

use crate::job::run_for;
use crate::threads::spawn;
use crate::{Job, JobError, MemoryChoice, Worker};
use batch::{Batch, End};

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// New tokens of every text, at most.
    pub tokens: usize,
    /// Tokens that end a text. They are part of it.
    pub end_at: Vec<u32>,
    /// Tokens from this one on are never chosen: a model may have more than its tokenizer has words for.
    pub vocab: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Memory of the ranks.
    pub memory: MemoryChoice,
}

/// A token of a text, as soon as it is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewToken {
    /// The number of the prompt.
    pub prompt: usize,
    /// The token.
    pub token: u32,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The new tokens of every prompt.
    pub tokens: Vec<Vec<u32>>,
    /// How long the prompts took, up to the first new token of each; of the slowest replica.
    pub prompts_s: f64,
    /// How long all further tokens took; of the slowest replica.
    pub tokens_s: f64,
}

impl Generated {
    /// New tokens per second, without the first of each text: that one belongs to the prompt's time.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let tokens: usize = self.tokens.iter().map(|tokens| tokens.len().saturating_sub(1)).sum();
        (tokens > 0).then(|| tokens as f64 / self.tokens_s)
    }
}

/// Continues every prompt, with weights from a store; `on_token` hears of every token as it comes.
///
/// The plan is one of [`Plan::for_generation`]. What [`check_prompts`] refuses is refused.
pub fn generate(
    plan: &Plan,
    weights: &dyn Store,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    mut on_token: impl FnMut(NewToken),
) -> Result<Generated, GenerateError> {
    check_prompts(plan, prompts, options)?;
    let job = Job { plan: Arc::new(plan.clone()), memory: options.memory.clone(), fault: None };
    let mut tokens = vec![Vec::new(); prompts.len()];
    let (sender, received) = channel();
    let voice = Mutex::new(Some(sender));
    let times = thread::scope(|scope| {
        let running = spawn(scope, "job", || {
            let times = run_for(Purpose::Inference, &job, |worker| {
                worker.load(weights)?;
                // One rank of each replica speaks.
                let speaks = worker.at.pp == 0 && worker.at.tp == 0;
                let voice = speaks.then(|| voice.lock().expect("nobody panics with it").clone()).flatten();
                Ok(generate_rank(worker, plan, prompts, options, voice.as_ref()))
            });
            drop(voice.lock().map(|mut voice| voice.take()));
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
    Ok(Generated {
        tokens,
        prompts_s: longest(|times| times.prompts).as_secs_f64(),
        tokens_s: longest(|times| times.tokens).as_secs_f64(),
    })
}

/// Where the time went.
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
    voice: Option<&Sender<NewToken>>,
) -> Times {
    let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let end = End { tokens: options.tokens, at: options.end_at.clone() };
    let mut times = Times::default();
    for round in plan.rounds(worker.at.dp, &lengths, options.tokens) {
        let program = plan.generation(worker.at.pp, round.micro_batches);
        let mut batch = Batch::new(&round, prompts, options.sampling, options.vocab, &end);
        worker.rank.start_generation(round.micro_batches, round.samples, round.capacity);
        let mut time = &mut times.prompts;
        while let Some(new) = batch.next_step() {
            let begun = Instant::now();
            worker.rank.expect_tokens(new);
            worker.run(&program, &mut batch, |_, _| {});
            let chosen = worker.rank.chosen();
            *time += begun.elapsed();
            time = &mut times.tokens;
            batch.take(&chosen, |prompt, token| {
                if let Some(voice) = voice {
                    // Nobody listens any more only if the caller has panicked.
                    voice.send(NewToken { prompt, token }).ok();
                }
            });
        }
        worker.rank.end_generation();
    }
    times
}
