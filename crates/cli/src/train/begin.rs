//! The beginning of a run: its folder is locked and made ready, and what it goes on from is found.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kintsugi_checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, Manifest, RunLock, WeightsFolder, find,
    with_absolute_paths,
};
use kintsugi_data::Tokenizer;
use kintsugi_engine::{Start, check_tokenizers, resume_end_of_document, tokenizer};
use kintsugi_plan::{Plan, RateSchedule, Resume};
use kintsugi_spec::tokenizer_files;

use super::events::{self, Events};
use super::metrics::{self, Metrics};
use super::record;
use super::trace::TraceArguments;
use crate::config::ConfigArguments;
use crate::failure::Failure;
use crate::{files, output};

/// A run that is ready.
pub struct Beginning {
    /// What it starts from.
    pub start: Start,
    /// Which of its steps is traced, from 0.
    pub trace_step: Option<u64>,
    /// Its metrics, those of the steps before included.
    pub metrics: Metrics,
    /// Its event files, if it writes any.
    pub events: Option<Events>,
    /// What a person should know of it, in lines.
    pub notes: String,
    /// Nobody else uses its folder or that of its checkpoints, where the file system can see to that.
    _locks: (RunLock, Option<RunLock>),
}

impl Beginning {
    /// Makes a run ready, and sees to it that nothing stands in the way of what is written at the end. Whatever is wrong
    /// is found before a file is moved or written.
    pub fn new(plan: &mut Plan, config: &ConfigArguments, trace: &TraceArguments) -> Result<Self, Failure> {
        let (out, folder) = (&plan.run.out.clone(), CheckpointFolder::of_run(&plan.run.out));
        record::create_folder(out)?;
        check_files(plan, config, &folder)?;
        let warn = |error: &CheckpointError| output::stderr(&format!("warning: {error}"));
        let lock = RunLock::take(out, warn)?;
        let mut checkpoints = (plan.run.keep > 0).then(|| folder.lock(warn)).transpose()?;
        let mut notes = String::new();
        let checkpoint = resumed(plan, &mut notes)?;
        let step = checkpoint.as_ref().map(|checkpoint| checkpoint.progress().step);
        let trace_step = trace.step(plan.run.steps.saturating_sub(step.unwrap_or(0)))?;
        let weights = if checkpoint.is_none() { initial_weights(plan, &mut notes)? } else { None };
        let known = match (&checkpoint, &weights) {
            (Some(checkpoint), _) => checkpoint.tokenizer(),
            (None, weights) => weights.as_ref().and_then(WeightsFolder::tokenizer),
        };
        let mut warnings = check_tokenizers(plan, known.as_deref())?;
        warnings.extend(
            checkpoint.as_ref().and_then(|checkpoint| resume_end_of_document(plan, checkpoint.plan())),
        );
        for warning in warnings {
            output::stderr(&format!("warning: {warning}"));
        }
        check_config(plan, config, checkpoint.is_some())?;
        // A run that goes on from elsewhere has nothing to do with what is in its folder.
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
        Ok(Beginning { start, trace_step, metrics, events, notes, _locks: (lock, checkpoints) })
    }
}

/// Refuses a folder that has files under the names of a run's, but that no run has used.
fn check_files(plan: &Plan, config: &ConfigArguments, folder: &CheckpointFolder) -> Result<(), Failure> {
    let out = &plan.run.out;
    let (lock, _) = RunLock::of_run(out);
    let tokenizer = tokenizer_files::WRITTEN.map(|name| out.join(name));
    let own = run_files(out).into_iter().chain(tokenizer).chain([lock]);
    let mut found = own.filter(|path| path.symlink_metadata().is_ok() && !config.is_file(path));
    let Some(path) = found.next() else { return Ok(()) };
    // A run takes its lock before it writes a file, so this comes second.
    let (_, is_lock_ours) = RunLock::of_run(out);
    let is_run =
        is_lock_ours || folder.list()?.iter().any(|(_, checkpoint)| Manifest::read(checkpoint).is_ok());
    if is_run {
        return Ok(());
    }
    let rule = "is there, and no run has written it; a run would replace it, so give another run.out";
    Err(Failure::Mistake(format!("{} {rule}", path.display())))
}

/// The files of a run, beside its checkpoints and its tokenizer.
fn run_files(out: &Path) -> [PathBuf; 4] {
    [record::config_path(out), metrics::path(out), record::summary_path(out), events::folder(out)]
}

