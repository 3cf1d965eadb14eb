//! Trains a plan: starts the ranks of this process and the thread that writes checkpoints, and reports events to the caller.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use kintsugi_checkpoint::{
    CheckpointFolder, CheckpointInfo, CopyFolder, SaveFailure, ShardRecords, SkippedSamples, saver,
};
use kintsugi_comm::Connection;
use kintsugi_data::Dataset;
use kintsugi_plan::Plan;
use kintsugi_rank::Purpose;
use kintsugi_run::Rollback;

use crate::checksums::ChecksumBoard;
use crate::gpu_monitor::GpuMonitor;
use crate::job::{gather, run_ranks};
use crate::rank_trainer::RankTrainer;
use crate::reported::Reported;
use crate::rollback::RollbackBoard;
use crate::threads::spawn;
use crate::{Job, MemoryChoice, Start, StepReport, TrainError, TrainOutcome};

/// How to train.
#[derive(Clone)]
pub struct TrainOptions {
    /// Memory of the ranks.
    pub memory: MemoryChoice,
    /// How the ranks are connected.
    pub connection: Connection,
    /// The caller sets this to stop the run after the running step, or after the next one if that is already enqueued.
    pub stop: Arc<AtomicBool>,
    /// The step of this run whose ops are timed, from 0. `None` traces nothing.
    pub trace_step: Option<u64>,
    /// What the run starts from.
    pub start: Start,
    /// Samples that are skipped besides those of the checkpoint: this run went back to a checkpoint after a spike, and has saved none
    /// since then.
    pub skipped: SkippedSamples,
    /// Where checkpoints are written. `None` writes none.
    pub checkpoints: Option<CheckpointFolder>,
    /// Where copies of states are written, if the plan copies them. The memory for them is reserved. `None` copies nothing.
    pub copies: Option<CopyFolder>,
    /// Whether the host enqueues a step before it reads the result of the previous one, so that the device never idles.
    /// `None` does so on devices that run asynchronously (CUDA).
    pub overlap_steps: Option<bool>,
    /// The folder of the run, where ranks write their flight recorders. `None` writes none.
    pub flight: Option<PathBuf>,
}

impl TrainOptions {
    /// Trains from the seed to the last step, without checkpoints or a trace.
    pub fn new(memory: MemoryChoice) -> Self {
        TrainOptions {
            memory,
            connection: Connection::Threads,
            stop: Arc::default(),
            trace_step: None,
            start: Start::Seed,
            skipped: SkippedSamples::default(),
            checkpoints: None,
            copies: None,
            overlap_steps: None,
            flight: None,
        }
    }
}

/// What a run reports while it runs.
#[derive(Clone, Debug)]
pub enum Event {
    /// A step has finished.
    Step(StepReport),
    /// A checkpoint is complete.
    CheckpointSaved(CheckpointInfo),
    /// A checkpoint could not be written. The run continues.
    CheckpointFailed(SaveFailure),
    /// After a spike the run goes back to a checkpoint. It waits until the caller has handled this event.
    RolledBack(Rollback),
    /// The device cannot capture the step as a graph, for this reason. The run continues, and the host enqueues the
    /// operations of every step.
    GraphUnavailable(String),
    /// The device times alternative kernels for the run's matrix products, so the first step takes longer.
    Autotuning {
        /// Products whose kernels have been chosen.
        products: usize,
        /// The time that this has taken.
        spent: Duration,
    },
    /// A library cannot run an operation on this device, for this reason. Our own kernels run it instead.
    LibraryReplaced(String),
}

