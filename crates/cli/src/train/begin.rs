//! The start of a run: locks and prepares its folder, and finds the checkpoint or weights to start from.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kintsugi_checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, Manifest, RunLock, WeightsFolder, find,
    with_absolute_paths,
};
use kintsugi_data::Tokenizer;
use kintsugi_engine::{Start, check_tokenizers, resume_end_of_document, resume_split, tokenizer};
use kintsugi_plan::{Plan, RateSchedule, Resume};
use kintsugi_spec::tokenizer_files;

use super::events::{self, Events};
use super::finished::FinishedRun;
use super::metrics::{self, Metrics};
use super::record;
use super::trace::TraceArguments;
use crate::config::{ConfigArguments, unreadable_weights};
use crate::failure::Failure;
use crate::{files, output};

/// A run that is ready to start.
pub struct Beginning {
    /// What it starts from.
    pub start: Start,
    /// Which of its steps is traced, from 0.
    pub trace_step: Option<u64>,
    /// Its metrics, including those of earlier steps.
    pub metrics: Metrics,
    /// Its event files, if it writes any.
    pub events: Option<Events>,
    /// Notes for the user, one per line.
    pub notes: String,
    /// Locks on its folder and on that of its checkpoints, if the file system supports locks.
    _locks: (RunLock, Option<RunLock>),
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
    pub fn new(plan: &mut Plan, config: &ConfigArguments, trace: &TraceArguments) -> Result<Task, Failure> {
        let (out, folder) = (&plan.run.out.clone(), CheckpointFolder::of_run(&plan.run.out));
        record::create_folder(out)?;
        check_files(plan, config, &folder)?;
        let warn = |error: &CheckpointError| output::stderr(&format!("warning: {error}"));
        let lock = RunLock::take(out, warn)?;
        let mut checkpoints = (plan.run.keep > 0).then(|| folder.lock(warn)).transpose()?;
        let mut notes = String::new();
        let checkpoint = resumed(plan)?;
        let split = match &checkpoint {
            Some(checkpoint) => resume_split(plan, checkpoint.plan())?,
            None => None,
        };
        if let Some(checkpoint) = checkpoint.as_ref().filter(|checkpoint| folder.holds(checkpoint.path()))
            && checkpoint.is_finished(plan)?
        {
            return Ok(Task::Nothing(FinishedRun::new(plan)));
        }
        describe_resume(plan, checkpoint.as_ref(), &mut notes)?;
        let step = checkpoint.as_ref().map(|checkpoint| checkpoint.progress().step);
        let trace_step = trace.step(plan.run.steps.saturating_sub(step.unwrap_or(0)))?;
        let weights = if checkpoint.is_none() { initial_weights(plan, &mut notes)? } else { None };
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
        check_config(plan, config, checkpoint.is_some())?;
        // A run that resumes from another folder does not use the files in its own folder.
        let own = checkpoint.as_ref().filter(|checkpoint| folder.holds(checkpoint.path()));
        if checkpoints.is_none() && folder.is_in_the_way(own)? {
            checkpoints = Some(folder.lock(warn)?);
        }
        set_aside(plan, config, &folder, own, &mut notes)?;
        write_config(plan, config)?;
        keep_tokenizer(plan, own.is_some(), &mut notes)?;
        let (metrics, missing) =
            Metrics::create(out, own.map_or(0, |checkpoint| checkpoint.progress().step))?;
        missing.inspect(|missing| output::stderr(&format!("warning: {missing}")));
        let start = start(checkpoint, weights);
        let events = Events::create(plan, start.progress().step)?;
        let locks = (lock, checkpoints);
        Ok(Task::Train(Box::new(Beginning { start, trace_step, metrics, events, notes, _locks: locks })))
    }
}

/// Refuses a folder that has files with the names of a run's files but was never used by a run.
fn check_files(plan: &Plan, config: &ConfigArguments, folder: &CheckpointFolder) -> Result<(), Failure> {
    let out = &plan.run.out;
    let (lock, _) = RunLock::of_run(out);
    let tokenizer = tokenizer_files::WRITTEN.map(|name| out.join(name));
    let own = run_files(out).into_iter().chain(tokenizer).chain([lock]);
    let mut found = own.filter(|path| path.symlink_metadata().is_ok() && !config.is_file(path));
    let Some(path) = found.next() else { return Ok(()) };
    // A run locks its folder before it writes a file, so this check comes second.
    let (_, is_lock_ours) = RunLock::of_run(out);
    let is_run =
        is_lock_ours || folder.list()?.iter().any(|(_, checkpoint)| Manifest::read(checkpoint).is_ok());
    if is_run {
        return Ok(());
    }
    let rule = "exists, but no run has written it; a run would replace it, so set another run.out";
    Err(Failure::Mistake(format!("{} {rule}", path.display())))
}

