//! Training a plan: its ranks on their threads, the thread that writes checkpoints, and what the caller hears.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use kintsugi_checkpoint::{Folder, SaveFailure, Saved, saver};
use kintsugi_data::Dataset;
use kintsugi_plan::Plan;

use crate::card::CardWatch;
use crate::steps::RankRun;
use crate::threads::spawn;
use crate::{Job, MemoryChoice, Outcome, Start, StepReport, TrainError, run_job};

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Memory of the ranks.
    pub memory: MemoryChoice,
    /// Set from outside to end the run after the running step, or after the next where that is enqueued already.
    pub stop: Arc<AtomicBool>,
    /// The step of this run, from 0, whose ops are timed, if any.
    pub trace_step: Option<u64>,
    /// What it starts from.
    pub start: Start,
    /// Where checkpoints go, if there shall be any.
    pub checkpoints: Option<Folder>,
    /// Whether a step is enqueued before the one before it is read. Where nothing is said: on devices that run later,
    /// which are never idle then.
    pub late: Option<bool>,
}

impl TrainOptions {
    /// From the seed to the end, and nothing beside.
    pub fn new(memory: MemoryChoice) -> Self {
        TrainOptions {
            memory,
            stop: Arc::default(),
            trace_step: None,
            start: Start::Seed,
            checkpoints: None,
            late: None,
        }
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
    /// The device cannot repeat a step by heart, for this reason; the run goes on, and every step is enqueued anew.
    NotRepeated(String),
    /// The device tries out how it does the run's operations best; first steps take longer for that.
    Trying,
    /// A library of the device's cannot do what it was meant for, for this reason; kernels of ours do it.
    Replaced(String),
}

/// Trains a plan on its dataset to its end, or until it is asked to stop; `on_event` is called for every step and
/// checkpoint.
pub fn train(
    plan: &Plan,
    dataset: &dyn Dataset,
    options: &TrainOptions,
    mut on_event: impl FnMut(&Event),
) -> Result<Outcome, TrainError> {
    let behind = options.start.batches_behind(plan)?;
    let plan = Arc::new(plan.clone());
    let job = Job { plan: Arc::clone(&plan), memory: options.memory.clone(), fault: None };
    let card = CardWatch::new(&plan);
    let (events, received) = channel();
    let (saver, writer) = options.checkpoints.clone().map(|folder| saver(&plan, folder)).unzip();
    // Only rank 0 speaks; the sender is handed to it, so that the channel closes when it is done.
    let voice = Mutex::new(Some(events.clone()));
    let (heard, mut saves) = (Heard { step: Mutex::new(Some(0)), told: Condvar::new() }, Saves::default());
    let results = thread::scope(|scope| {
        let heard = &heard;
        let _deaf = Deaf { heard, stop: &options.stop };
        if let Some(writer) = writer {
            spawn(scope, "writer", move || {
                let report = |result: Result<_, _>| {
                    events.send(result.map_or_else(Event::NotSaved, Event::Saved)).ok();
                };
                writer.run(|step| heard.wait_for(step), report);
            })?;
        } else {
            drop(events);
        }
        let (job, plan, card, voice) = (&job, &plan, card.as_ref(), &voice);
        // The writer ends when the saver is dropped, with this thread or if it cannot be started, and it has written what
        // it was given.
        let running = spawn(scope, "job", move || {
            let results = run_job(job, |worker| {
                let voice = (worker.number == 0).then(|| voice.lock().expect("taken once").take()).flatten();
                let (saver, voice) = (saver.as_ref(), voice.as_ref());
                RankRun { plan, dataset, options, behind, saver, card, voice }.train(worker)
            });
            drop(voice.lock().map(|mut voice| voice.take()));
            results
        })?;
        for event in received {
            saves.add(&event);
            on_event(&event);
            if let Event::Step(report) = event {
                heard.tell(Some(report.step));
            }
        }
        running.join().expect("the job's thread only waits")
    })?;
    Ok(Outcome::new(&plan, results, saves))
}

/// The last step of which the caller has heard. A checkpoint has its name only then, so that nothing that the caller
/// writes down of a step is missing where a run goes on from it.
struct Heard {
    /// `None` once the caller hears nothing more.
    step: Mutex<Option<u64>>,
    told: Condvar,
}

impl Heard {
    fn tell(&self, step: Option<u64>) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = step;
        self.told.notify_all();
    }

    /// Waits until the caller has heard of a step, or answers `false` if it never will.
    fn wait_for(&self, step: u64) -> bool {
        let heard = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let heard = self.told.wait_while(heard, |heard| heard.is_some_and(|heard| heard < step));
        heard.unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// Where the caller panics nobody hears of the run any more: it ends after the running step.
struct Deaf<'a> {
    heard: &'a Heard,
    stop: &'a AtomicBool,
}

impl Drop for Deaf<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.heard.tell(None);
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
            Event::Step(_) | Event::NotRepeated(_) | Event::Trying | Event::Replaced(_) => {}
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
