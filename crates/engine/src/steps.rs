//! The training loop of one rank.
//!
//! A device that runs later has at most two steps enqueued: the host enqueues one, then reads what the one before it has
//! decided. Wherever something depends on the newest step (an evaluation, a checkpoint, the end) it is read first.
//!
//! No step fails for its data: a rank reads the tokens of a step before an earlier step begins. If it cannot, it asks all
//! ranks to stop in that earlier step. They agree as they do for a signal, and save what they have.

use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Instant;

use kintsugi_checkpoint::{Progress, Saver};
use kintsugi_comm::Traffic;
use kintsugi_data::{Dataset, Split};
use kintsugi_plan::{DeviceKind, Plan, Program};
use kintsugi_rank::{Bad, Decided, RankMemory};
use kintsugi_tensor::cpu::counting;
use kintsugi_tensor::ops::control;
use kintsugi_tensor::{Notice, Repeated};

use crate::card::CardWatch;
use crate::deal::Dealt;
use crate::evaluate::Evaluation;
use crate::flight::{Flight, Moment};
use crate::report::{History, RankResult};
use crate::source::{Batches, ReadAhead, StepTokens};
use crate::trace::Timer;
use crate::{Event, RankError, StepReport, TrainOptions, Worker};

/// A rank's run.
pub(crate) struct RankRun<'a> {
    pub plan: &'a Plan,
    pub dataset: &'a dyn Dataset,
    pub options: &'a TrainOptions,
    /// Global batches that were read before this run.
    pub behind: u64,
    pub saver: Option<&'a Saver>,
    pub card: Option<&'a CardWatch>,
    /// Hears what the rank has to say; one rank's alone.
    pub voice: Option<&'a Sender<Event>>,
}

/// How far a rank is.
struct Course {
    history: History,
    /// Steps that the device repeated by heart.
    replayed: u64,
    /// When the last step that was read had ended.
    ended: Option<Moment>,
    /// What it said.
    skipped_in_a_row: u64,
    /// Whether a checkpoint is due that fell on a skipped step.
    save_due: bool,
    /// Whether no step was good since the last checkpoint.
    save_unconfirmed: bool,
    stop_agreed: bool,
    /// How the run ends before its last step, if it does.
    early_end: Option<EarlyEnd>,
    /// Why on this rank, if it gave up.
    bad: Option<Bad>,
}

/// Why a run ends before its last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EarlyEnd {
    /// It was asked to, or a rank cannot read its tokens.
    Stopped,
    /// Too many steps in a row were skipped.
    GaveUp,
}

