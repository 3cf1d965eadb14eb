//! The training loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use kintsugi_checkpoint::{Folder, Progress, SaveFailure, Saved, Saver, saver};
use kintsugi_comm::Traffic;
use kintsugi_data::{Dataset, Split};
use kintsugi_plan::{Plan, Program};
use kintsugi_rank::RankMemory;
use kintsugi_tensor::cpu::counting;
use kintsugi_tensor::ops::control;

use crate::card::CardWatch;
use crate::report::{History, RankResult};
use crate::source::{Batches, dataset};
use crate::trace::Timer;
use crate::{Job, MemoryChoice, Outcome, Start, StepReport, TrainError, Worker, run_job};

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Memory of the ranks.
    pub memory: MemoryChoice,
    /// Set from outside to end the run after the running step.
    pub stop: Arc<AtomicBool>,
    /// The step of this run, from 0, whose ops are timed, if any.
    pub trace_step: Option<u64>,
    /// What it starts from.
    pub start: Start,
    /// Where checkpoints go, if there shall be any.
    pub checkpoints: Option<Folder>,
}

impl TrainOptions {
    /// From the seed to the end, and nothing beside.
    pub fn new(memory: MemoryChoice) -> Self {
        TrainOptions { memory, stop: Arc::default(), trace_step: None, start: Start::Seed, checkpoints: None }
    }
}

/// What a run tells while it goes.
#[derive(Clone, Debug)]
pub enum Event {
    /// A step has ended.
    Step(StepReport),
    /// A checkpoint is whole.
    Saved(Saved),
    /// A checkpoint could not be written; the run goes on.
    NotSaved(SaveFailure),
}

/// Trains a plan to its end, or until it is asked to stop; `on_event` hears of every step and checkpoint.
pub fn train(
    plan: &Plan,
    options: &TrainOptions,
    mut on_event: impl FnMut(&Event),
) -> Result<Outcome, TrainError> {
    let behind = options.start.batches_behind(plan)?;
    let plan = Arc::new(plan.clone());
    let dataset = dataset(&plan)?;
    let job = Job { plan: Arc::clone(&plan), memory: options.memory.clone(), fault: None };
    let card = CardWatch::new(&plan);
    let (events, received) = channel();
    let (mut saver, writer) = options.checkpoints.clone().map(|folder| saver(&plan, folder)).unzip();
    // Only rank 0 speaks; the sender is handed to it, so that the channel closes when it is done.
    let voice = Mutex::new(Some(events.clone()));
    let (heard, mut saves) = (Heard::default(), Saves::default());
    let results = thread::scope(|scope| {
        let heard = &heard;
        // Whoever listens may panic, and the writer must not wait for it then.
        let _deaf = Deaf(heard);
        if let Some(writer) = writer {
            scope.spawn(move || {
                let report = |result: Result<_, _>| {
                    events.send(result.map_or_else(Event::NotSaved, Event::Saved)).ok();
                };
                writer.run(|step| heard.wait_for(step), report);
            });
        } else {
            drop(events);
        }
        let running = scope.spawn(|| {
            let results = run_job(&job, |worker| {
                let voice = (worker.number == 0).then(|| voice.lock().expect("taken once").take()).flatten();
                let (saver, card) = (saver.as_ref(), card.as_ref());
                let run = RankRun { plan: &plan, dataset: &*dataset, options, behind, saver, card };
                run.train(worker, voice.as_ref())
            });
            drop(voice.lock().map(|mut voice| voice.take()));
            // The writer ends when it has written what it was given.
            saver = None;
            results
        });
        for event in received {
            saves.add(&event);
            on_event(&event);
            if let Event::Step(report) = event {
                heard.tell(report.step);
            }
        }
        running.join().expect("the job's thread only waits")
    })?;
    Outcome::new(&plan, results, saves)
}

/// The last step of which the caller has heard. A checkpoint has its name only then, so that nothing that the caller
/// writes down of a step is missing where a run goes on from it.
#[derive(Default)]
struct Heard {
    step: Mutex<u64>,
    told: Condvar,
}

impl Heard {
    fn tell(&self, step: u64) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = step;
        self.told.notify_all();
    }

    fn wait_for(&self, step: u64) {
        let heard = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.told.wait_while(heard, |heard| *heard < step));
    }
}

/// Ends all waiting for the caller.
struct Deaf<'a>(&'a Heard);

impl Drop for Deaf<'_> {
    fn drop(&mut self) {
        self.0.tell(u64::MAX);
    }
}

/// How saving went.
#[derive(Clone, Debug, Default)]
pub struct Saves {
    /// Checkpoints that were written.
    pub saved: u64,
    /// Checkpoints that could not be written.
    pub failed: u64,
    /// Seconds that training stood still for them.
    pub blocked_s: f64,
    /// Seconds from copies to whole checkpoints, all of them together.
    pub write_s: f64,
    /// The last one that was written.
    pub last: Option<Saved>,
    /// Why the last one of all was not, if so.
    pub failure: Option<SaveFailure>,
}

