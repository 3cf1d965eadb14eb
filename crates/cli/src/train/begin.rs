//! The start of a run: finds the checkpoint or weights to start from, and prepares its folder.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use kintsugi_checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, Continued, SkippedSamples, WeightsFolder, find,
};
use kintsugi_data::Tokenizer;
use kintsugi_engine::{
    CopiedStart, Start, check_tokenizers, resume_end_of_document, resume_split, tokenizer,
};
use kintsugi_plan::{Plan, RateSchedule, Resume};
use kintsugi_run::{Metrics, OutputFolder, Rollback, skipped_samples};

use super::copies::Copies;
use super::events::Events;
use super::finished::FinishedRun;
use super::trace::TraceArguments;
use crate::config::{ConfigArguments, unreadable_weights};
use crate::failure::Failure;
use crate::output;

/// A run that is ready to start.
pub struct Beginning {
    /// What it starts from.
    pub start: Start,
    /// Samples that it skips besides those of its checkpoint.
    pub skipped: SkippedSamples,
    /// Which of its steps is traced, from 0.
    pub trace_step: Option<u64>,
    /// Its metrics, including those of earlier steps.
    pub metrics: Metrics,
    /// Its event files, if it writes any.
    pub events: Option<Events>,
    /// Notes for the user, one per line.
    pub notes: String,
    /// Its folder, which is locked until the run ends.
    _folder: OutputFolder,
}

impl Beginning {
    /// Takes note of the return to a checkpoint. The lines of steps that run again are removed from the metrics.
    pub fn go_back(&mut self, plan: &Plan, rollback: &Rollback) -> Result<(), Failure> {
        rollback.append(&plan.run.out)?;
        (self.metrics, _) = Metrics::create(&plan.run.out, rollback.resumed_after)?;
        self.events = Events::create(plan, rollback.resumed_after)?;
        Ok(())
    }
}

/// What is left to do for a run.
pub enum Task {
    /// It trains.
    Train(Box<Beginning>),
    /// It is resumed, and has already finished.
    Nothing(FinishedRun),
}

impl Task {
    /// Prepares a run, and checks that its results can be written at the end. All errors are found before a file is
    /// moved or written. A finished run is left as it is.
    pub fn new(
        plan: &mut Plan,
        config: &ConfigArguments,
        trace: &TraceArguments,
        copies: &Copies,
    ) -> Result<Task, Failure> {
        let out = &plan.run.out.clone();
        let mut folder = OutputFolder::create(out, config.file())?;
        let warn: fn(&CheckpointError) = |error| output::stderr(&format!("warning: {error}"));
        folder.lock(plan.run.keep > 0, warn)?;
        let mut notes = String::new();
        let checkpoint = resumed(plan)?;
        let saved = checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.progress().step);
        let copied = copies.newest.as_ref().filter(|set| set.progress.step > saved);
        let split = match &checkpoint {
            Some(checkpoint) => resume_split(plan, checkpoint.plan())?,
            None => None,
        };
        if let Some(checkpoint) =
            checkpoint.as_ref().filter(|checkpoint| folder.checkpoints().holds(checkpoint.path()))
            && copied.is_none()
            && checkpoint.is_finished(plan)?
        {
            return Ok(Task::Nothing(FinishedRun::new(plan)));
        }
        match copied {
            Some(set) => {
                let step = set.progress.step;
                note(&mut notes, &format!("resumes after step {step} from the copies in memory"));
            }
            None => describe_resume(plan, checkpoint.as_ref(), &mut notes)?,
        }
        let step = copied.map_or(saved, |set| set.progress.step);
        let trace_step = trace.step(plan.run.steps.saturating_sub(step))?;
        let weights = if checkpoint.is_none() { initial_weights(plan)? } else { None };
        if let (Some(folder), None) = (plan.init.as_ref().filter(|_| weights.is_some()), copied) {
            note(&mut notes, &format!("starts from the weights in {}", folder.display()));
        }
        let known = match (&checkpoint, &weights) {
            (Some(checkpoint), _) => checkpoint.tokenizer(),
            (None, weights) => weights.as_ref().and_then(WeightsFolder::tokenizer),
        };
        let mut warnings = check_tokenizers(plan, known.as_deref())?;
        warnings.extend(split);
        warnings.extend(
            checkpoint.as_ref().and_then(|checkpoint| resume_end_of_document(plan, checkpoint.plan())),
        );
        for warning in warnings {
            output::stderr(&format!("warning: {warning}"));
        }
        folder.check_config(config.has_sets() && checkpoint.is_none() && copied.is_none())?;
        // A run that resumes from another folder does not use the files in its own folder.
        let own = checkpoint.as_ref().filter(|checkpoint| folder.checkpoints().holds(checkpoint.path()));
        let own = match copied {
            Some(set) => Some(Continued { step: set.progress.step, checkpoint: own.map(Checkpoint::path) }),
            None => own.map(Continued::from),
        };
        if let Some(aside) = folder.set_aside(own, warn)? {
            let what = match own {
                Some(_) => "checkpoints of later steps, which this run does not continue,",
                None => "the checkpoints and files of the previous run",
            };
            note(&mut notes, &format!("{what} are now in {}", aside.display()));
        }
        folder.write_config(plan)?;
        keep_tokenizer(plan, &folder, own.is_some(), &mut notes)?;
        let (metrics, missing) = Metrics::create(out, own.map_or(0, |own| own.step))?;
        missing.inspect(|missing| output::stderr(&format!("warning: {missing}")));
        // A run that begins anew, or from another folder, has moved the rollbacks of an earlier run away.
        let skipped = if own.is_some() { skipped_samples(out) } else { SkippedSamples::default() };
        let origin = start(checkpoint, weights);
        let start = match (copied, &copies.folder) {
            (Some(set), Some(folder)) => {
                Start::Copies(Arc::new(CopiedStart { folder: folder.clone(), set: set.clone(), origin }))
            }
            _ => origin,
        };
        let events = Events::create(plan, start.progress().step)?;
        Ok(Task::Train(Box::new(Beginning {
            start,
            skipped,
            trace_step,
            metrics,
            events,
            notes,
            _folder: folder,
        })))
    }
}

