//! The files of a run: its folder, its configuration, and a summary at the end.

use std::fs;
use std::path::{Path, PathBuf};

use kintsugi_engine::{Start, TrainOutcome};
use kintsugi_plan::Plan;
use kintsugi_rank::StepMetrics;
use kintsugi_spec::output::{parent, sync_folder};
use serde::Serialize;

use crate::failure::Failure;
use crate::files::write_whole;
use crate::output::json;

/// The contents of `summary.json`.
#[derive(Serialize)]
pub struct Summary<'a> {
    params: u64,
    ranks: usize,
    steps: u64,
    skipped: u64,
    stopped: bool,
    failure: Option<String>,
    loss_first: f64,
    loss_last: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_floor: Option<f64>,
    validation_loss: Option<f64>,
    resumed_after: Option<u64>,
    checkpoints: Checkpoints<'a>,
    predicted: &'a StepMetrics,
    measured: &'a StepMetrics,
}

/// The results of saving.
#[derive(Serialize)]
struct Checkpoints<'a> {
    last: Option<&'a Path>,
    saved: u64,
    failed: u64,
    blocked_s: f64,
    write_s: f64,
}

/// Creates the run's folder, and syncs its name to the disk.
pub fn create_folder(out: &Path) -> Result<(), Failure> {
    if out.is_dir() {
        return Ok(());
    }
    let created = fs::create_dir_all(out).and_then(|()| sync_folder(parent(out)));
    created.map_err(|error| Failure::file("create", out, &error))
}

/// The path of the run's configuration file, which repeats it.
pub fn config_path(out: &Path) -> PathBuf {
    out.join("config.toml")
}

/// The path of a run's summary.
pub fn summary_path(out: &Path) -> PathBuf {
    out.join("summary.json")
}

impl<'a> Summary<'a> {
    /// The summary of a finished run.
    pub fn new(
        plan: &Plan,
        predicted: &'a StepMetrics,
        outcome: &'a TrainOutcome,
        floor: Option<f64>,
        start: &Start,
    ) -> Self {
        Summary {
            params: plan.parameter_count(),
            ranks: plan.mesh.ranks(),
            steps: outcome.steps,
            skipped: outcome.skipped,
            stopped: outcome.stopped,
            failure: outcome.failure.as_ref().map(ToString::to_string),
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
        write_whole(&summary_path(out), json(self).as_bytes())
    }
}
