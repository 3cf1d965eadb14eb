//! Compares predictions with measurements, published and our own: one set of runs for each table, with the errors.
//!
//! A row of a table becomes a configuration: the model's shape, the layout, the cluster that it ran on, and the profile
//! of its framework. No constant belongs to a single row.

mod constants;
mod description;
mod fit;
pub mod frontier;
mod groups;
mod outliers;
mod own;
mod page;
mod plot;
mod report;
mod run;
mod score;
mod table;
mod template;
pub mod three_level;
mod validated;

pub use constants::{Constant, Constants};
pub use description::Kind;
pub use fit::{Fit, FittedConstant, LeftOut, fit, leave_each_out, stages};
pub use groups::{Layout, LayoutGroup, layout_groups};
pub use own::OwnTable;
pub use page::Page;
pub use plot::{scatter, worst};
pub use report::reports;
pub use run::{COLUMNS, Run};
pub use score::{Figure, Report, errors};
pub use validated::{PredictionError, PredictionScope, UnsupportedRuns, ValidatedRun, predict_runs};

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use kintsugi_plan::Plan;
use kintsugi_simulate::planned_device;
use kintsugi_tensor::Device;

/// The tables of a folder.
#[derive(Debug, Default)]
pub struct Tables {
    /// The runs of all tables.
    pub runs: Vec<Run>,
    /// Tables of our own machines, which are predicted from the profiles of these.
    pub own: Vec<OwnTable>,
    /// Files with a header that is not known.
    pub unknown: Vec<PathBuf>,
}

impl Tables {
    /// Reads every CSV file of a folder, in the order of their names.
    pub fn read(folder: &Path) -> io::Result<Self> {
        let mut paths: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            paths.push(entry?.path());
        }
        paths.retain(|path| path.extension().is_some_and(|ending| ending == "csv"));
        paths.sort();
        let mut tables = Tables::default();
        for path in paths {
            let rows = table::read(&path)?;
            if let Some(table) = OwnTable::of(&path, &rows) {
                tables.own.push(table);
                continue;
            }
            let header = rows.first().map(table::Row::columns).unwrap_or_default();
            let descriptions = description::of(&header);
            if descriptions.is_empty() {
                tables.unknown.push(path);
                continue;
            }
            for description in descriptions {
                let read = rows.iter().enumerate();
                tables.runs.extend(read.filter_map(|(i, row)| Run::new(description, row, i + 1)));
            }
        }
        outliers::flag_outliers(&mut tables.runs);
        Ok(tables)
    }

    /// The origins of the runs.
    pub fn sources(&self) -> Vec<String> {
        let sources: BTreeSet<&str> = self.runs.iter().map(|run| run.source.as_str()).collect();
        sources.into_iter().map(str::to_owned).collect()
    }

    /// The origins of runs that are steps of a training.
    pub fn step_sources(&self) -> BTreeSet<&str> {
        let steps = self.runs.iter().filter(|run| run.kind == Kind::Step);
        steps.map(|run| run.source.as_str()).collect()
    }

    /// Whether runs come from an origin.
    pub fn has_source(&self, source: &str) -> bool {
        self.runs.iter().any(|run| run.source == source)
    }

    /// Predicts every run under this framework instead of its own.
    pub fn under(&mut self, framework: &str) {
        for run in self.runs.iter_mut().filter(|run| run.kind == Kind::Step) {
            run.settings.push(format!("framework.preset={framework}"));
        }
    }
}

/// Predicts the runs of every table in a folder. `over` overrides the configuration of every row.
pub fn validate(tables: &Tables, over: &[String]) -> Vec<Report> {
    let (runs, refused) = predict_runs(&tables.runs, &Constants::default(), over, PredictionScope::All);
    reports(runs, &refused)
}

/// Our own runs. Their tables are in the binary, unless the folder has a newer one.
pub fn own(tables: &Tables, sets: &[String]) -> Vec<Report> {
    own::reports(&tables.own, sets)
}

/// The device of a row's plan, which its cluster describes.
fn device(plan: &Plan) -> Device {
    planned_device(plan, plan.mesh.ranks(), 1)
}
