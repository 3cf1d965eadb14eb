//! `kintsugi status`: runs and their jobs, by the files of the runs and what Slurm says.

mod jobs;
mod why;

use std::fmt::Write;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::HumanDuration;
use kintsugi_run::{FolderPath, RunFolder, RunState, RunStatus, is_run};
use kintsugi_spec::{input, units};
use serde::Serialize;

use crate::describe::{self, fact, lines};
use crate::failure::Failure;
use crate::output::Output;
use jobs::Job;
pub use jobs::{job_name, whole_path};

/// Shows runs and their jobs, and why a run has ended.
///
/// For every run: step, loss, speed, newest checkpoint, training that is left, and its jobs.
///
/// FOLDER is the folder of a run, or one with runs in it. What is shown comes from the files of the runs, and where there
/// is a Slurm, from squeue and sacct. Jobs are those that `kintsugi launch --slurm` has submitted.
#[derive(Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The folder of a run, or one with runs in it
    #[arg(value_name = "FOLDER", default_value = ".")]
    folder: PathBuf,
    /// Prints nothing, and exits with 0 if the run in FOLDER has reached its last step, else with 1; for scripts
    #[arg(long, conflicts_with = "json")]
    finished: bool,
    /// Shows why the run in FOLDER has failed, and what its ranks did last
    #[arg(long, conflicts_with = "finished")]
    why: bool,
    /// Prints the status as JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  kintsugi status out
      the run in out
  kintsugi status runs --json
      all runs in the folder runs, for scripts
  kintsugi status --why out
      who was the cause of failures, and the last op of every rank
  kintsugi status --finished out && echo done
      whether a run has finished";

/// The most bytes of a job's log that are read, from its end.
const END_OF_LOG: u64 = 64 << 10;

/// A run, its jobs, and why it has ended.
#[derive(Serialize)]
struct Entry {
    run: PathBuf,
    #[serde(flatten)]
    status: Option<RunStatus>,
    /// Which pods and nodes have which ranks, if they were chosen.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    placed: Vec<String>,
    ended: Option<String>,
    jobs: Vec<Job>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let folder = &arguments.folder;
    if arguments.finished {
        let is_finished = read(folder).is_some_and(|(status, _)| status.state == RunState::Finished);
        return if is_finished { Ok(()) } else { Err(Failure::Shown) };
    }
    if !folder.is_dir() {
        return Err(Failure::mistake(format!("{} is not a folder", folder.display())));
    }
    if arguments.why {
        return why::run(folder, Output { json: arguments.json });
    }
    let folders = folders(folder)?;
    let named: Vec<(PathBuf, String)> = folders
        .into_iter()
        .filter_map(|path| Some((path.clone(), job_name(&whole_path(&path).ok()?))))
        .collect();
    let names: Vec<String> = named.iter().map(|(_, name)| name.clone()).collect();
    let all = jobs::find(&names);
    let entry = |(path, name): (PathBuf, String)| {
        let jobs = jobs::of_run(&all, &name);
        let (status, placed) = read(&path).unzip();
        let placed = placed.unwrap_or_default();
        let ended = status.as_ref().and_then(|status| ended(status, &jobs, &path));
        let jobs: Vec<Job> = jobs.into_iter().cloned().collect();
        (status.is_some() || !jobs.is_empty()).then_some(Entry { run: path, status, placed, ended, jobs })
    };
    let entries: Vec<Entry> = named.into_iter().filter_map(entry).collect();
    let output = Output { json: arguments.json };
    if entries.is_empty() {
        return Err(Failure::mistake(format!("there is no run in {}, and no job for one", folder.display())));
    }
    if !arguments.json {
        output.text(&entries.iter().map(text).collect::<Vec<_>>().join("\n"))?;
    }
    output.result(&entries)
}

/// The folders that may be runs: this one, and if it is none, those in it, too.
fn folders(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut all = vec![folder.to_owned()];
    if !is_run(folder) {
        let names = FolderPath::new(folder).open().and_then(|folder| folder.folders());
        let names = names.map_err(|error| Failure::file("read", folder, error))?;
        all.extend(
            names
                .into_iter()
                .map(|name| if folder == Path::new(".") { name.into() } else { folder.join(name) }),
        );
    }
    Ok(all)
}

/// The status of a run, and where its ranks are.
fn read(folder: &Path) -> Option<(RunStatus, Vec<String>)> {
    let run = RunFolder::open(folder, String::new()).ok()?;
    let placed = run.plan.as_ref().map(describe::placed).unwrap_or_default();
    Some((RunStatus::new(&run, folder), placed.into_iter().map(|(_, line)| line).collect()))
}

