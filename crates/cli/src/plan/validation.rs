//! Predictions beside published measurements: `--validate` and `--reproduce`.

use std::path::Path;

use clap::ValueEnum;
use kintsugi_spec::output::parent;
use kintsugi_validate::{Figure, Report, frontier, tables, validate};

use crate::failure::Failure;
use crate::files::write_whole;
use crate::output::Output;
use crate::progress::Progress;
use crate::table::Table;

/// The studies that can be compared with our predictions.
#[derive(Clone, Copy, ValueEnum)]
pub enum Study {
    /// Training up to 1T parameters on Frontier, arXiv 2312.12705
    Frontier,
}

impl Study {
    /// Prints the page, in Markdown, or writes it with its pictures beside it.
    pub fn write(self, out: Option<&Path>, output: Output) -> Result<(), Failure> {
        let page = match self {
            Study::Frontier => frontier::page(),
        };
        let Some(out) = out else { return output.text(&page.text) };
        for (name, picture) in &page.pictures {
            write_whole(&parent(out).join(name), picture.as_bytes())?;
        }
        write_whole(out, page.text.as_bytes())?;
        output.text(&format!("page     {}, with {} pictures\n", out.display(), page.pictures.len()))
    }
}

/// Predicts the runs of every table in the folder.
pub fn run(folder: &Path, output: Output) -> Result<(), Failure> {
    let progress = Progress::new("predicting", 0);
    let reports = validate(folder, &[], 1, &|done, all| progress.set(done as u64, all as u64, "tables"));
    drop(progress);
    let reports = reports.map_err(|error| Failure::file("read", folder, &error))?;
    if reports.is_empty() {
        let (folder, known) = (folder.display(), tables().join(", "));
        return Err(Failure::Mistake(format!("{folder} has none of the known tables: {known}")));
    }
    output.result(&reports)?;
    if output.json { Ok(()) } else { output.text(&table(&reports).to_string()) }
}

fn table(reports: &[Report]) -> Table {
    let mut table = Table::new(["set", "runs", "figure", "ours", "aim", "met"]);
    for report in reports {
        for (i, figure) in report.figures.iter().enumerate() {
            let name = if i == 0 { report.set.clone() } else { String::new() };
            let runs = if i == 0 { report.rows.to_string() } else { String::new() };
            let [ours, aim, met] = cells(figure);
            table.row([name, runs, figure.name.clone(), ours, aim, met]);
        }
    }
    table
}

fn cells(figure: &Figure) -> [String; 3] {
    let sign = if figure.at_least { "≥" } else { "≤" };
    match figure.aim {
        None => [format!("{:.2}", figure.value), String::new(), String::new()],
        Some(aim) => {
            let met = if figure.met() { "yes" } else { "no" };
            [format!("{:.2}", figure.value), format!("{sign} {aim}"), met.to_owned()]
        }
    }
}
