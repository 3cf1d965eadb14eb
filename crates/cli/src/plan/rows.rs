//! `kintsugi plan --scale` and `--sweep`: one strategy on several numbers of nodes, or with several values of one
//! setting.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kintsugi_draw::chart::{Chart, Line, svg};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Coverage, predict, time};
use kintsugi_spec::units;
use kintsugi_tune::{Outcome, efficiency, outcome};
use serde::Serialize;

use super::search::unknown_speed;
use crate::config::ConfigArguments;
use crate::describe;
use crate::failure::Failure;
use crate::files::{check_writable, write_whole};
use crate::fit;
use crate::host::planned_device;
use crate::output::Output;
use crate::table::{Fit, Table, left_out};

/// The arguments that select a table.
#[derive(Args)]
pub struct RowArguments {
    /// Shows how the strategy scales over --nodes: weak keeps the batch per replica, strong keeps the whole batch
    #[arg(long, value_enum, requires = "nodes", conflicts_with_all = ["draw", "trace", "sweep"])]
    scale: Option<Scaling>,
    /// The numbers of nodes
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', requires = "scale")]
    nodes: Vec<usize>,
    /// Compares several values of a setting, as in --sweep parallel.tp=1,2,4,8
    #[arg(long, value_name = "KEY=VALUE,…", conflicts_with_all = ["draw", "trace"])]
    sweep: Option<String>,
    /// Draws the table as a chart
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scaling {
    /// Keeps the batch per replica
    Weak,
    /// Keeps the whole batch
    Strong,
}

/// A row of either table.
#[derive(Serialize)]
struct Row {
    /// The nodes, or the value of the setting.
    at: String,
    #[serde(flatten)]
    outcome: Option<Outcome>,
    /// Tokens per second and rank, relative to the first row.
    efficiency: Option<f64>,
    /// Why there is no such plan.
    refused: Option<String>,
}

impl RowArguments {
    /// Whether a table was requested.
    pub fn wanted(&self) -> bool {
        self.scale.is_some() || self.sweep.is_some()
    }