/// Why a run has ended, if it has.
fn ended(status: &RunStatus, jobs: &[&Job], folder: &Path) -> Option<String> {
    let after =
        status.step.map_or_else(|| "before its first step".to_owned(), |step| format!("after step {step}"));
    let last = jobs.iter().rev().find(|job| !job.is_active());
    let by_slurm = last.filter(|job| job.state != "COMPLETED").map(|job| {
        let reason = job.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
        format!("job {} {}{reason}", job.id, job.state)
    });
    let is_active = jobs.iter().any(|job| job.state == "RUNNING" || job.state == "COMPLETING");
    let mut text = match status.state {
        RunState::Finished => return Some(format!("finished {after}")),
        RunState::Failed => format!("failed {after}: {}", status.failure.as_deref().unwrap_or_default()),
        RunState::Stopped => match status.stopped_by.as_deref() {
            Some("SIGUSR1") => format!("stopped {after} by SIGUSR1, which Slurm sends before the time limit"),
            Some(signal) => format!("stopped {after} by {signal}"),
            None => format!("stopped {after} on request"),
        },
        _ if is_active => return None,
        RunState::Running if by_slurm.is_none() => return None,
        RunState::Running | RunState::Silent => {
            let error = last_error(folder).map_or_else(String::new, |error| format!(": {error}"));
            format!("ended {after} without a summary{error}")
        }
    };
    if let Some(by_slurm) = by_slurm {
        write!(text, "; {by_slurm}").expect("a string takes any text");
    }
    Some(text)
}

/// The last error in the log of the last job.
fn last_error(folder: &Path) -> Option<String> {
    let logs = fs::read_dir(folder).ok()?.filter_map(|entry| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        let number: u64 = name.strip_prefix("slurm-")?.strip_suffix(".log")?.parse().ok()?;
        Some((number, name))
    });
    let (_, name) = logs.max()?;
    let mut file = input::open(&folder.join(name)).ok()?;
    let begin = file.metadata().ok()?.len().saturating_sub(END_OF_LOG);
    file.seek(SeekFrom::Start(begin)).ok()?;
    let mut bytes = Vec::new();
    file.take(END_OF_LOG).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let line = text.lines().rev().find(|line| line.contains("error: "))?;
    Some(printable(line).chars().take(400).collect())
}

/// A text without control characters, which a terminal would obey.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// A run and its jobs in lines.
fn text(Entry { run, status, placed, ended, jobs }: &Entry) -> String {
    let is_waiting = status.as_ref().is_none_or(|status| status.state != RunState::Running);
    let is_queued = is_waiting && jobs.iter().any(|job| job.state == "PENDING");
    let word = match status.as_ref().map(|status| status.state) {
        Some(RunState::Finished) => "finished",
        _ if is_queued => "waiting for its job",
        None => "has not begun",
        Some(RunState::Stopped) => "stopped",
        Some(RunState::Failed) => "failed",
        Some(_) if ended.is_some() => "ended",
        Some(RunState::Silent) => "silent for more than a minute",
        Some(RunState::Running) => "running",
    };
    let mut facts = vec![fact("run", format!("{}: {word}", printable(&run.display().to_string())))];
    if let Some(status) = status {
        facts.extend(progress(status).map(|text| fact("step", text)));
        facts.extend(status.stragglers.iter().map(|straggler| fact("slow", straggler.to_string())));
        facts.extend(status.rollbacks.last().map(|last| {
            let count = match last.rollbacks {
                1 => "once".to_owned(),
                count => format!("{count} times"),
            };
            fact("spikes", format!("went back {count}, the last time at {last}"))
        }));
        let saved = status.checkpoint.as_ref();
        facts.extend(saved.map(|saved| {
            fact("saved", format!("step {}, {}", saved.step, printable(&saved.path.display().to_string())))
        }));
        let left = status.left_s.and_then(|left| Duration::try_from_secs_f64(left).ok());
        facts.extend(left.map(|left| fact("left", format!("{} of training", HumanDuration(left)))));
    }
    facts.extend(placed.iter().map(|line| fact("placed", line)));
    facts.extend(ended.as_ref().map(|ended| fact("ended", ended)));
    facts.extend(jobs.iter().map(|job| fact("job", job_line(job))));
    lines(&facts)
}

fn progress(status: &RunStatus) -> Option<String> {
    let mut text = status.step?.to_string();
    let parts = [
        status.steps.map(|steps| format!(" of {steps}")),
        status.loss.map(|loss| format!(", loss {loss:.4}")),
        status.tokens_per_s.map(|speed| format!(", {} tokens/s", units::count(speed))),
    ];
    text.extend(parts.into_iter().flatten());
    Some(text)
}

fn job_line(job: &Job) -> String {
    let nodes = job.nodes.as_ref().map_or_else(String::new, |nodes| format!(" on {nodes}"));
    let left = job
        .left
        .as_ref()
        .filter(|_| job.state == "RUNNING")
        .map_or_else(String::new, |left| format!(", {left} until its time limit"));
    let reason = job.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
    format!("{} {}{nodes}{reason}{left}", job.id, job.state)
}
