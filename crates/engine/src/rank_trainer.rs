//! The training loop of one rank.
//!
//! On a device that runs asynchronously at most two steps are in flight: the host enqueues a step and then reads the result
//! of the previous one. If an evaluation, a checkpoint or the end of the run depends on the newest step, the host waits for
//! that step first.
//!
//! After a spike (`run.on_spike`) the loop begins again at an earlier step, with the weights and states of a checkpoint.
//!
//! No step fails because of its data: a rank reads the tokens of a step before an earlier step begins. If it cannot read
//! them, it asks all ranks to stop in that earlier step. The ranks agree to stop, as they do after a signal, and save a
//! checkpoint.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use kintsugi_checkpoint::{Checkpoint, CheckpointSaver, RunProgress};
use kintsugi_comm::{RankFailure, TransferObserver};
use kintsugi_data::{Dataset, Split};
use kintsugi_plan::{DeviceKind, Plan, Program};
use kintsugi_rank::{RankMemory, StepResult};
use kintsugi_run::{Rollback, Spike};
use kintsugi_spec::Cause;
use kintsugi_spec::work::Pause;
use kintsugi_tensor::cpu::counting;
use kintsugi_tensor::ops::control;
use kintsugi_tensor::{Notice, ReplayOutcome};

use crate::checksums::{ChecksumBoard, CorruptionCheck};
use crate::evaluate::Evaluation;
use crate::gpu_monitor::GpuMonitor;
use crate::loop_state::{EarlyEnd, FoundSpike, LoopState};
use crate::op_watch::OpWatch;
use crate::pending_step::{FinishedStep, PendingStep, StepSpan};
use crate::replication::Replication;
use crate::report::{RankResult, set_validation, step_report};
use crate::reported::Reported;
use crate::rollback::{RollbackBoard, find_checkpoint};
use crate::skipping::WithoutSkipped;
use crate::source::{BatchReader, ReadAhead, StepTokens};
use crate::stragglers::{ComputeTime, Stragglers, WaitClock};
use crate::trace::Timer;
use crate::validation_batches::ValidationDataset;
use crate::{Event, RankError, Start, StepReport, TrainOptions, Worker};

/// Trains one rank.
pub(crate) struct RankTrainer<'a> {
    pub plan: &'a Plan,
    pub dataset: &'a dyn Dataset,
    pub options: &'a TrainOptions,
    pub saver: Option<&'a CheckpointSaver>,
    pub gpu: Option<&'a GpuMonitor>,
    /// Where the ranks of this process compare their weights.
    pub checksums: &'a ChecksumBoard,
    /// Where they agree on the checkpoint to go back to after a spike.
    pub rollbacks: &'a RollbackBoard,
    /// What the caller knows of the run.
    pub reported: &'a Reported,
    /// Where events are sent. Only one rank sends them.
    pub events: Option<&'a Sender<Event>>,
}

