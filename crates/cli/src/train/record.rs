//! The files of a run: its configuration, a line of metrics per step as it goes, and a summary at the end.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use kintsugi_engine::{Outcome, StepReport};
use kintsugi_plan::Plan;
use kintsugi_rank::Figures;
use serde::Serialize;

use crate::failure::Failure;
use crate::files::write_whole;
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
    predicted: &'a Figures,
    measured: &'a Figures,
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
    /// Starts a run's metrics in its folder. An older run's summary goes: it does not belong to them.
    pub fn create(out: &Path) -> Result<Self, Failure> {
        let summary = summary_path(out);
        match fs::remove_file(&summary) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Failure::file("replace", &summary, &error));
            }
            _ => {}
        }
        let path = out.join("metrics.jsonl");
        let file = File::create(&path).map_err(|error| Failure::file("create", &path, &error))?;
        Ok(Metrics { path, file })
    }

    /// Adds a step: one write, so that a reader never sees half a line for long.
    pub fn step(&mut self, report: &StepReport) -> Result<(), Failure> {
        let line = serde_json::to_string(report).expect("reports have string keys") + "\n";
        self.file
            .write_all(line.as_bytes())
            .map_err(|error| Failure::Run(format!("cannot write {}: {error}", self.path.display())))
    }
}

impl<'a> Summary<'a> {
    /// The summary of a finished run.
    pub fn new(plan: &Plan, predicted: &'a Figures, outcome: &'a Outcome, floor: Option<f64>) -> Self {
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
            predicted,
            measured: &outcome.measured,
        }
    }

    /// Writes it into the run's folder.
    pub fn write(&self, out: &Path) -> Result<(), Failure> {
        write_whole(&summary_path(out), &json(self))
    }
}

fn summary_path(out: &Path) -> PathBuf {
    out.join("summary.json")
}
