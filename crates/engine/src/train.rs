//! The training loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_comm::Traffic;
use kintsugi_data::{Dataset, Demo, Split};
use kintsugi_plan::{Data, Op, Plan, Unit};
use kintsugi_rank::{Bad, Figures, RankMemory};
use kintsugi_tensor::cpu::counting;
use kintsugi_tensor::ops::control;
use serde::Serialize;

use crate::source::Batches;
use crate::{Job, MemoryChoice, TrainError, Worker, run_job};

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Memory of the ranks.
    pub memory: MemoryChoice,
    /// Set from outside to end the run after the running step.
    pub stop: Arc<AtomicBool>,
    /// The step whose ops are timed, if any.
    pub trace_step: Option<u64>,
}

/// One step, as a person or a script sees it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// 1-based.
    pub step: u64,
    /// Mean loss of the step's tokens, in nats.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens seen so far.
    pub tokens: u64,
    /// Tokens per second of this step.
    pub tokens_per_s: f64,
    /// Seconds of this step.
    pub step_s: f64,
    /// Model FLOPs utilisation, where the device's peak is known.
    pub mfu: Option<f64>,
    /// Loss scale (1 unless fp16).
    pub loss_scale: f64,
    /// Whether the update was skipped because something was not finite.
    pub skipped: bool,
    /// Mean loss on the validation split, on the steps that evaluate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
}

/// What happens while training.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A step has ended.
    Step(StepReport),
}

/// How long an op took on a rank.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// The op.
    pub op: Op,
    /// Since the step began.
    pub start: Duration,
    /// How long.
    pub duration: Duration,
}

/// A finished run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was measured.
    pub measured: Figures,
    /// Loss of the first step.
    pub loss_first: f64,
    /// Loss of the last step.
    pub loss_last: f64,
    /// Loss on the validation split at the last evaluation.
    pub validation_loss: Option<f64>,
    /// Steps done.
    pub steps: u64,
    /// Steps whose update was skipped.
    pub skipped: u64,
    /// Whether it was asked to stop before the end.
    pub stopped: bool,
    /// The ops of the traced step.
    pub spans: Vec<Span>,
}

/// Global batches of the validation split that one evaluation reads.
const EVALUATION_BATCHES: u64 = 4;

/// The plan's dataset.
pub fn dataset(plan: &Plan) -> Result<Box<dyn Dataset>, TrainError> {
    let dataset: Box<dyn Dataset> = match plan.data {
        Data::Demo => Box::new(Demo::new(plan.run.seed)),
    };
    let (model, data) = (plan.model.vocab, dataset.vocab());
    if model < data { Err(TrainError::Vocabulary { model, data }) } else { Ok(dataset) }
}

/// Trains a plan to its end, or until it is asked to stop.
pub fn train(
    plan: &Plan,
    options: &TrainOptions,
    mut on_event: impl FnMut(Event),
) -> Result<Outcome, TrainError> {
    let plan = Arc::new(plan.clone());
    let dataset = dataset(&plan)?;
    let job = Job { plan: Arc::clone(&plan), memory: options.memory.clone(), fault: None };
    let (events, received) = channel();
    // Only rank 0 speaks; the sender is handed to it, so that the channel closes when it is done.
    let voice = Mutex::new(Some(events));
    let results = thread::scope(|scope| {
        let running = scope.spawn(|| {
            let results = run_job(&job, |worker| {
                let voice = (worker.number == 0).then(|| voice.lock().expect("taken once").take()).flatten();
                train_rank(worker, &plan, &*dataset, options, voice.as_ref())
            });
            drop(voice.lock().map(|mut voice| voice.take()));
            results
        });
        received.iter().for_each(&mut on_event);
        running.join().expect("the job's thread only waits")
    })?;
    outcome(&plan, results)
}

/// What one rank brings home.
struct RankResult {
    reports: Vec<StepReport>,
    memory: RankMemory,
    /// Sent in the first step.
    traffic: Traffic,
    stopped: bool,
    /// Whether too many steps in a row were skipped.
    gave_up: bool,
    /// If so, what on this rank is not finite.
    bad: Option<Bad>,
    spans: Vec<Span>,
}

fn train_rank(
    worker: &mut Worker,
    plan: &Plan,
    dataset: &dyn Dataset,
    options: &TrainOptions,
    voice: Option<&Sender<Event>>,
) -> RankResult {
    worker.rank.initialise(plan.run.seed);
    let program = worker.program(plan);
    let mut batches = Batches::new(plan, dataset, Split::Train, worker.at.dp);
    let mut result = RankResult {
        reports: Vec::with_capacity(plan.run.steps as usize),
        memory: RankMemory::default(),
        traffic: Traffic::default(),
        stopped: false,
        gave_up: false,
        bad: None,
        spans: Vec::new(),
    };
    counting::reset(worker.number);
    for step in 0..plan.run.steps {
        if options.stop.load(Ordering::Relaxed) {
            worker.rank.ask_to_stop();
        }
        let begun = Instant::now();
        batches.step = step;
        let mut timer =
            Timer { on: options.trace_step == Some(step), begun, open: None, spans: &mut result.spans };
        let number = worker.number;
        worker.run(&program, &mut batches, |_, op| timer.next(number, Some(*op)));
        timer.next(number, None);
        if step == 0 {
            result.traffic = worker.world.traffic(worker.number);
        }
        let mut report = report(worker, plan, step, begun.elapsed());
        let evaluates =
            plan.run.eval_every > 0 && ((step + 1) % plan.run.eval_every == 0 || step + 1 == plan.run.steps);
        report.validation_loss = evaluates.then(|| evaluate(worker, plan, dataset));
        result.reports.push(report);
        if let Some(voice) = voice {
            // Nobody listens any more only if the caller has panicked.
            voice.send(Event::Step(report)).ok();
        }
        if worker.rank.control(control::SKIPPED_IN_A_ROW) >= plan.run.max_skipped as f64 {
            result.gave_up = true;
            result.bad = worker.rank.first_bad();
            break;
        }
        if worker.rank.stop_agreed() {
            result.stopped = step + 1 < plan.run.steps;
            break;
        }
    }
    result.memory = measured_memory(worker);
    result
}

