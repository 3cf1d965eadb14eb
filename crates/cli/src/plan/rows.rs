//! `kintsugi plan --scale` and `--sweep`: one strategy on several numbers of nodes, or with several values of one
//! setting.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kintsugi_draw::chart::svg;
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_report::sweep::{Figure, Point, chart};
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
use crate::progress::Progress;
use crate::table::{Fit, Table, left_out};

/// The arguments that select a table.
#[derive(Args)]
pub struct RowArguments {
    /// Shows how the strategy scales over --nodes
    #[arg(long, value_enum, requires = "nodes", conflicts_with_all = ["draw", "trace", "sweep"])]
    scale: Option<Scaling>,
    /// The numbers of nodes
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', requires = "scale")]
    nodes: Vec<usize>,
    /// Compares several values of a setting, as in --sweep parallel.tp=1,2,4,8
    ///
    /// A second --sweep makes a curve for each of its values.
    #[arg(long, value_name = "KEY=VALUE,…", conflicts_with_all = ["draw", "trace"])]
    sweep: Vec<String>,
    /// Draws the memory of the plan's stages
    ///
    /// With --scale or --sweep their table, with --search its strategies, with --validate its runs.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "reproduce")]
    pub plot: Option<PathBuf>,
    /// What --plot draws; by default FLOP/s of a table, and memory of a plan or a search
    #[arg(long = "plot-figure", value_enum, value_name = "FIGURE", requires = "plot")]
    pub figure: Option<PlotFigure>,
}

/// What a picture shows.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PlotFigure {
    /// Model FLOP/s of a rank
    Flops,
    /// Time of a step
    Step,
    /// Memory of the fullest rank
    Memory,
    /// Energy of a step
    Energy,
    /// Speed of a rank as a share of the first's
    Efficiency,
    /// Tokens per second of a rank
    Tokens,
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
    /// The nodes, or the value of the first setting.
    at: String,
    /// The values of the other settings.
    #[serde(skip_serializing_if = "String::is_empty")]
    series: String,
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
        self.scale.is_some() || !self.sweep.is_empty()
    }
}

/// Computes the table and prints it.
pub fn run(arguments: &RowArguments, config: &ConfigArguments, output: Output) -> Result<(), Failure> {
    let config = config.read()?;
    arguments.plot.as_deref().map(check_writable).transpose()?;
    let (rows, titles) = match arguments.scale {
        Some(scaling) => scale(&config, scaling, &arguments.nodes)?,
        None => sweep(&config, &arguments.sweep)?,
    };
    output.result(&rows)?;
    if !output.json {
        output.text(&text(&rows, &titles))?;
    }
    if let Some(path) = &arguments.plot {
        let figure = figure(arguments.figure.unwrap_or(PlotFigure::Flops));
        if figure == Figure::Energy
            && rows.iter().flat_map(|row| &row.outcome).all(|row| row.energy_j_per_step.is_none())
        {
            let text =
                "--plot-figure energy needs cluster.device.power_idle and power_max, and the device has none";
            return Err(Failure::mistake(text));
        }
        let points: Vec<Point> = rows.iter().map(Row::point).collect();
        let chart = chart(&titles.title, &titles.along, &titles.caption, &points, figure, titles.scaling);
        write_whole(path, svg(&chart).as_bytes())?;
        output.text(&format!("plot     {}\n", path.display()))?;
    }
    Ok(())
}

fn figure(named: PlotFigure) -> Figure {
    match named {
        PlotFigure::Flops => Figure::Flops,
        PlotFigure::Step => Figure::Step,
        PlotFigure::Memory => Figure::Memory,
        PlotFigure::Energy => Figure::Energy,
        PlotFigure::Efficiency => Figure::Efficiency,
        PlotFigure::Tokens => Figure::Tokens,
    }
}

impl Row {
    fn point(&self) -> Point<'_> {
        Point {
            at: &self.at,
            series: &self.series,
            outcome: self.outcome.as_ref(),
            efficiency: self.efficiency,
        }
    }
}