/// The files of a run, except its checkpoints and its tokenizer.
fn run_files(out: &Path) -> [PathBuf; 4] {
    [record::config_path(out), metrics::path(out), record::summary_path(out), events::folder(out)]
}

/// Moves the files of an earlier run that this run does not continue to a separate folder.
fn set_aside(
    plan: &Plan,
    config: &ConfigArguments,
    folder: &CheckpointFolder,
    own: Option<&Checkpoint>,
    notes: &mut String,
) -> Result<(), Failure> {
    let given = |path: &PathBuf| config.is_file(path);
    let (copied, moved): (Vec<PathBuf>, Vec<PathBuf>) = run_files(&plan.run.out).into_iter().partition(given);
    let Some(aside) = folder.set_aside(own, &moved)? else { return Ok(()) };
    if own.is_none() {
        for path in copied {
            let copy = aside.join(path.file_name().expect("a file has a name"));
            fs::copy(&path, &copy).map_err(|error| Failure::file("write", &copy, &error))?;
        }
    }
    let what = match own {
        Some(_) => "checkpoints of later steps, which this run does not continue,",
        None => "the checkpoints and files of the previous run",
    };
    note(notes, &format!("{what} are now in {}", aside.display()));
    Ok(())
}

fn start(checkpoint: Option<Checkpoint>, weights: Option<WeightsFolder>) -> Start {
    match (checkpoint, weights) {
        (Some(checkpoint), _) => Start::Checkpoint(Arc::new(checkpoint)),
        (None, Some(weights)) => Start::Weights(Arc::new(weights)),
        (None, None) => Start::Seed,
    }
}

/// The folder of weights to start from, if there is one.
fn initial_weights(plan: &Plan, notes: &mut String) -> Result<Option<WeightsFolder>, Failure> {
    let Some(folder) = &plan.init else { return Ok(None) };
    let weights = WeightsFolder::open(folder).map_err(|error| unreadable_weights(folder, &error))?;
    if let WeightsFolder::Checkpoint(checkpoint) = &weights
        && lies_in(checkpoint.path(), &plan.run.out)
    {
        let (folder, out) = (folder.display(), plan.run.out.display());
        let rule = "whose checkpoints a new run moves away; set another run.out";
        return Err(Failure::Mistake(format!(
            "model.init = \"{folder}\" is inside run.out = \"{out}\", {rule}"
        )));
    }
    note(notes, &format!("starts from the weights in {}", folder.display()));
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
fn keep_tokenizer(plan: &Plan, own: bool, notes: &mut String) -> Result<(), Failure> {
    let opened = tokenizer(plan)?.map(|name| Tokenizer::open(&name));
    match opened {
        Some(Ok(tokenizer)) => return Ok(tokenizer.save(&plan.run.out)?),
        // Training needs no text, and token files can outlive their tokenizer.
        Some(Err(error)) if !own => note(notes, &format!("the tokenizer of the data is not copied: {error}")),
        Some(Err(_)) | None => {}
    }
    if !own {
        tokenizer_files::WRITTEN.iter().try_for_each(|name| files::remove(&plan.run.out.join(name)))?;
    }
    Ok(())
}

/// Refuses to overwrite the user's own configuration file, if it is in the run's folder.
fn check_config(plan: &Plan, config: &ConfigArguments, resumed: bool) -> Result<(), Failure> {
    let path = record::config_path(&plan.run.out);
    if config.is_file(&path) && config.has_sets() && !resumed {
        let path = path.display();
        let rule = "is the given configuration, and --set would change it; set another run.out";
        return Err(Failure::Mistake(format!("{path} {rule}")));
    }
    Ok(())
}

/// Writes the whole configuration to the run's folder, unless that is the user's own file.
fn write_config(plan: &Plan, config: &ConfigArguments) -> Result<(), Failure> {
    let path = record::config_path(&plan.run.out);
    if config.is_file(&path) {
        return Ok(());
    }
    let mut plan = with_absolute_paths(plan);
    // It repeats the run from the beginning.
    plan.run.resume = Resume::No;
    files::write_whole(&path, plan.to_toml().as_bytes())
}