impl RankRun<'_> {
    /// Trains a rank to the end.
    pub fn train(&self, worker: &mut Worker) -> Result<RankResult, RankError> {
        let RankRun { plan, dataset, options, .. } = *self;
        options.start.load(worker, plan)?;
        self.listen(worker);
        let before = options.start.progress();
        let program = worker.program(plan);
        let batches = Batches::new(plan, dataset, Split::Train, worker, &program);
        let all = self.behind..self.behind + plan.run.steps.saturating_sub(before.step);
        let mut reader = ReadAhead::new(batches, all, self.steps_to_stop())?;
        let dealt = Dealt::new(dataset, Some(plan.evaluation_samples()), plan);
        let mut evaluation = Evaluation::new(worker, plan, &dealt);
        if plan.run.eval_every > 0 {
            evaluation.load(plan)?;
        }
        let (mut course, mut traffic, mut spans) = (Course::new(&before), Traffic::default(), Vec::new());
        let mut in_flight = None;
        counting::reset(worker.number);
        for step in before.step..plan.run.steps {
            let can_go_on = reader.read_next();
            if !can_go_on || options.stop.load(Ordering::Relaxed) {
                worker.rank.ask_to_stop();
            }
            let (begun, batch) = (self.now(), self.behind + step - before.step);
            if options.trace_step == Some(step - before.step) {
                let mut timer = Timer::begin(worker.number, &worker.backend);
                worker.run(&program, reader.current(), |_, op| timer.op(*op));
                spans = timer.end();
            } else {
                course.replayed += self.enqueue(worker, &program, reader.current());
            }
            reader.finish_step();
            let newest = Flight { step, batch, begun, snapshot: worker.rank.snapshot() };
            if step == before.step {
                traffic = worker.world.traffic(worker.number);
            }
            if let Some(earlier) = in_flight.take() {
                let (report, _) = self.read(earlier, &mut course)?;
                course.history.add(&report);
                self.tell(Event::Step(report));
            }
            if self.may_wait(step, &course) {
                in_flight = Some(newest);
                continue;
            }
            self.tell(Event::Step(self.finish(newest, worker, &mut course, &mut evaluation)?));
            if course.early_end.is_some() {
                break;
            }
        }
        if plan.run.steps == 0 {
            self.save(worker, &worker.rank.snapshot().wait(), &course.history, 0, true)?;
        }
        Ok(RankResult {
            bad: course.bad,
            history: course.history,
            replayed: course.replayed,
            memory: self.measured_memory(worker),
            traffic,
            early_end: course.early_end,
            data_error: reader.into_failure(),
            spans,
        })
    }

    /// Enqueues a step, from memory if the device can; gives how many it repeated so.
    fn enqueue(&self, worker: &mut Worker, program: &Program, tokens: &mut StepTokens) -> u64 {
        if !(self.plan.run.graph && self.plan.mesh.ranks() == 1) {
            worker.run(program, tokens, |_, _| {});
            return 0;
        }
        match worker.repeat(program, tokens, |_, _| {}) {
            Repeated::Enqueued => 0,
            Repeated::Replayed => 1,
            Repeated::Refused(reason) => {
                self.tell(Event::NotRepeated(reason));
                0
            }
        }
    }

    /// Whether a step may be read after the next one is enqueued: nothing is done after it that depends on it, and it
    /// cannot be the one at which the run gives up. The same on every rank.
    fn may_wait(&self, step: u64, course: &Course) -> bool {
        let run = &self.plan.run;
        self.is_late()
            && step + 1 < run.steps
            && !course.stop_agreed
            && course.skipped_in_a_row + 1 < run.max_skipped
            && !self.evaluates_after(step)
            && !course.save_due
            && !self.saves_after(step)
    }

    /// Whether a step is enqueued before the one before it is read.
    fn is_late(&self) -> bool {
        self.options.late.unwrap_or(self.plan.run.device == DeviceKind::Cuda)
    }

    /// Steps that are certain to run when a rank asks to stop: the running one, and the next if that is enqueued before
    /// the running one is read.
    fn steps_to_stop(&self) -> u64 {
        if self.is_late() { 2 } else { 1 }
    }

    /// Waits for a step.
    fn read(&self, flight: Flight, course: &mut Course) -> Result<(StepReport, Decided), RankError> {
        let landed = flight.land(&mut course.ended, || self.now());
        let report = StepReport::new(self.plan, &landed);
        course.skipped_in_a_row = landed.decided.control(control::SKIPPED_IN_A_ROW) as u64;
        course.stop_agreed = landed.decided.stop_agreed();
        if course.save_unconfirmed && !report.skipped {
            course.save_unconfirmed = false;
            // One rank speaks for all: whether a step is skipped is the same on every rank.
            if let (Some(saver), Some(_)) = (self.saver, self.voice) {
                saver.confirm()?;
            }
        }
        Ok((report, landed.decided))
    }

    /// Waits for the newest step, and does what is to be done after it.
    fn finish(
        &self,
        flight: Flight,
        worker: &mut Worker,
        course: &mut Course,
        evaluation: &mut Evaluation,
    ) -> Result<StepReport, RankError> {
        let (step, batches) = (flight.step, flight.batch + 1);
        let (mut report, decided) = self.read(flight, course)?;
        course.early_end = if course.skipped_in_a_row >= self.plan.run.max_skipped {
            Some(EarlyEnd::GaveUp)
        } else {
            (course.stop_agreed && step + 1 < self.plan.run.steps).then_some(EarlyEnd::Stopped)
        };
        // An evaluation would wipe out the traces of what went wrong.
        if course.early_end == Some(EarlyEnd::GaveUp) {
            course.bad = worker.rank.first_bad();
        } else if self.evaluates_after(step) {
            report.set_validation(evaluation.run(worker, self.plan, |_| {})?);
        }
        course.history.add(&report);
        // After a skipped step the weights are those of the step before, and may have diverged: a checkpoint that falls on
        // one is saved after the next good step, or when the run ends.
        let ends = course.early_end.is_some() || step + 1 == self.plan.run.steps;
        let due = course.save_due || self.saves_after(step);
        if due && !report.skipped || ends {
            course.save_due = false;
            course.save_unconfirmed = true;
            report.checkpoint_s = self.save(worker, &decided, &course.history, batches, ends)?;
        } else {
            course.save_due = due;
        }
        Ok(report)
    }

    /// Passes on what the device has to tell.
    fn listen(&self, worker: &Worker) {
        if let Some(voice) = self.voice.cloned() {
            worker.backend.listen(Box::new(move |notice| {
                let event = match notice {
                    Notice::Trying => Event::Trying,
                    Notice::Replaced(reason) => Event::Replaced(reason),
                };
                voice.send(event).ok();
            }));
        }
    }

    fn tell(&self, event: Event) {
        if let Some(voice) = self.voice {
            // Nobody listens any more only if the caller has panicked.
            voice.send(event).ok();
        }
    }

    fn now(&self) -> Moment {
        Moment { at: Instant::now(), joules: self.card.and_then(CardWatch::joules) }
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

    /// Whether there is an evaluation after a step: now and then, and at the end.
    fn evaluates_after(&self, step: u64) -> bool {
        let (done, every) = (step + 1, self.plan.run.eval_every);
        every > 0 && (done.is_multiple_of(every) || done == self.plan.run.steps)
    }

    /// Whether a checkpoint falls on a step, as `run.checkpoint_every` says.
    fn saves_after(&self, step: u64) -> bool {
        let (done, every) = (step + 1, self.plan.run.checkpoint_every);
        self.saver.is_some() && every > 0 && done.is_multiple_of(every)
    }

    /// Hands this rank's copy to the writer; gives the seconds that it took.
    fn save(
        &self,
        worker: &Worker,
        decided: &Decided,
        history: &History,
        batches: u64,
        last: bool,
    ) -> Result<Option<f64>, RankError> {
        let Some(saver) = self.saver else { return Ok(None) };
        let count = |slot| decided.control(slot) as u64;
        let progress = Progress {
            step: count(control::STEP),
            samples: batches * self.plan.batch.global as u64,
            updates: count(control::UPDATES),
            loss_scale: decided.control(control::LOSS_SCALE),
            good_steps: count(control::GOOD_STEPS),
            skipped_in_a_row: count(control::SKIPPED_IN_A_ROW),
            skipped: history.skipped(),
            loss_first: history.loss_first(),
        };
        Ok(Some(saver.save(worker.number, &worker.rank, progress, last)?))
    }
}

impl Course {
    fn new(before: &Progress) -> Self {
        Course {
            history: History::new(before),
            replayed: 0,
            ended: None,
            skipped_in_a_row: 0,
            save_due: false,
            save_unconfirmed: false,
            stop_agreed: false,
            early_end: None,
            bad: None,
        }
    }
}
