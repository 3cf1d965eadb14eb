//! The files of a run: its configuration, a line of metrics per step as it goes, and a summary at the end.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use kintsugi_engine::{Outcome, Start, StepReport};
use kintsugi_plan::Plan;
use kintsugi_rank::Figures;
use serde::Serialize;

use crate::failure::Failure;
use crate::files::{remove, write_whole};
use crate::output::json;

/// `metrics.jsonl`, open.
pub struct Metrics {
    path: PathBuf,
    file: File,
}

/// What `summary.json` holds.
#[derive(Serialize)]
pub struct Summary<'a> {
    params: u64,
    ranks: usize,
    steps: u64,
    skipped: u64,
    stopped: bool,
    loss_first: f64,
    loss_last: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_floor: Option<f64>,
    validation_loss: Option<f64>,
    resumed_after: Option<u64>,
    checkpoints: Checkpoints<'a>,
    predicted: &'a Figures,
    measured: &'a Figures,
}

/// How saving went.
#[derive(Serialize)]
struct Checkpoints<'a> {
    last: Option<&'a Path>,
    saved: u64,
    failed: u64,
    blocked_s: f64,
    write_s: f64,
}

/// Makes the run's folder.
pub fn create_folder(out: &Path) -> Result<(), Failure> {
    fs::create_dir_all(out).map_err(|error| Failure::file("create", out, &error))
}

/// The whole configuration of a run, which repeats it.
pub fn config_path(out: &Path) -> PathBuf {
    out.join("config.toml")
}

impl Metrics {
    /// Starts a run's metrics in its folder, after those of the first `steps` steps, which stay. Lines beyond them go:
    /// those steps are done again. An older summary goes too: it does not belong to them.
    pub fn create(out: &Path, steps: u64) -> Result<Self, Failure> {
        remove(&summary_path(out))?;
        let path = out.join("metrics.jsonl");
        let failed = |error| Failure::file("create", &path, &error);
        write_whole(&path, &lines_up_to(&path, steps).map_err(failed)?)?;
        let file = OpenOptions::new().append(true).open(&path).map_err(failed)?;
        Ok(Metrics { path, file })
    }

    /// Adds a step: one write, so that a reader never sees half a line for long.
    pub fn step(&mut self, report: &StepReport) -> Result<(), Failure> {
        let line = serde_json::to_string(report).expect("reports have string keys") + "\n";
        // Where a run may go on from a step, its line has to be on the disk.
        let sync = || if report.checkpoint_s.is_some() { self.file.sync_data() } else { Ok(()) };
        (&self.file)
            .write_all(line.as_bytes())
            .and_then(|()| sync())
            .map_err(|error| Failure::Run(format!("cannot write {}: {error}", self.path.display())))
    }
}

impl<'a> Summary<'a> {
    /// The summary of a finished run.
    pub fn new(
        plan: &Plan,
        predicted: &'a Figures,
        outcome: &'a Outcome,
        floor: Option<f64>,
        start: &Start,
    ) -> Self {
        Summary {
            params: plan.parameter_count(),
            ranks: plan.mesh.ranks(),
            steps: outcome.steps,
            skipped: outcome.skipped,
            stopped: outcome.stopped,
            loss_first: outcome.loss_first,
            loss_last: outcome.loss_last,
            loss_floor: floor,
            validation_loss: outcome.validation_loss,
            resumed_after: Some(start.progress().step).filter(|&step| step > 0),
            checkpoints: Checkpoints {
                last: outcome.saves.last.as_ref().map(|saved| saved.path.as_path()),
                saved: outcome.saves.saved,
                failed: outcome.saves.failed,
                blocked_s: outcome.saves.blocked_s,
                write_s: outcome.saves.write_s,
            },
            predicted,
            measured: &outcome.measured,
        }
    }

    /// Writes it into the run's folder.
    pub fn write(&self, out: &Path) -> Result<(), Failure> {
        write_whole(&summary_path(out), &json(self))
    }
}

/// The whole lines of a file of metrics that tell of the first `steps` steps.
fn lines_up_to(path: &Path, steps: u64) -> std::io::Result<String> {
    if steps == 0 {
        return Ok(String::new());
    }
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(String::new()),
        text => text?,
    };
    let tells = |line: &&str| {
        let step =
            serde_json::from_str::<serde_json::Value>(line).ok().and_then(|line| line["step"].as_u64());
        step.is_some_and(|step| step <= steps)
    };
    Ok(text.lines().filter(tells).flat_map(|line| [line, "\n"]).collect())
}

fn summary_path(out: &Path) -> PathBuf {
    out.join("summary.json")
}
