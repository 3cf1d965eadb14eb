//! Predictions beside published measurements: `--validate` and `--reproduce`.

use std::path::Path;

use clap::ValueEnum;
use kintsugi_draw::chart::svg;
use kintsugi_spec::output::parent;
use kintsugi_validate::{
    COLUMNS, Figure, Report, Tables, ValidatedRun, frontier, own, scatter, three_level, validate, worst,
};

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
    /// Three levels of sharding on Frontier, arXiv 2501.04266, and ZeRO++'s own table
    ThreeLevel,
}

impl Study {
    /// Prints the page, in Markdown, or writes it with its pictures beside it.
    pub fn write(self, out: Option<&Path>, output: Output) -> Result<(), Failure> {
        let page = match self {
            Study::Frontier => frontier::page(),
            Study::ThreeLevel => three_level::page(),
        };
        let Some(out) = out else { return output.text(&page.text) };
        for (name, picture) in &page.pictures {
            write_whole(&parent(out).join(name), picture.as_bytes())?;
        }
        write_whole(out, page.text.as_bytes())?;
        let pictures = match page.pictures.len() {
            0 => String::new(),
            count => format!(", with {count} pictures"),
        };
        output.text(&format!("page     {}{pictures}\n", out.display()))
    }
}

/// What `--validate` takes.
pub struct Request<'a> {
    /// The folder of tables.
    pub folder: &'a Path,
    /// Overrides the configuration of every row.
    pub sets: &'a [String],
    /// Predicts every row under this framework.
    pub framework: Option<&'a str>,
    /// Where to draw predicted over measured.
    pub plot: Option<&'a Path>,
}

/// Predicts the runs of every table in the folder.
pub fn run(request: &Request, output: Output) -> Result<(), Failure> {
    let folder = request.folder;
    let mut tables = Tables::read(folder).map_err(|error| Failure::file("read", folder, error))?;
    if tables.runs.is_empty() && tables.own.is_empty() {
        let (folder, columns) = (folder.display(), COLUMNS.join(", "));
        return Err(Failure::mistake(format!(
            "{folder} has no table with a known header; the standard columns are {columns}"
        )));
    }
    if let Some(framework) = request.framework {
        tables.under(framework);
    }
    let progress = Progress::new("predicting", 0);
    progress.set(0, tables.runs.len() as u64, "runs");
    let mut reports = validate(&tables, request.sets);
    drop(progress);
    if request.framework.is_none() {
        reports.extend(own(&tables, request.sets));
    }
    for report in reports.iter().filter(|report| report.left_out > 0) {
        let Report { set, left_out, reason, .. } = report;
        let reason = reason.as_deref().unwrap_or_default();
        output.text(&format!("note: {left_out} rows of {set} are left out: {reason}\n"))?;
    }
    for path in &tables.unknown {
        output.text(&format!("note: {} is left out: its header is not known\n", path.display()))?;
    }
    if let Some(path) = request.plot {
        write_whole(path, svg(&scatter(&reports)).as_bytes())?;
    }
    output.result(&reports)?;
    if output.json {
        return Ok(());
    }
    output.text(&table(&reports).to_string())?;
    output.text(&format!(
        "\nThe worst rows, with the parts of their predicted steps:\n{}",
        worst_rows(&reports)
    ))?;
    request.plot.map_or(Ok(()), |path| output.text(&format!("\nplot     {}\n", path.display())))
}

/// Rows that are listed for a set.
const LISTED: usize = 2;

fn worst_rows(reports: &[Report]) -> Table {
    let mut table = Table::new([
        "run",
        "measured s",
        "predicted",
        "ratio",
        "kernels",
        "tensor",
        "exposed",
        "idle",
        "fixed",
    ]);
    for report in reports {
        table.row([report.set.clone()]);
        for run in worst(report, LISTED) {
            table.row(parts(run));
        }
    }
    table
}

fn parts(run: &ValidatedRun) -> Vec<String> {
    let measured = run.measured_s.unwrap_or(f64::NAN);
    let share = |seconds: f64| format!("{:.0} %", 100.0 * seconds / run.predicted_s);
    let mut cells = vec![
        run.name.clone(),
        format!("{measured:.4}"),
        format!("{:.4}", run.predicted_s),
        format!("{:.2}", run.predicted_s / measured),
    ];
    cells.extend(run.timing.map_or(vec![String::new(); 5], |timing| {
        let exposed = timing.exposed_s.iter().sum();
        [timing.compute_s, timing.tensor_s, exposed, timing.idle_s, timing.fixed_s].map(share).to_vec()
    }));
    cells
}

fn table(reports: &[Report]) -> Table {
    let mut table = Table::new(["set", "runs", "outliers", "figure", "ours", "aim", "met"]);
    for report in reports {
        for (i, figure) in report.figures.iter().enumerate() {
            let name = if i == 0 { report.set.clone() } else { String::new() };
            let runs = if i == 0 { report.rows.to_string() } else { String::new() };
            let outliers =
                if i == 0 && report.outliers > 0 { report.outliers.to_string() } else { String::new() };
            let [ours, aim, met] = cells(figure);
            table.row([name, runs, outliers, figure.name.clone(), ours, aim, met]);
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