/// Trains a plan on its dataset to the last step, or until it is asked to stop. Calls `on_event` for every step and
/// checkpoint.
///
/// If the ranks are processes, every process calls it. The process of rank 0 gets the events and the outcome, and the others
/// get `None`.
pub fn train(
    plan: &Plan,
    dataset: &dyn Dataset,
    options: &TrainOptions,
    mut on_event: impl FnMut(&Event),
) -> Result<Option<TrainOutcome>, TrainError> {
    options.start.batches_consumed(plan)?;
    let plan = Arc::new(plan.clone());
    let job = Job { connection: options.connection, ..Job::new(Arc::clone(&plan), options.memory.clone()) };
    let world = job.world();
    let gpu =
        GpuMonitor::new(&plan, options.connection.gpu(), options.flight.as_deref(), world.local_ranks());
    let (events, received) = channel();
    let saver = |folder| saver(&plan, world.local_ranks(), folder);
    let (saver, writer) = options.checkpoints.clone().map(saver).unzip();
    // Only rank 0 sends events. It owns the sender, so that the channel closes when it is done.
    let rank_events = Mutex::new(Some(events.clone()));
    let (checksums, rollbacks) = (ChecksumBoard::default(), RollbackBoard::default());
    let (reported, mut saves) = (Reported::new(), SaveStatistics::default());
    let results = thread::scope(|scope| {
        let (reported, world) = (&reported, &world);
        let _stop_on_unwind = StopOnUnwind { reported, stop: &options.stop };
        if let Some(writer) = writer {
            let limit = Duration::from_secs(plan.run.communication_timeout);
            let records = ShardRecords { world: &**world, limit };
            spawn(scope, "writer", move || {
                let report = |result: Result<_, _>| {
                    events.send(result.map_or_else(Event::CheckpointFailed, Event::CheckpointSaved)).ok();
                };
                writer.run(|step| reported.wait_for_step(step), &records, report);
            })?;
        } else {
            drop(events);
        }
        let (job, plan, gpu, rank_events) = (&job, &plan, gpu.as_ref(), &rank_events);
        let (checksums, rollbacks) = (&checksums, &rollbacks);
        // The job's thread owns the saver. When it drops the saver, or when it cannot be started, the writer writes what it
        // has received and ends.
        let running = spawn(scope, "job", move || {
            let results = run_ranks(Purpose::Training, job, world, |worker| {
                let take_events = || rank_events.lock().expect("taken once").take();
                let events = (worker.number == 0).then(take_events).flatten();
                let (saver, events) = (saver.as_ref(), events.as_ref());
                let trainer = RankTrainer {
                    plan,
                    dataset,
                    options,
                    saver,
                    gpu,
                    checksums,
                    rollbacks,
                    reported,
                    events,
                };
                trainer.train(worker)
            });
            drop(rank_events.lock().map(|mut events| events.take()));
            results
        })?;
        for event in received {
            saves.add(&event);
            on_event(&event);
            match event {
                Event::Step(report) => reported.set_step(Some(report.step)),
                Event::RolledBack(rollback) => reported.set_step(Some(rollback.resumed_after)),
                Event::CheckpointSaved(_) | Event::CheckpointFailed(_) => reported.add_save(),
                Event::GraphUnavailable(_) | Event::Autotuning { .. } | Event::LibraryReplaced(_) => {}
            }
        }
        running.join().expect("the job's thread only waits")
    })?;
    // Here the writers of all processes have written their shards.
    let results = gather(&*world, results)?;
    Ok(results.map(|results| TrainOutcome::new(&plan, results, saves)))
}

/// When it is dropped, ends the writer's wait for reported steps. If the caller panics, also stops the run after the running
/// step, since nobody receives its events any more.
struct StopOnUnwind<'a> {
    reported: &'a Reported,
    stop: &'a AtomicBool,
}

impl Drop for StopOnUnwind<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.stop.store(true, Ordering::Relaxed);
        }
        self.reported.set_step(None);
    }
}

/// Counts and times of the checkpoints of a run.
#[derive(Clone, Debug, Default)]
pub struct SaveStatistics {
    /// Checkpoints that were written.
    pub saved: u64,
    /// Checkpoints that could not be written.
    pub failed: u64,
    /// Seconds that training paused for them.
    pub blocked_s: f64,
    /// Seconds from the copies to the complete checkpoints, over all checkpoints.
    pub write_s: f64,
    /// The last checkpoint that was written.
    pub last: Option<CheckpointInfo>,
    /// Why the newest checkpoint could not be written, if it could not.
    pub failure: Option<SaveFailure>,
}

impl SaveStatistics {
    fn add(&mut self, event: &Event) {
        match event {
            Event::Step(_)
            | Event::RolledBack(_)
            | Event::GraphUnavailable(_)
            | Event::Autotuning { .. }
            | Event::LibraryReplaced(_) => {}
            Event::CheckpointSaved(saved) => {
                self.saved += 1;
                self.blocked_s += saved.blocked;
                self.write_s += saved.seconds;
                self.last = Some(saved.clone());
                self.failure = None;
            }
            Event::CheckpointFailed(failure) => {
                self.failed += 1;
                self.failure = Some(failure.clone());
            }
        }
    }
}