/// Titles of a table and its chart.
struct Titles {
    heading: String,
    title: String,
    /// The first column.
    at: String,
    /// Below the chart.
    along: String,
    /// What the picture is of.
    caption: String,
    /// Names of the other settings, if there are any.
    others: String,
    scaling: bool,
}

fn scale(config: &ConfigSource, scaling: Scaling, nodes: &[usize]) -> Result<(Vec<Row>, Titles), Failure> {
    let base = config.plan()?;
    let replica = base.mesh.tp() * base.mesh.pp();
    let mut rows: Vec<Row> = Vec::new();
    let progress = Progress::new("planning", nodes.len() as u64);
    for &count in nodes {
        let ranks = count * base.cluster.topology.per_node.unwrap_or(1);
        let global = match scaling {
            Scaling::Weak => base.batch.global / base.mesh.dp() * (ranks / replica).max(1),
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
                rows.push(Row {
                    at,
                    series: String::new(),
                    outcome: Some(outcome),
                    efficiency,
                    refused: None,
                });
            }
            Err(error) => {
                let refused = Some(error.to_string());
                rows.push(Row { at, series: String::new(), outcome: None, efficiency: None, refused });
            }
        }
        progress.add(1);
    }
    drop(progress);
    check_any(&rows)?;
    let word = if scaling == Scaling::Weak { "weak" } else { "strong" };
    let kept = if scaling == Scaling::Weak { "each replica's batch" } else { "the whole batch" };
    let titles = Titles {
        heading: format!(
            "{}scaling  {word}: {kept} stays constant\n\n",
            describe::lines(&describe::plan(&base))
        ),
        title: format!("{} on {}: {word} scaling", base.model.name, base.cluster.name),
        at: "nodes".to_owned(),
        along: match base.cluster.topology.per_node {
            Some(ranks) => format!("nodes of {ranks} ranks"),
            None => "nodes".to_owned(),
        },
        caption: kintsugi_report::plan::layout(&base),
        others: String::new(),
        scaling: true,
    };
    Ok((rows, titles))
}

/// A key and the values that it takes.
struct Sweep<'a> {
    key: &'a str,
    values: Vec<&'a str>,
}

impl<'a> Sweep<'a> {
    fn parse(text: &'a str) -> Result<Self, Failure> {
        let mistake = || Failure::mistake(format!("--sweep: \"{text}\" must be table.key=value,value"));
        let (key, values) = text.split_once('=').ok_or_else(mistake)?;
        let values: Vec<&str> = values.split(',').map(str::trim).collect();
        if key.trim().is_empty() || values.iter().any(|value| value.is_empty()) {
            return Err(mistake());
        }
        Ok(Sweep { key: key.trim(), values })
    }
}

/// All combinations of values of some settings, as settings.
fn combinations(sweeps: &[Sweep]) -> Vec<Vec<String>> {
    sweeps.iter().fold(vec![Vec::new()], |before, sweep| {
        let with = |sets: &Vec<String>, value: &&str| {
            [sets.clone(), vec![format!("{}={value}", sweep.key)]].concat()
        };
        before.iter().flat_map(|sets| sweep.values.iter().map(move |value| with(sets, value))).collect()
    })
}

/// Plans of one table. More take minutes, and no picture shows them.
const MAX_ROWS: usize = 1000;

