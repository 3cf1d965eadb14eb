//! Compares predictions with published measurements and our own: one set of runs for each source, with the errors.
//!
//! A row of a table becomes a configuration: the model's shape, the layout, the cluster that it ran on, and the profile
//! of its framework. No constant belongs to a single row.

pub mod frontier;
mod nanotron;
mod own;
mod score;
mod sets;
mod table;

pub use score::{Figure, MeasuredRun, Report};

use std::io;
use std::path::Path;

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{planned_device, time};
use kintsugi_tensor::Device;

use table::Row;

/// A measured run, as a plan.
struct Case {
    name: String,
    plan: Plan,
    /// Seconds per step.
    measured: f64,
    /// Peak bytes, if they were measured.
    memory: Option<f64>,
}

/// Reports on every set whose table is in `folder`. Of nanotron's table, which has thousands of rows, only every `every`-th
/// row is used. `sets` override the configuration of every row, to fit constants. `progress` is told how many of how many
/// tables are done.
pub fn validate(
    folder: &Path,
    sets: &[String],
    every: usize,
    progress: &dyn Fn(usize, usize),
) -> io::Result<Vec<Report>> {
    let mut reports = Vec::new();
    let found: Vec<_> = sets::SETS.iter().filter(|set| folder.join(set.file).exists()).collect();
    let path = folder.join(nanotron::FILE);
    let all = found.len() + usize::from(path.exists()) + 1;
    for (done, set) in found.into_iter().enumerate() {
        progress(done, all);
        reports.push(set.report(&table::read(&folder.join(set.file))?, sets));
    }
    if path.exists() {
        progress(all - 2, all);
        let rows: Vec<Row> = table::read(&path)?.into_iter().step_by(every).collect();
        reports.extend(nanotron::reports(&rows, sets));
    }
    if !reports.is_empty() {
        progress(all - 1, all);
        reports.extend(own(sets));
    }
    Ok(reports)
}

/// The names of the known tables.
pub fn tables() -> Vec<&'static str> {
    let mut names: Vec<&str> = sets::SETS.iter().map(|set| set.file).chain([nanotron::FILE]).collect();
    names.dedup();
    names
}

/// Our own runs, whose tables are in the binary.
pub fn own(sets: &[String]) -> Vec<Report> {
    own::reports(sets)
}

/// The plan of a row's configuration; `None` if the engine does not support it.
fn plan(lines: &[String], over: &[String]) -> Option<Plan> {
    ConfigSource::text("").sets(lines).sets(over).plan().ok()
}

/// The device of a row's plan, which its cluster describes.
fn device(plan: &Plan) -> Device {
    planned_device(plan, plan.mesh.ranks(), 1)
}

/// Predicted seconds per step.
fn predicted(plan: &Plan) -> f64 {
    time(plan).map_or(f64::NAN, |timing| timing.step_s)
}

/// The shape of a GPT as a configuration.
fn gpt(row: &Row, vocab: usize) -> Vec<String> {
    let count = |column| row.count(column);
    vec![
        "model.family=gpt".to_owned(),
        format!("model.layers={}", count("layers")),
        format!("model.hidden={}", count("hidden")),
        format!("model.heads={}", count("heads")),
        format!("model.vocab={vocab}"),
        format!("batch.sequence={}", count("seq_len")),
    ]
}
