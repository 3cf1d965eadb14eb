//! `kintsugi calibrate --fit`: the constants of presets from measured runs.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use clap::Args;
use kintsugi_validate::{FittedConstant, LeftOut, Tables, fit, leave_each_out, stages};

use crate::failure::Failure;
use crate::output::Output;
use crate::progress::Progress;
use crate::table::Table;

/// The arguments of a fit.
#[derive(Args)]
pub struct Fitting {
    /// Fits the constants of clusters and frameworks to the measured runs in the tables (CSV) of this folder
    ///
    /// The constants are printed, and nothing is measured.
    #[arg(long, value_name = "FOLDER")]
    pub fit: Option<PathBuf>,
    /// With --fit: leaves out all runs of this source
    #[arg(long, value_name = "SOURCE", requires = "fit")]
    leave_out: Option<String>,
    /// With --fit: leaves out each source in turn, and predicts it by the constants of the others
    #[arg(long, requires = "fit", conflicts_with = "leave_out")]
    leave_each_out: bool,
}

impl Fitting {
    /// Runs the fit.
    pub fn run(&self, folder: &Path, output: Output) -> Result<(), Failure> {
        let tables = Tables::read(folder).map_err(|error| Failure::file("read", folder, error))?;
        if let Some(source) = self.leave_out.as_deref().filter(|source| !tables.has_source(source)) {
            let sources = tables.sources().join(", ");
            return Err(Failure::mistake(format!(
                "--leave-out {source} is not a source of these tables; the sources are {sources}"
            )));
        }
        let progress = Progress::new("fitting", 0);
        let fits = if self.leave_each_out { 1 + tables.step_sources().len() } else { 1 };
        let done = Cell::new(0);
        let mut on_stage = |stage: &str| {
            progress.set(done.get(), (fits * stages()) as u64, stage);
            done.set(done.get() + 1);
        };
        if self.leave_each_out {
            let sources = leave_each_out(&tables.runs, &mut on_stage);
            drop(progress);
            output.result(&sources)?;
            return if output.json { Ok(()) } else { output.text(&table_of_sources(&sources)) };
        }
        let fit = fit(&tables.runs, self.leave_out.as_deref(), &mut on_stage);
        drop(progress);
        output.result(&fit.fitted)?;
        if output.json { Ok(()) } else { output.text(&table_of_constants(&fit.fitted).to_string()) }
    }
}

fn table_of_constants(fitted: &[FittedConstant]) -> Table {
    let mut table = Table::new(["constant", "value", "error %", "fitted on"]);
    for constant in fitted {
        let more = constant.keys.len() - 1;
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let [value, error] = [format!("{:.3e}", constant.value), format!("{:.1}", constant.error)];
        let on = constant.sets.join(", ");
        table.row([format!("{}{more}", constant.keys[0]), value, error, on]);
    }
    table
}

fn table_of_sources(sources: &[LeftOut]) -> String {
    let mut table = Table::new([
        "source",
        "runs",
        "error % seen",
        "left out",
        "predicted / measured",
        "in range %",
        "width",
        "frameworks of no other source",
    ]);
    for source in sources {
        table.row([
            source.source.clone(),
            source.rows.to_string(),
            format!("{:.1}", source.seen),
            format!("{:.1}", source.unseen),
            format!("{:.2}", source.bias),
            format!("{:.0}", source.inside),
            format!("{:.2}", source.width),
            source.unknown.join(", "),
        ]);
    }
    let mean = |of: fn(&LeftOut) -> f64| sources.iter().map(of).sum::<f64>() / sources.len().max(1) as f64;
    let (seen, unseen) = (mean(|source| source.seen), mean(|source| source.unseen));
    let inside = format!("{:.0}", mean(|source| source.inside));
    let width = format!("{:.2}", mean(|source| source.width));
    table.row([
        "mean over sources",
        "",
        &format!("{seen:.1}"),
        &format!("{unseen:.1}"),
        "",
        &inside,
        &width,
        "",
    ]);
    table.to_string()
}