impl RankTrainer<'_> {
    /// Trains a rank to the last step or an early end.
    pub fn train(&self, worker: &mut Worker) -> Result<RankResult, RankError> {
        let RankTrainer { plan, dataset, options, .. } = *self;
        let mut start = options.start.clone();
        start.load(worker, plan)?;
        self.report_notices(worker);
        let program = worker.program(plan);
        let validation = ValidationDataset::new(dataset, Some(plan.evaluation_samples()), plan);
        let mut evaluation = Evaluation::new(worker, plan, &validation);
        if plan.run.eval_every > 0 {
            evaluation.load(plan)?;
        }
        let mut state = LoopState::new(plan, options, self.op_watch(worker));
        self.observe_waits(worker, &mut state);
        let copies = options.copies.as_ref();
        state.replication = copies.map(|folder| Replication::new(folder, worker, plan));
        counting::reset(worker.number);
        while let Some(spike) = self.train_from(&start, worker, &program, &mut state, &mut evaluation)? {
            start = self.go_back(&spike, worker, &mut state)?;
        }
        // What follows is not a part of a step.
        worker.world.set_step_limit(None);
        if plan.run.steps == 0 {
            let result = worker.rank.fetch_step_result().wait();
            self.save(worker, &result, &mut state, 0, true)?;
        }
        Ok(RankResult {
            non_finite: state.non_finite,
            totals: state.history.totals(),
            replayed: state.replayed,
            memory: self.measured_memory(worker),
            traffic: state.traffic.unwrap_or_default(),
            copies: state.replication.map(Replication::into_measured),
            early_end: state.early_end,
            spikes: state.spikes.record,
            data_error: state.data_error.map(Cause::new),
            spans: state.spans,
        })
    }

    /// Trains a rank from a start, whose weights and states are set, to the last step or an early end, or to a spike.
    fn train_from(
        &self,
        start: &Start,
        worker: &mut Worker,
        program: &Program,
        state: &mut LoopState,
        evaluation: &mut Evaluation,
    ) -> Result<Option<FoundSpike>, RankError> {
        let RankTrainer { plan, dataset, options, .. } = *self;
        let (first_run, first) = (options.start.progress().step, start.progress().step);
        let consumed = start.batches_consumed(plan)?;
        let dataset = WithoutSkipped { dataset, skipped: state.spikes.record.skipped.clone() };
        let batches = BatchReader::new(plan, &dataset, Split::Train, worker, program);
        let all = consumed..consumed + plan.run.steps.saturating_sub(first);
        let mut reader = ReadAhead::new(batches, all, self.steps_to_stop())?;
        let mut corruption =
            CorruptionCheck::new(plan.run.checksum_every, plan.run.deterministic, self.checksums);
        let mut in_flight = None;
        for step in first..plan.run.steps {
            let tokens_read = {
                let _pause = Pause::begin();
                reader.read_next()
            };
            state.watch.begin_step(step);
            if let Some(computing) = &mut state.computing {
                computing.begin_step();
            }
            if !tokens_read || options.stop.load(Ordering::Relaxed) {
                worker.rank.ask_to_stop();
            }
            let batch = consumed + step - first;
            let (begun, energy) = (worker.backend.mark(), self.gpu.and_then(GpuMonitor::energy));
            let waits_before = worker.backend.host_waits();
            let sent_before = state.traffic.is_none().then(|| worker.world.traffic(worker.number));
            // A run that began with copies may go back to a checkpoint of before.
            let is_traced = options.trace_step.is_some() && options.trace_step == step.checked_sub(first_run);
            let is_checked = corruption.begin_step(step + 1);
            if is_traced || is_checked {
                let mut timer = is_traced.then(|| Timer::begin(worker, plan));
                let mut checked = Ok(());
                worker.run(program, reader.current(), |rank, op| {
                    if let Some(timer) = &mut timer {
                        timer.op(*op);
                    }
                    state.watch.op(op);
                    if checked.is_ok() {
                        checked = corruption.before_op(rank, op);
                    }
                })?;
                checked?;
                if let Some(timer) = timer {
                    state.spans = timer.end();
                }
            } else {
                state.replayed += self.enqueue(worker, program, reader.current(), &mut state.watch)?;
            }
            if let Some(computing) = &mut state.computing {
                worker.world.set_compute_time(computing.end_step());
            }
            corruption.end_step(worker.number, &worker.rank, &*worker.world)?;
            let span = StepSpan { begun, ended: worker.backend.mark(), energy };
            reader.finish_step();
            let result = worker.rank.fetch_step_result();
            let host_waits = worker.backend.host_waits().zip(waits_before).map(|(now, before)| now - before);
            let newest = PendingStep { step, batch, span, host_waits, result };
            if let Some(before) = sent_before {
                state.traffic = Some(worker.world.traffic(worker.number).since(&before));
            }
            if let Some(earlier) = in_flight.take() {
                let (report, _) = self.read(earlier, worker, state)?;
                state.history.add(&report);
                self.report(Event::Step(report));
                if state.spike.is_some() {
                    // The newest step began with weights that are given up.
                    newest.result.wait();
                    if let Some(failure) = worker.world.failure() {
                        return Err(failure.into());
                    }
                    return Ok(state.take_spike(plan));
                }
            }
            if self.may_read_later(step, state) {
                in_flight = Some(newest);
                continue;
            }
            self.report(Event::Step(self.finish(newest, worker, state, evaluation)?));
            if state.spike.is_some() {
                return Ok(state.take_spike(plan));
            }
            if state.early_end.is_some() {
                break;
            }
        }
        state.data_error = reader.into_failure();
        Ok(None)
    }

    /// Goes back to the last good checkpoint, or to where the run began if there is none. Returns what the run continues from.
    fn go_back(
        &self,
        spike: &FoundSpike,
        worker: &mut Worker,
        state: &mut LoopState,
    ) -> Result<Start, RankError> {
        let RankTrainer { plan, options, .. } = *self;
        // Ranks wait for each other here, and for the disk.
        let _pause = Pause::begin();
        let last_good = state.last_good_save.unwrap_or(options.start.progress().step);
        let record = &state.spikes.record;
        let folder = options.checkpoints.as_ref();
        let find = || {
            let found = match folder {
                Some(folder) => {
                    find_checkpoint(folder, last_good, spike.step, state.saves, self.reported)?.map(Arc::new)
                }
                None => None,
            };
            let step = found.as_ref().map(|checkpoint| checkpoint.progress().step);
            let start = found.map_or_else(|| options.start.origin().clone(), Start::Checkpoint);
            let skipped = spike.samples(&start, record, plan)?;
            let resumed_after = start.progress().step;
            let rollback =
                Rollback::new(spike.step, spike.spike, resumed_after, skipped, record.rollbacks + 1);
            self.report(Event::RolledBack(rollback));
            self.reported.wait_for_rollback(resumed_after);
            Ok(step)
        };
        let step = self.rollbacks.agree(state.rollbacks, worker.number, &*worker.world, find)?;
        let start = match (step, folder) {
            (Some(step), Some(folder)) => {
                Start::Checkpoint(Arc::new(Checkpoint::open(&folder.of_step(step))?))
            }
            _ => options.start.origin().clone(),
        };
        start.go_back(worker, plan)?;
        state.go_back(spike, &start, plan)?;
        Ok(start)
    }

    /// Enqueues a step, by replaying its captured graph if possible. Returns the number of replayed steps, 0 or 1.
    fn enqueue(
        &self,
        worker: &mut Worker,
        program: &Program,
        tokens: &mut StepTokens,
        watch: &mut OpWatch,
    ) -> Result<u64, RankFailure> {
        // Ranks that are threads or communicate by MPI wait in a step, which no graph can contain. A graph with NCCL's kernels
        // did not finish on a GPU that ranks share.
        if !(self.plan.run.graph && worker.world.ranks() == 1) {
            worker.run(program, tokens, |_, op| watch.op(op))?;
            return Ok(0);
        }
        Ok(match worker.replay_step(program, tokens, |_, op| watch.op(op))? {
            ReplayOutcome::Enqueued => 0,
            ReplayOutcome::Replayed => 1,
            ReplayOutcome::Refused(reason) => {
                self.report(Event::GraphUnavailable(reason));
                0
            }
        })
    }

    /// Whether the host may enqueue the next step before it reads the result of this one: nothing after this step depends on
    /// it, and the run cannot give up at it. Every rank comes to the same answer.
    fn may_read_later(&self, step: u64, state: &LoopState) -> bool {
        let run = &self.plan.run;
        self.overlaps_steps()
            && step + 1 < run.steps
            && !state.stop_agreed
            && state.skipped_in_a_row + 1 < run.max_skipped
            && !self.evaluates_after(step)
            && !state.save_due
            && !self.saves_after(step)
            && !self.plan.copies_states_after(step + 1)
    }

    /// Whether the host enqueues a step before it reads the result of the previous one.
    fn overlaps_steps(&self) -> bool {
        self.options.overlap_steps.unwrap_or(self.plan.run.device.is_gpu())
    }

    /// The number of steps that still run after a rank asks to stop: the running one, and the next one if steps overlap.
    fn steps_to_stop(&self) -> u64 {
        if self.overlaps_steps() { 2 } else { 1 }
    }

    /// Waits for a step and reads its result.
    fn read(
        &self,
        pending: PendingStep,
        worker: &Worker,
        state: &mut LoopState,
    ) -> Result<(StepReport, StepResult), RankError> {
        let PendingStep { step, batch, span, host_waits, result } = pending;
        let result = result.wait();
        // A failed transfer of a device ends the wait, and the step's result is undefined.
        if let Some(failure) = worker.world.failure() {
            return Err(failure.into());
        }
        worker.world.set_step_limit(state.watch.end_step());
        let (seconds, joules) = span.measure(self.gpu);
        let finished = FinishedStep { step, batch, seconds, joules, host_waits, result };
        let mut report = step_report(self.plan, &finished);
        if let Some(stragglers) = &mut state.stragglers {
            report.stragglers = stragglers.after_step(&*worker.world);
        }
        state.skipped_in_a_row = finished.result.control(control::SKIPPED_IN_A_ROW) as u64;
        state.stop_agreed = finished.result.stop_agreed();
        if !report.skipped {
            let spike = state.spikes.check(report.loss, report.grad_norm);
            state.spike = spike.map(|spike| FoundSpike { step: report.step, batch, spike });
        }
        report.rollbacks = Some(state.spikes.record.rollbacks).filter(|&rollbacks| rollbacks > 0);
        if !report.skipped
            && state.spike.is_none()
            && let Some(save) = state.unconfirmed_save.take()
        {
            state.last_good_save = Some(save);
            // One rank confirms for all, since all ranks skip the same steps.
            if let (Some(saver), Some(_)) = (self.saver, self.events) {
                saver.confirm()?;
            }
        }
        Ok((report, finished.result))
    }

    /// Waits for the newest step. Then evaluates and saves a checkpoint, if they are due.
    fn finish(
        &self,
        pending: PendingStep,
        worker: &mut Worker,
        state: &mut LoopState,
        evaluation: &mut Evaluation,
    ) -> Result<StepReport, RankError> {
        let (step, batch) = (pending.step, pending.batch);
        let (mut report, result) = self.read(pending, worker, state)?;
        if state.skipped_in_a_row >= self.plan.run.max_skipped && state.may_go_back(self.plan) {
            let spike = Spike::NotFinite { steps: state.skipped_in_a_row };
            state.spike = Some(FoundSpike { step: report.step, batch, spike });
        }
        if state.spike.is_some() {
            state.history.add(&report);
            return Ok(report);
        }
        state.early_end = if state.skipped_in_a_row >= self.plan.run.max_skipped {
            Some(EarlyEnd::GaveUp)
        } else {
            (state.stop_agreed && step + 1 < self.plan.run.steps).then_some(EarlyEnd::Stopped)
        };
        // An evaluation would overwrite the norms that show where non-finite values began.
        if state.early_end == Some(EarlyEnd::GaveUp) {
            state.non_finite = worker.rank.first_non_finite();
        } else if self.evaluates_after(step) {
            set_validation(&mut report, evaluation.run(worker, self.plan, |_| {})?);
            state.watch.pause();
        }
        state.history.add(&report);
        // After a skipped step the weights are those of the previous step and may have diverged. So a checkpoint that is due
        // on a skipped step is saved after the next successful step, or when the run ends.
        let ends = state.early_end.is_some() || step + 1 == self.plan.run.steps;
        let due = state.save_due || self.saves_after(step);
        if due && !report.skipped || ends {
            state.save_due = false;
            report.checkpoint_s = self.save(worker, &result, state, batch + 1, ends)?;
            state.watch.pause();
        } else {
            state.save_due = due;
        }
        if !ends && self.plan.copies_states_after(step + 1) {
            self.copy_states(worker, &result, state, batch + 1)?;
            state.watch.pause();
        }
        Ok(report)
    }

    /// Sends the device's notices as events.
    fn report_notices(&self, worker: &Worker) {
        if let Some(events) = self.events.cloned() {
            worker.backend.set_notice_handler(Box::new(move |notice| {
                let event = match notice {
                    Notice::Autotuning { products, spent } => Event::Autotuning { products, spent },
                    Notice::LibraryReplaced(reason) => Event::LibraryReplaced(reason),
                };
                events.send(event).ok();
            }));
        }
    }

    /// Measures how long this rank computes, if it is a process of its own and its host waits for transfers itself. Rank 0 compares.
    fn observe_waits(&self, worker: &mut Worker, state: &mut LoopState) {
        let world = &worker.world;
        if self.plan.run.device.is_gpu() || world.local_ranks().len() == world.ranks() {
            return;
        }
        if world.is_first() {
            state.stragglers = Some(Stragglers::new(self.plan.mesh));
        }
        let clock = Rc::new(WaitClock::default());
        let observer: Rc<dyn TransferObserver> = Rc::<WaitClock>::clone(&clock);
        worker.rank.observe(&observer);
        state.computing = Some(ComputeTime::new(clock));
    }

    /// Watches the ops of this rank.
    fn op_watch(&self, worker: &Worker) -> OpWatch {
        let (run, connection) = (&self.plan.run, self.options.connection);
        let host = worker.world.host().unwrap_or_else(|| "this host".to_owned());
        let place = match run.device {
            DeviceKind::Cpu => format!("{host}, CPU"),
            DeviceKind::Cuda | DeviceKind::Hip => format!("{host}, GPU {}", connection.gpu()),
        };
        OpWatch::new(self.options.flight.as_deref(), worker.number, &place, run.hang_factor)
    }

    fn report(&self, event: Event) {
        if let Some(events) = self.events {
            // Sending fails only if the caller has panicked.
            events.send(event).ok();
        }
    }

    /// The memory of this rank. The bytes by category come from the arena. The reserved bytes come from the driver if one
    /// rank has a GPU to itself, or from the counting allocator if it is installed. They include allocations outside the
    /// slab.
    fn measured_memory(&self, worker: &Worker) -> RankMemory {
        let counted = counting::measured(worker.number);
        let alone = self.plan.mesh.ranks() == 1;
        let reserved = match self.gpu.filter(|_| alone).and_then(GpuMonitor::taken) {
            Some(taken) => taken,
            None if counted.reserved > 0 => counted.reserved + counted.untracked_peak.max(0) as u64,
            None => worker.backend.memory().reserved(),
        };
        RankMemory::new(worker.backend.memory().peak(), reserved).with_transport(worker.transport_bytes)
    }

    /// Whether an evaluation follows a step: every `run.eval_every` steps, and after the last one.
    fn evaluates_after(&self, step: u64) -> bool {
        let (done, every) = (step + 1, self.plan.run.eval_every);
        every > 0 && (done.is_multiple_of(every) || done == self.plan.run.steps)
    }

    /// Whether a checkpoint is due after a step: every `run.checkpoint_every` steps, and after every evaluation if the best
    /// checkpoints are to be kept.
    fn saves_after(&self, step: u64) -> bool {
        let (done, every) = (step + 1, self.plan.run.checkpoint_every);
        let is_candidate = self.plan.run.keep_best > 0 && self.evaluates_after(step);
        self.saver.is_some() && (every > 0 && done.is_multiple_of(every) || is_candidate)
    }

    /// Copies this rank's state for the writer. Returns the seconds that the rank paused.
    fn save(
        &self,
        worker: &Worker,
        result: &StepResult,
        state: &mut LoopState,
        batches: u64,
        last: bool,
    ) -> Result<Option<f64>, RankError> {
        let Some(saver) = self.saver else { return Ok(None) };
        let _pause = Pause::begin();
        let progress = self.progress(result, state, batches);
        state.unconfirmed_save = Some(progress.step);
        state.saves += 1;
        Ok(Some(saver.save(worker.number, &worker.rank, progress, last)?))
    }

    /// Copies the states of all ranks to the memory of the nodes.
    fn copy_states(
        &self,
        worker: &mut Worker,
        result: &StepResult,
        state: &mut LoopState,
        batches: u64,
    ) -> Result<(), RankError> {
        let progress = self.progress(result, state, batches);
        let Some(replication) = &mut state.replication else { return Ok(()) };
        // Ranks wait for the memory of the host.
        let _pause = Pause::begin();
        let watch = &mut state.watch;
        replication.run(worker, &progress, |op| watch.op(op))
    }

    /// The progress of the run after a step with this result and so many batches.
    fn progress(&self, result: &StepResult, state: &LoopState, batches: u64) -> RunProgress {
        let count = |index| result.control(index) as u64;
        let history = &state.history;
        RunProgress {
            step: count(control::STEP),
            samples: batches * self.plan.batch.global as u64,
            updates: count(control::UPDATES),
            loss_scale: result.control(control::LOSS_SCALE),
            good_steps: count(control::GOOD_STEPS),
            skipped_in_a_row: count(control::SKIPPED_IN_A_ROW),
            skipped: history.skipped(),
            loss_first: history.loss_first(),
            validation_loss: history.last_validation_loss(),
            spikes: state.spikes.record.clone(),
        }
    }
}