impl Saves {
    fn add(&mut self, event: &Event) {
        match event {
            Event::Step(_) => {}
            Event::Saved(saved) => {
                self.saved += 1;
                self.blocked_s += saved.blocked;
                self.write_s += saved.seconds;
                self.last = Some(saved.clone());
                self.failure = None;
            }
            Event::NotSaved(failure) => {
                self.failed += 1;
                self.failure = Some(failure.clone());
            }
        }
    }
}

/// What all ranks of a run share.
struct RankRun<'a> {
    plan: &'a Plan,
    dataset: &'a dyn Dataset,
    options: &'a TrainOptions,
    /// Global batches that were read before this run.
    behind: u64,
    saver: Option<&'a Saver>,
    card: Option<&'a CardWatch>,
}

impl RankRun<'_> {
    fn train(&self, worker: &mut Worker, voice: Option<&Sender<Event>>) -> RankResult {
        let RankRun { plan, dataset, options, .. } = *self;
        options.start.load(worker, plan);
        let before = options.start.progress();
        let program = worker.program(plan);
        let mut batches = Batches::new(plan, dataset, Split::Train, worker.at.dp);
        let mut evaluation = Evaluation::new(worker, plan, dataset);
        let mut timer = Timer::new(worker.number);
        let (mut history, mut traffic) = (History::new(&before), Traffic::default());
        let (mut stopped, mut gave_up) = (false, false);
        counting::reset(worker.number);
        for step in before.step..plan.run.steps {
            if options.stop.load(Ordering::Relaxed) {
                worker.rank.ask_to_stop();
            }
            if options.trace_step == Some(step - before.step) {
                timer.begin();
            }
            let (begun, joules) = (Instant::now(), self.joules());
            let batch = self.behind + step - before.step;
            batches.begin(batch);
            worker.run(&program, &mut batches, |_, op| timer.op(*op));
            timer.end();
            batches.prepare(batch + 1);
            if step == before.step {
                traffic = worker.world.traffic(worker.number);
            }
            let report = StepReport::read(&worker.rank, plan, step, begun);
            let mut report = report.with_energy(joules, self.joules(), plan);
            report.tokens = (batch + 1) * plan.tokens_per_step() as u64;
            gave_up = worker.rank.control(control::SKIPPED_IN_A_ROW) >= plan.run.max_skipped as f64;
            stopped = worker.rank.stop_agreed() && step + 1 < plan.run.steps;
            // An evaluation would wipe out the traces of what went wrong.
            report.validation_loss = if gave_up { None } else { evaluation.after(step, worker, plan) };
            history.add(&report);
            if !gave_up && self.saves_after(step, stopped) {
                report.checkpoint_s = self.save(worker, &history, batch + 1);
            }
            if let Some(voice) = voice {
                // Nobody listens any more only if the caller has panicked.
                voice.send(Event::Step(report)).ok();
            }
            if gave_up || stopped {
                break;
            }
        }
        if plan.run.steps == 0 {
            self.save(worker, &history, 0);
        }
        let bad = if gave_up { worker.rank.first_bad() } else { None };
        RankResult {
            history,
            memory: self.measured_memory(worker),
            traffic,
            stopped,
            gave_up,
            bad,
            spans: timer.spans,
        }
    }

    fn joules(&self) -> Option<f64> {
        self.card.and_then(CardWatch::joules)
    }

    /// By category this is the arena's account of what the run asked for. What was really taken is the allocator's
    /// word, where it is installed, or the driver's, where one rank has a card to itself: the slab, and whatever was
    /// allocated beside it.
    fn measured_memory(&self, worker: &Worker) -> RankMemory {
        let counted = counting::measured(worker.number);
        let alone = self.plan.mesh.ranks() == 1;
        let reserved = match self.card.filter(|_| alone).and_then(CardWatch::taken) {
            Some(taken) => taken,
            None if counted.reserved > 0 => counted.reserved + counted.untracked_peak.max(0) as u64,
            None => worker.backend.memory().reserved(),
        };
        RankMemory::new(worker.backend.memory().peak(), reserved)
    }

    /// Whether there is a checkpoint after a step: now and then, and at the end, however it comes.
    fn saves_after(&self, step: u64, stopped: bool) -> bool {
        let (done, every) = (step + 1, self.plan.run.checkpoint_every);
        stopped || done == self.plan.run.steps || every > 0 && done.is_multiple_of(every)
    }

    /// Hands this rank's copy to the writer; gives the seconds that it took.
    fn save(&self, worker: &Worker, history: &History, batches: u64) -> Option<f64> {
        let saver = self.saver?;
        let count = |slot| worker.rank.control(slot) as u64;
        let progress = Progress {
            step: count(control::STEP),
            samples: batches * self.plan.batch.global as u64,
            updates: count(control::UPDATES),
            loss_scale: worker.rank.control(control::LOSS_SCALE),
            good_steps: count(control::GOOD_STEPS),
            skipped_in_a_row: count(control::SKIPPED_IN_A_ROW),
            skipped: history.skipped(),
            loss_first: history.loss_first(),
        };
        Some(saver.save(worker.number, &worker.rank, progress))
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