    /// Refuses a chart without a table.
    pub fn check(&self) -> Result<(), Failure> {
        match &self.plot {
            Some(_) if !self.wanted() => Err(Failure::Mistake("--plot needs --scale or --sweep".to_owned())),
            _ => Ok(()),
        }
    }
}

/// Computes the table and prints it.
pub fn run(arguments: &RowArguments, config: &ConfigArguments, output: Output) -> Result<(), Failure> {
    let config = config.read()?;
    arguments.plot.as_deref().map(check_writable).transpose()?;
    let (rows, titles) = match (arguments.scale, &arguments.sweep) {
        (Some(scaling), _) => scale(&config, scaling, &arguments.nodes)?,
        (None, Some(text)) => sweep(&config, text)?,
        (None, None) => unreachable!("a table was asked for"),
    };
    output.result(&rows)?;
    if !output.json {
        output.text(&text(&rows, &titles))?;
    }
    if let Some(path) = &arguments.plot {
        write_whole(path, svg(&chart(&rows, titles)).as_bytes())?;
        output.text(&format!("plot     {}\n", path.display()))?;
    }
    Ok(())
}

/// Titles of a table and its chart.
struct Titles {
    heading: String,
    title: String,
    /// The first column.
    at: String,
    /// Below the chart.
    along: String,
    scaling: bool,
}

fn scale(config: &ConfigSource, scaling: Scaling, nodes: &[usize]) -> Result<(Vec<Row>, Titles), Failure> {
    let base = config.plan()?;
    let replica = base.mesh.tp * base.mesh.pp;
    let mut rows: Vec<Row> = Vec::new();
    for &count in nodes {
        let ranks = count * base.cluster.topology.per_node.unwrap_or(1);
        let global = match scaling {
            Scaling::Weak => base.batch.global / base.mesh.dp * (ranks / replica).max(1),
            Scaling::Strong => base.batch.global,
        };
        let over = [
            format!("cluster.nodes={count}"),
            "parallel.dp=auto".to_owned(),
            format!("batch.global={global}"),
        ];
        let at = count.to_string();
        match config.clone().sets(over).plan() {
            Ok(plan) => {
                let outcome = evaluate(&plan)?;
                let first = rows.iter().find_map(|row| row.outcome.as_ref()).unwrap_or(&outcome);
                let efficiency = Some(efficiency(first, &outcome));
                rows.push(Row { at, outcome: Some(outcome), efficiency, refused: None });
            }
            Err(error) => {
                rows.push(Row { at, outcome: None, efficiency: None, refused: Some(error.to_string()) });
            }
        }
    }
    check_any(&rows)?;
    let word = if scaling == Scaling::Weak { "weak" } else { "strong" };
    let kept = if scaling == Scaling::Weak { "each replica's batch" } else { "the whole batch" };
    let titles = Titles {
        heading: format!(
            "{}{}scaling  {word}: {kept} stays constant\n\n",
            describe::model(&base),
            describe::layout(&base)
        ),
        title: format!("{} on {}: {word} scaling", base.model.name, base.cluster.name),
        at: "nodes".to_owned(),
        along: match base.cluster.topology.per_node {
            Some(ranks) => format!("nodes of {ranks} ranks"),
            None => "nodes".to_owned(),
        },
        scaling: true,
    };
    Ok((rows, titles))
}

fn sweep(config: &ConfigSource, text: &str) -> Result<(Vec<Row>, Titles), Failure> {
    let mistake = || Failure::Mistake(format!("--sweep: \"{text}\" must be table.key=value,value"));
    let (key, values) = text.split_once('=').ok_or_else(mistake)?;
    let values: Vec<&str> = values.split(',').map(str::trim).collect();
    if key.trim().is_empty() || values.iter().any(|value| value.is_empty()) {
        return Err(mistake());
    }
    let mut rows = Vec::new();
    let mut described = None;
    for value in values {
        let (outcome, refused) = match config.clone().set(format!("{}={value}", key.trim())).plan() {
            Ok(plan) => {
                let outcome = evaluate(&plan)?;
                described.get_or_insert(plan);
                (Some(outcome), None)
            }
            Err(error) => (None, Some(error.to_string())),
        };
        rows.push(Row { at: value.to_owned(), outcome, efficiency: None, refused });
    }
    check_any(&rows)?;
    let base = described.expect("a row that is not refused has a plan");
    let titles = Titles {
        heading: format!("{}sweep    {}\n\n", describe::model(&base), key.trim()),
        title: format!("{} on {}: {}", base.model.name, base.cluster.name, key.trim()),
        at: key.trim().to_owned(),
        along: key.trim().to_owned(),
        scaling: false,
    };
    Ok((rows, titles))
}

/// If every row is refused, the table is an error; the last row's error is reported.
fn check_any(rows: &[Row]) -> Result<(), Failure> {
    match rows.last() {
        Some(Row { refused: Some(reason), .. }) if rows.iter().all(|row| row.refused.is_some()) => {
            Err(Failure::Mistake(reason.clone()))
        }
        _ => Ok(()),
    }
}

fn evaluate(plan: &Plan) -> Result<Outcome, Failure> {
    let timing = time(plan).ok_or_else(unknown_speed)?;
    let prediction = predict(plan, planned_device(plan, plan.mesh.ranks()), Coverage::quick(plan));
    let reserved = prediction.stages.iter().map(|stage| stage.reserved).max().unwrap_or(0);
    Ok(outcome(plan, &timing, reserved, fit::known(plan, &prediction)))
}

fn text(rows: &[Row], titles: &Titles) -> String {
    let mut header = vec![
        titles.at.as_str(),
        "ranks",
        "batch",
        "step",
        "tokens/s/rank",
        "TFLOP/s",
        "MFU",
        "bubble",
        "memory",
        "fits",
    ];
    header.extend(titles.scaling.then_some("efficiency"));
    let mut table = Table::new(header);
    for row in rows {
        match &row.outcome {
            Some(outcome) => table.row(cells(row, outcome)),
            None => table.row([format!("{}  {}", row.at, row.refused.as_deref().unwrap_or_default())]),
        }
    }
    let dropped = table.fit_terminal(FIT);
    format!("{}{table}{}\n", titles.heading, left_out(dropped))
}

/// The columns that a narrow terminal does not show.
const FIT: Fit = Fit {
    least: &["TFLOP/s", "bubble", "batch", "ranks", "memory", "tokens/s/rank", "MFU"],
    sentences: None,
};

fn cells(row: &Row, outcome: &Outcome) -> Vec<String> {
    let mut cells = vec![
        row.at.clone(),
        outcome.ranks.to_string(),
        outcome.global_batch.to_string(),
        format!("{:.3} s", outcome.step_s),
        format!("{:.0}", outcome.tokens_per_s_per_gpu),
        format!("{:.1}", outcome.model_tflops_per_gpu),
        outcome.mfu.map_or("–".to_owned(), |mfu| format!("{:.1} %", 100.0 * mfu)),
        format!("{:.1} %", 100.0 * outcome.bubble),
        units::bytes(outcome.reserved),
        outcome.fits.map_or("–", |fits| if fits { "yes" } else { "no" }).to_owned(),
    ];
    cells.extend(row.efficiency.map(|share| format!("{:.1} %", 100.0 * share)));
    cells
}

/// Model FLOP/s per rank over the rows. Rows that do not fit are left out, and their tick is marked.
fn chart(rows: &[Row], titles: Titles) -> Chart {
    let tera = |row: &Row| {
        let fitting = row.outcome.as_ref().filter(|outcome| outcome.fits != Some(false))?;
        Some(fitting.model_tflops_per_gpu)
    };
    let best = rows.iter().filter_map(tera).fold(0.0, f64::max);
    let (unit, factor) = if best < 1.0 { ("GFLOP/s", 1e3) } else { ("TFLOP/s", 1.0) };
    let values: Vec<Option<f64>> = rows.iter().map(|row| tera(row).map(|value| factor * value)).collect();
    let missing = values.iter().any(Option::is_none);
    let ideal = values.iter().flatten().next().copied();
    let mut lines = vec![Line { name: format!("model {unit} per rank"), values, guide: false }];
    if titles.scaling {
        lines.push(Line { name: "ideal".to_owned(), values: vec![ideal; rows.len()], guide: true });
    }
    let tick = |row: &Row| if tera(row).is_some() { row.at.clone() } else { format!("{} ×", row.at) };
    Chart {
        ticks: rows.iter().map(tick).collect(),
        title: titles.title,
        x_label: titles.along + if missing { ";  × does not fit or is refused" } else { "" },
        y_label: unit.to_owned(),
        lines,
    }
}