fn sweep(config: &ConfigSource, texts: &[String]) -> Result<(Vec<Row>, Titles), Failure> {
    let sweeps: Vec<Sweep> = texts.iter().map(|text| Sweep::parse(text)).collect::<Result<_, _>>()?;
    let (first, others) = sweeps.split_first().expect("a sweep was asked for");
    let count = sweeps.iter().map(|sweep| sweep.values.len()).product::<usize>();
    if count > MAX_ROWS {
        return Err(Failure::mistake(format!(
            "--sweep: {count} combinations are more than the {MAX_ROWS} of one table"
        )));
    }
    let progress = Progress::new("planning", count as u64);
    let mut rows: Vec<Row> = Vec::new();
    let mut described = None;
    for sets in combinations(others) {
        let mut before: Option<Outcome> = None;
        for value in &first.values {
            let set = format!("{}={value}", first.key);
            let (outcome, refused) = match config.clone().sets(&sets).set(set).plan() {
                Ok(plan) => {
                    let outcome = evaluate(&plan)?;
                    described.get_or_insert(plan);
                    (Some(outcome), None)
                }
                Err(error) => (None, Some(error.to_string())),
            };
            let efficiency =
                outcome.as_ref().map(|row| efficiency(before.get_or_insert_with(|| row.clone()), row));
            let (at, series) = ((*value).to_owned(), sets.join(", "));
            rows.push(Row { at, series, outcome, efficiency, refused });
            progress.add(1);
        }
    }
    drop(progress);
    check_any(&rows)?;
    let base = described.expect("a row that is not refused has a plan");
    let keys: Vec<&str> = sweeps.iter().map(|sweep| sweep.key).collect();
    let titles = Titles {
        heading: format!("{}sweep    {}\n\n", describe::lines(&[describe::model(&base)]), keys.join(", ")),
        title: format!("{} on {}: {}", base.model.name, base.cluster.name, keys.join(", ")),
        at: first.key.to_owned(),
        along: first.key.to_owned(),
        caption: format!("first point: {}", kintsugi_report::plan::layout(&base)),
        others: others.iter().map(|sweep| sweep.key).collect::<Vec<_>>().join(", "),
        scaling: false,
    };
    Ok((rows, titles))
}

/// If every row is refused, the table is an error; the last row's error is reported.
fn check_any(rows: &[Row]) -> Result<(), Failure> {
    match rows.last() {
        Some(Row { refused: Some(reason), .. }) if rows.iter().all(|row| row.refused.is_some()) => {
            Err(Failure::mistake(reason.as_str()))
        }
        _ => Ok(()),
    }
}

fn evaluate(plan: &Plan) -> Result<Outcome, Failure> {
    let timing = time(plan).ok_or_else(unknown_speed)?;
    let device = planned_device(plan, plan.mesh.ranks());
    let prediction = predict(plan, device, Coverage::quick(plan)).under_framework(plan);
    let reserved = prediction.stages.iter().map(|stage| stage.reserved).max().unwrap_or(0);
    Ok(outcome(plan, &timing, reserved, fit::known(plan, &prediction)))
}

fn text(rows: &[Row], titles: &Titles) -> String {
    let mut header = vec![titles.at.as_str()];
    header.extend(Some(titles.others.as_str()).filter(|others| !others.is_empty()));
    header.extend(["ranks", "batch", "step", "tokens/s/rank", "TFLOP/s", "MFU", "bubble", "memory", "fits"]);
    header.extend(titles.scaling.then_some("efficiency"));
    let mut table = Table::new(header);
    for row in rows {
        if let Some(outcome) = &row.outcome {
            table.row(cells(row, outcome, titles));
        } else {
            let (at, refused) = (&row.at, row.refused.as_deref().unwrap_or_default());
            let at = if row.series.is_empty() { at.clone() } else { format!("{at}  {}", row.series) };
            table.row([format!("{at}  {refused}")]);
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

fn cells(row: &Row, outcome: &Outcome, titles: &Titles) -> Vec<String> {
    let mut cells = vec![row.at.clone()];
    if !titles.others.is_empty() {
        // The header has the keys.
        let values: Vec<&str> =
            row.series.split(", ").filter_map(|set| Some(set.split_once('=')?.1)).collect();
        cells.push(values.join(", "));
    }
    cells.extend([
        outcome.ranks.to_string(),
        outcome.global_batch.to_string(),
        units::seconds(outcome.step_s),
        format!("{:.0}", outcome.tokens_per_s_per_gpu),
        format!("{:.1}", outcome.model_tflops_per_gpu),
        outcome.mfu.map_or("–".to_owned(), |mfu| format!("{:.1} %", 100.0 * mfu)),
        format!("{:.1} %", 100.0 * outcome.bubble),
        units::bytes(outcome.reserved),
        outcome.fits.map_or("–", |fits| if fits { "yes" } else { "no" }).to_owned(),
    ]);
    if titles.scaling {
        cells.extend(row.efficiency.map(|share| format!("{:.1} %", 100.0 * share)));
    }
    cells
}