fn start(checkpoint: Option<Checkpoint>, weights: Option<WeightsFolder>) -> Start {
    match (checkpoint, weights) {
        (Some(checkpoint), _) => Start::Checkpoint(Arc::new(checkpoint)),
        (None, Some(weights)) => Start::Weights(Arc::new(weights)),
        (None, None) => Start::Seed,
    }
}

/// The folder of weights to start from, if there is one.
fn initial_weights(plan: &Plan) -> Result<Option<WeightsFolder>, Failure> {
    let Some(folder) = &plan.init else { return Ok(None) };
    let weights = WeightsFolder::open(folder).map_err(|error| unreadable_weights(folder, error))?;
    if let WeightsFolder::Checkpoint(checkpoint) = &weights
        && lies_in(checkpoint.path(), &plan.run.out)
    {
        let (folder, out) = (folder.display(), plan.run.out.display());
        let rule = "whose checkpoints a new run moves away; set another run.out";
        return Err(Failure::mistake(format!(
            "model.init = \"{folder}\" is inside run.out = \"{out}\", {rule}"
        )));
    }
    Ok(Some(weights))
}

fn lies_in(path: &Path, folder: &Path) -> bool {
    matches!((path.canonicalize(), folder.canonicalize()), (Ok(path), Ok(folder)) if path.starts_with(&folder))
}

fn note(notes: &mut String, text: &str) {
    writeln!(notes, "note     {text}").expect("a string takes any text");
}

/// The checkpoint to resume from, if requested. Broken ones are skipped with a warning.
fn resumed(plan: &Plan) -> Result<Option<Checkpoint>, Failure> {
    let broken = |error: &CheckpointError| {
        output::stderr(&format!("warning: {error}; trying another checkpoint"));
    };
    Ok(match &plan.run.resume {
        Resume::No => None,
        Resume::Newest => CheckpointFolder::of_run(&plan.run.out).newest(broken)?,
        Resume::From(path) => Some(find(path, broken)?),
    })
}

/// Checks that the plan can resume from the checkpoint, and says what changes.
fn describe_resume(plan: &Plan, checkpoint: Option<&Checkpoint>, notes: &mut String) -> Result<(), Failure> {
    match checkpoint {
        Some(checkpoint) => {
            checkpoint.batches_consumed(plan)?;
            for change in checkpoint.data_changes(plan) {
                output::stderr(&format!("warning: {change}"));
            }
            let step = checkpoint.progress().step;
            note(notes, &format!("resumes after step {step} from {}", checkpoint.path().display()));
            let skipped = checkpoint.progress().skipped_in_a_row;
            if skipped > 0
                && let Some(good) = CheckpointFolder::around(checkpoint).last_good(checkpoint.progress())?
            {
                let good = good.display();
                note(
                    notes,
                    &format!(
                        "it was saved after {skipped} skipped steps in a row; the last checkpoint of a good step is {good}"
                    ),
                );
            }
            let (was, is) = (checkpoint.plan().run.steps, plan.run.steps);
            let rate = &plan.optimizer;
            let has_decay = !matches!(rate.schedule, RateSchedule::Constant | RateSchedule::InverseSqrt);
            if has_decay && rate.decay(was) != rate.decay(is) {
                let text = format!("the learning rate now follows the curve of {is} steps, not of {was}");
                note(notes, &text);
            }
        }
        None if plan.run.resume == Resume::Newest => {
            note(notes, &format!("no checkpoint in {}: starts from the beginning", plan.run.out.display()));
        }
        None => {}
    }
    Ok(())
}

/// Copies the data's tokenizer to the run's folder, for `generate` and `convert`. An existing tokenizer belongs to this
/// run if it resumes from its own checkpoint, and otherwise to another run.
fn keep_tokenizer(plan: &Plan, folder: &OutputFolder, own: bool, notes: &mut String) -> Result<(), Failure> {
    let opened = tokenizer(plan)?.map(|name| Tokenizer::open(&name));
    match opened {
        Some(Ok(tokenizer)) => return Ok(tokenizer.save(&plan.run.out)?),
        // Training needs no text, and token files can outlive their tokenizer.
        Some(Err(error)) if !own => note(notes, &format!("the tokenizer of the data is not copied: {error}")),
        Some(Err(_)) | None => {}
    }
    if !own {
        folder.remove_tokenizer()?;
    }
    Ok(())
}
