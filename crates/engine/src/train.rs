//! The training loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use kintsugi_comm::Traffic;
use kintsugi_data::{Dataset, Split};
use kintsugi_plan::{Plan, Program};
use kintsugi_rank::RankMemory;
use kintsugi_tensor::cpu::counting;
use kintsugi_tensor::ops::control;

use crate::report::{History, RankResult};
use crate::source::{Batches, dataset};
use crate::trace::Timer;
use crate::{Job, MemoryChoice, Outcome, StepReport, TrainError, Worker, run_job};

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Memory of the ranks.
    pub memory: MemoryChoice,
    /// Set from outside to end the run after the running step.
    pub stop: Arc<AtomicBool>,
    /// The 0-based step whose ops are timed, if any.
    pub trace_step: Option<u64>,
}

/// Trains a plan to its end, or until it is asked to stop; `on_step` hears of every step.
pub fn train(
    plan: &Plan,
    options: &TrainOptions,
    on_step: impl FnMut(StepReport),
) -> Result<Outcome, TrainError> {
    let plan = Arc::new(plan.clone());
    let dataset = dataset(&plan)?;
    let job = Job { plan: Arc::clone(&plan), memory: options.memory.clone(), fault: None };
    let (reports, received) = channel();
    // Only rank 0 speaks; the sender is handed to it, so that the channel closes when it is done.
    let voice = Mutex::new(Some(reports));
    let results = thread::scope(|scope| {
        let running = scope.spawn(|| {
            let results = run_job(&job, |worker| {
                let voice = (worker.number == 0).then(|| voice.lock().expect("taken once").take()).flatten();
                train_rank(worker, &plan, &*dataset, options, voice.as_ref())
            });
            drop(voice.lock().map(|mut voice| voice.take()));
            results
        });
        received.iter().for_each(on_step);
        running.join().expect("the job's thread only waits")
    })?;
    Outcome::new(&plan, results)
}

fn train_rank(
    worker: &mut Worker,
    plan: &Plan,
    dataset: &dyn Dataset,
    options: &TrainOptions,
    voice: Option<&Sender<StepReport>>,
) -> RankResult {
    worker.rank.initialise(plan.run.seed);
    let program = worker.program(plan);
    let mut batches = Batches::new(plan, dataset, Split::Train, worker.at.dp);
    let mut evaluation = Evaluation::new(worker, plan, dataset);
    let mut timer = Timer::new(worker.number);
    let (mut history, mut traffic) = (History::default(), Traffic::default());
    let (mut stopped, mut gave_up) = (false, false);
    counting::reset(worker.number);
    for step in 0..plan.run.steps {
        if options.stop.load(Ordering::Relaxed) {
            worker.rank.ask_to_stop();
        }
        if options.trace_step == Some(step) {
            timer.begin();
        }
        let begun = Instant::now();
        batches.begin(step);
        worker.run(&program, &mut batches, |_, op| timer.op(*op));
        timer.end();
        batches.prepare(step + 1);
        if step == 0 {
            traffic = worker.world.traffic(worker.number);
        }
        let mut report = StepReport::read(&worker.rank, plan, step, begun);
        gave_up = worker.rank.control(control::SKIPPED_IN_A_ROW) >= plan.run.max_skipped as f64;
        stopped = worker.rank.stop_agreed() && step + 1 < plan.run.steps;
        // An evaluation would wipe out the traces of what went wrong.
        report.validation_loss = if gave_up { None } else { evaluation.after(step, worker, plan) };
        history.add(&report);
        if let Some(voice) = voice {
            // Nobody listens any more only if the caller has panicked.
            voice.send(report).ok();
        }
        if gave_up || stopped {
            break;
        }
    }
    let bad = if gave_up { worker.rank.first_bad() } else { None };
    RankResult {
        history,
        memory: measured_memory(worker),
        traffic,
        stopped,
        gave_up,
        bad,
        spans: timer.spans,
    }
}

/// The loss on the validation split, now and then: always over the same samples.
struct Evaluation<'a> {
    program: Program,
    batches: Batches<'a>,
}

impl<'a> Evaluation<'a> {
    /// Global batches that one evaluation reads.
    const BATCHES: u64 = 4;

    fn new(worker: &Worker, plan: &Plan, dataset: &'a dyn Dataset) -> Self {
        Evaluation {
            program: plan.evaluation(worker.at.pp, plan.micro_batches()),
            batches: Batches::new(plan, dataset, Split::Validation, worker.at.dp),
        }
    }

    /// The mean loss, on the steps after which there is an evaluation.
    fn after(&mut self, step: u64, worker: &mut Worker, plan: &Plan) -> Option<f64> {
        let (done, every) = (step + 1, plan.run.eval_every);
        if every == 0 || !(done.is_multiple_of(every) || done == plan.run.steps) {
            return None;
        }
        let losses = (0..Self::BATCHES).map(|batch| {
            self.batches.begin(batch);
            worker.run(&self.program, &mut self.batches, |_, _| {});
            worker.rank.mean_loss(plan.tokens_per_step())
        });
        Some(losses.sum::<f64>() / Self::BATCHES as f64)
    }
}

/// By category this is the arena's account of what the run asked for. What was really taken is the allocator's word,
/// where it is installed: the slab, and whatever was allocated beside it.
fn measured_memory(worker: &Worker) -> RankMemory {
    let counted = counting::measured(worker.number);
    let reserved = if counted.reserved > 0 {
        counted.reserved + counted.untracked_peak.max(0) as u64
    } else {
        worker.backend.memory().reserved()
    };
    RankMemory::new(worker.backend.memory().peak(), reserved)
}