/// Moves what an earlier run has left, and this one does not go on from, to a folder of its own.
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
        Some(_) => "checkpoints of steps that this run does not go on from",
        None => "the checkpoints and files of the run that was here before",
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
    let weights =
        WeightsFolder::open(folder).map_err(|error| Failure::Mistake(format!("model.init: {error}")))?;
    if matches!(weights, WeightsFolder::Checkpoint(_)) && lies_in(folder, &plan.run.out) {
        let (folder, out) = (folder.display(), plan.run.out.display());
        let rule = "whose checkpoints make way for a new run; give another run.out";
        return Err(Failure::Mistake(format!(
            "model.init = \"{folder}\" lies in run.out = \"{out}\", {rule}"
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

/// The checkpoint to go on from, if that was asked for. Broken ones are passed over, and said to be.
fn resumed(plan: &Plan, notes: &mut String) -> Result<Option<Checkpoint>, Failure> {
    let broken = |error: &CheckpointError| {
        output::stderr(&format!("warning: {error}; trying the checkpoint before it"));
    };
    let checkpoint = match &plan.run.resume {
        Resume::No => None,
        Resume::Newest => CheckpointFolder::of_run(&plan.run.out).newest(broken)?,
        Resume::From(path) => Some(find(path, broken)?),
    };
    match &checkpoint {
        Some(checkpoint) => {
            checkpoint.batches_consumed(plan)?;
            for change in checkpoint.data_changes(plan) {
                output::stderr(&format!("warning: {change}"));
            }
            let step = checkpoint.progress().step;
            note(notes, &format!("goes on after step {step} from {}", checkpoint.path().display()));
            let skipped = checkpoint.progress().skipped_in_a_row;
            if skipped > 0
                && let Some(good) = CheckpointFolder::around(checkpoint).last_good(checkpoint.progress())?
            {
                let good = good.display();
                note(
                    notes,
                    &format!(
                        "it was saved in a streak of {skipped} skipped steps; the last checkpoint of a good step is {good}"
                    ),
                );
            }
            let (was, is) = (checkpoint.plan().run.steps, plan.run.steps);
            let rate = &plan.optimizer;
            let has_decay = !matches!(rate.schedule, RateSchedule::Constant | RateSchedule::InverseSqrt);
            if has_decay && rate.decay(was) != rate.decay(is) {
                let curve = "the learning rate goes on along the curve of";
                note(notes, &format!("{curve} {is} steps; it came along that of {was}"));
            }
        }
        None if plan.run.resume == Resume::Newest => {
            note(notes, &format!("no checkpoint in {}: starts at the beginning", plan.run.out.display()));
        }
        None => {}
    }
    Ok(checkpoint)
}

/// Leaves a copy of the data's tokenizer in the run's folder, for whoever speaks with the model or exports it.
/// One that is there already is this run's if it goes on from its own checkpoint, and otherwise another's.
fn keep_tokenizer(plan: &Plan, own: bool, notes: &mut String) -> Result<(), Failure> {
    let opened = tokenizer(plan)?.map(|name| Tokenizer::open(&name));
    match opened {
        Some(Ok(tokenizer)) => return Ok(tokenizer.save(&plan.run.out)?),
        // Training needs no text, and token files outlive the tokenizer that they were made with.
        Some(Err(error)) if !own => note(notes, &format!("the tokenizer of the data is not kept: {error}")),
        Some(Err(_)) | None => {}
    }
    if !own {
        tokenizer_files::WRITTEN.iter().try_for_each(|name| files::remove(&plan.run.out.join(name)))?;
    }
    Ok(())
}

/// Refuses to change the user's own file, where that lies in the run's folder.
fn check_config(plan: &Plan, config: &ConfigArguments, resumed: bool) -> Result<(), Failure> {
    let path = record::config_path(&plan.run.out);
    if config.is_file(&path) && config.has_sets() && !resumed {
        let path = path.display();
        let rule = "is the configuration itself, and --set would change it; give another run.out";
        return Err(Failure::Mistake(format!("{path} {rule}")));
    }
    Ok(())
}

/// Leaves the whole configuration in the run's folder, and the user's own file as it is.
fn write_config(plan: &Plan, config: &ConfigArguments) -> Result<(), Failure> {
    let path = record::config_path(&plan.run.out);
    if config.is_file(&path) {
        return Ok(());
    }
    let mut plan = with_absolute_paths(plan);
    // It repeats the run, from the beginning.
    plan.run.resume = Resume::No;
    files::write_whole(&path, plan.to_toml().as_bytes())
}