fn report(worker: &Worker, plan: &Plan, step: u64, elapsed: Duration) -> StepReport {
    let tokens = plan.tokens_per_step() as u64;
    let step_s = elapsed.as_secs_f64();
    StepReport {
        step: step + 1,
        loss: worker.rank.control(control::LOSS),
        grad_norm: worker.rank.control(control::NORM),
        lr: worker.rank.control(control::RATE),
        tokens: (step + 1) * tokens,
        tokens_per_s: tokens as f64 / step_s,
        step_s,
        mfu: None,
        loss_scale: worker.rank.control(control::LOSS_SCALE),
        skipped: worker.rank.control(control::SKIP) > 0.0,
        validation_loss: None,
    }
}

/// The mean loss over the first samples of the validation split: always the same ones.
fn evaluate(worker: &mut Worker, plan: &Plan, dataset: &dyn Dataset) -> f64 {
    let program = plan.evaluation(worker.at.pp, plan.micro_batches());
    let mut batches = Batches::new(plan, dataset, Split::Validation, worker.at.dp);
    let mut losses = 0.0;
    for step in 0..EVALUATION_BATCHES {
        batches.step = step;
        worker.run(&program, &mut batches, |_, _| {});
        losses += worker.rank.mean_loss(plan.tokens_per_step());
    }
    losses / EVALUATION_BATCHES as f64
}

/// The arena's own account by category; what was really taken is the allocator's word where it is installed.
fn measured_memory(worker: &Worker) -> RankMemory {
    let counted = counting::measured(worker.number);
    let reserved = if counted.reserved > 0 {
        counted.reserved + counted.untracked_peak.max(0) as u64
    } else {
        worker.memory.reserved()
    };
    RankMemory::new(worker.memory.peak(), reserved)
}

fn outcome(plan: &Plan, results: Vec<RankResult>) -> Result<Outcome, TrainError> {
    if results[0].gave_up {
        return Err(not_finite(plan, &results));
    }
    let mut traffic = Traffic::default();
    for result in &results {
        traffic.merge(&result.traffic);
    }
    let reports = &results[0].reports;
    let mut measured = Figures::new(results.iter().map(|result| result.memory).collect(), &traffic);
    // The first step warms caches and pages.
    let timed = &reports[usize::from(reports.len() > 1)..];
    let mean = timed.iter().map(|report| report.step_s).sum::<f64>() / timed.len() as f64;
    measured.step_s = Some(mean);
    measured.tokens_per_s = Some(plan.tokens_per_step() as f64 / mean);
    Ok(Outcome {
        measured,
        loss_first: reports.first().map_or(f64::NAN, |report| report.loss),
        loss_last: reports.last().map_or(f64::NAN, |report| report.loss),
        validation_loss: reports.iter().rev().find_map(|report| report.validation_loss),
        steps: reports.len() as u64,
        skipped: reports.iter().filter(|report| report.skipped).count() as u64,
        stopped: results[0].stopped,
        spans: results.into_iter().flat_map(|result| result.spans).collect(),
    })
}

/// Where it began: bad weights spread forwards and bad gradients backwards, so the last stage comes first.
fn not_finite(plan: &Plan, results: &[RankResult]) -> TrainError {
    let bad = results.iter().enumerate().filter_map(|(rank, result)| result.bad.map(|bad| (rank, bad)));
    let first = bad.min_by_key(|&(rank, bad)| {
        let stage = plan.mesh.coordinate(rank).pp;
        (bad.what != "weights", if bad.what == "weights" { stage } else { plan.mesh.pp - stage }, rank)
    });
    // Each part may be finite and only their sum too large: the last unit to be summed then stands for it.
    let (rank, bad) = first.unwrap_or((0, Bad { what: "norm", unit: Unit::Table }));
    TrainError::NotFinite {
        steps: plan.run.max_skipped,
        step: results[0].reports.len() as u64,
        rank,
        what: bad.what,
        unit: bad.unit,
    }
}

/// Times ops: each lasts until the next begins.
struct Timer<'a> {
    on: bool,
    begun: Instant,
    open: Option<(Op, Duration)>,
    spans: &'a mut Vec<Span>,
}

impl Timer<'_> {
    fn next(&mut self, rank: usize, op: Option<Op>) {
        if !self.on {
            return;
        }
        let now = self.begun.elapsed();
        if let Some((op, start)) = self.open.take() {
            self.spans.push(Span { rank, op, start, duration: now.saturating_sub(start) });
        }
        self.open = op.map(|op| (op, now));
    }
}
