//! `kintsugi plan --compare sharding`: the known ways to shard, side by side.

use std::path::Path;

use clap::ValueEnum;
use kintsugi_draw::chart::{Axis, Chart, Series, Style, Unit, svg};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Consumption, Coverage, TimeRange, predict, time};
use kintsugi_spec::{Level, units};
use serde::Serialize;

use crate::config::ConfigArguments;
use crate::describe::{self, CommBytes};
use crate::failure::Failure;
use crate::files::{check_writable, write_whole};
use crate::fit;
use crate::host::planned_device;
use crate::output::Output;
use crate::table::Table;

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Comparison {
    /// ZeRO-1, -2 and -3, MiCS, ZeRO++ and three levels
    Sharding,
}

/// The schemes, each with its settings.
const SCHEMES: [(&str, &str); 6] = [
    ("ZeRO-1", "sharding.zero=1"),
    ("ZeRO-2", "sharding.zero=2"),
    ("ZeRO-3", "sharding.zero=3"),
    ("MiCS", "sharding.preset=mics"),
    ("ZeRO++", "sharding.preset=zero++"),
    ("three-level", "sharding.preset=three-level"),
];

/// The scheme that others are compared with.
const REFERENCE: &str = "ZeRO-3";

/// A row of the table.
#[derive(Serialize)]
struct Row {
    scheme: &'static str,
    /// Replicas over which weights, gradients and states are sharded.
    shards: Option<[usize; 3]>,
    /// The most that a rank takes from its device.
    reserved: Option<u64>,
    fits: Option<bool>,
    /// Bytes of a step over all ranks.
    comm: Option<CommBytes>,
    step_s: Option<f64>,
    range: Option<TimeRange>,
    /// How many times as fast as ZeRO-3 it is, and the least and the most of that over the range of links.
    of_zero3: Option<[f64; 3]>,
    energy_j_per_step: Option<f64>,
    /// Why there is no such plan.
    refused: Option<String>,
}

/// Computes the table, prints it and draws what each scheme moves.
pub fn run(config: &ConfigArguments, plot: Option<&Path>, output: Output) -> Result<(), Failure> {
    plot.map(check_writable).transpose()?;
    let source = config.read()?;
    let base = source.plan()?;
    let mut rows: Vec<Row> = SCHEMES.iter().map(|&(scheme, set)| row(&source, scheme, set)).collect();
    let reference = rows.iter().find(|row| row.scheme == REFERENCE).and_then(times);
    for row in &mut rows {
        row.of_zero3 = reference.as_ref().zip(times(row)).map(|(reference, own)| ratios(reference, &own));
    }
    output.result(&rows)?;
    if !output.json {
        output.text(&format!("{}\n{}", describe::lines(&describe::plan(&base)), table(&rows)))?;
    }
    if let Some(path) = plot {
        write_whole(path, svg(&chart(&base, &rows)).as_bytes())?;
        output.text(&format!("plot     {}\n", path.display()))?;
    }
    Ok(())
}

fn row(source: &ConfigSource, scheme: &'static str, set: &str) -> Row {
    let none = Row {
        scheme,
        shards: None,
        reserved: None,
        fits: None,
        comm: None,
        step_s: None,
        range: None,
        of_zero3: None,
        energy_j_per_step: None,
        refused: None,
    };
    let plan = match source.clone().without(&["sharding"]).set(set).plan() {
        Ok(plan) => plan,
        Err(error) => return Row { refused: Some(error.to_string()), ..none },
    };
    let prediction = predict(&plan, planned_device(&plan, plan.mesh.ranks()), Coverage::quick(&plan));
    let timing = time(&plan);
    let energy = timing.as_ref().and_then(|timing| Consumption::new(&plan, timing));
    Row {
        shards: Some([plan.sharding.weights, plan.sharding.gradients, plan.sharding.states]),
        reserved: prediction.stages.iter().map(|stage| stage.reserved).max(),
        fits: fit::known(&plan, &prediction),
        comm: Some(prediction.figures().comm_bytes),
        range: timing.as_ref().map(|timing| TimeRange::of(&plan, timing)),
        step_s: timing.map(|timing| timing.step_s),
        energy_j_per_step: energy.map(|energy| energy.joules),
        ..none
    }
}

/// The seconds of a step as described, and over the range of links if the plan is on several nodes.
fn times(row: &Row) -> Option<Vec<f64>> {
    let links = row.range?.links.map(|links| [links.slow_s, links.full_s, links.no_overlap_s]);
    Some([row.step_s?].into_iter().chain(links.into_iter().flatten()).collect())
}

/// How many times as fast `own` is as `reference`: as described, at least and at most. Links are the same for both.
fn ratios(reference: &[f64], own: &[f64]) -> [f64; 3] {
    let faster = || reference.iter().zip(own).map(|(reference, own)| reference / own);
    [reference[0] / own[0], faster().fold(f64::INFINITY, f64::min), faster().fold(0.0, f64::max)]
}

/// Bytes over the links of a level.
fn over(row: &Row, level: Level) -> u64 {
    let operations = row.comm.as_ref().and_then(|comm| comm.get(level.name()));
    operations.map_or(0, |operations| operations.values().sum())
}

/// The levels over which any scheme moves something.
fn levels(rows: &[Row]) -> Vec<Level> {
    Level::ALL.into_iter().filter(|&level| rows.iter().any(|row| over(row, level) > 0)).collect()
}

fn table(rows: &[Row]) -> Table {
    let levels = levels(rows);
    let mut header =
        vec!["scheme".to_owned(), "weights / gradients / states".to_owned(), "memory".to_owned()];
    header.push("fits".to_owned());
    header.extend(levels.iter().map(|level| format!("{} links", level.name())));
    header.extend(["step", "range", "times ZeRO-3", "energy"].map(str::to_owned));
    let mut table = Table::new(header);
    for row in rows {
        if let Some(refused) = &row.refused {
            table.row([format!("{}  {refused}", row.scheme)]);
            continue;
        }
        let unknown = || "–".to_owned();
        let shards = row.shards.map_or_else(unknown, |[w, g, s]| format!("{w} / {g} / {s}"));
        let mut cells = vec![row.scheme.to_owned(), shards, row.reserved.map_or_else(unknown, units::bytes)];
        cells.push(row.fits.map_or_else(unknown, |fits| if fits { "yes" } else { "no" }.to_owned()));
        cells.extend(levels.iter().map(|&level| units::bytes(over(row, level))));
        cells.push(row.step_s.map_or_else(unknown, |seconds| format!("{seconds:.3} s")));
        let range = row.range.map(|range| range.step_s);
        cells.push(range.map_or_else(unknown, |[low, high]| format!("{low:.2} to {high:.2} s")));
        let faster = |[own, least, most]: [f64; 3]| format!("{own:.2} ({least:.2} to {most:.2})");
        cells.push(row.of_zero3.map_or_else(unknown, faster));
        cells.push(row.energy_j_per_step.map_or_else(unknown, |joules| format!("{:.1} kJ", joules / 1e3)));
        table.row(cells);
    }
    table
}

/// Bars of what each scheme moves, stacked by level: the slowest links are at the bottom, where bars are easiest to compare.
fn chart(base: &Plan, rows: &[Row]) -> Chart {
    let Plan { mesh, batch, .. } = base;
    let series = levels(rows).into_iter().rev().enumerate().map(|(colour, level)| {
        let points =
            rows.iter().enumerate().map(|(place, row)| (place as f64, Some(over(row, level) as f64)));
        Series::new(format!("over {} links", level.name()), Style::Stack, colour).points(points)
    });
    Chart {
        title: format!("{} on {}: traffic of a step", base.model.name, base.cluster.name),
        question: "What does each scheme move, and over which links?".to_owned(),
        caption: format!("{mesh} · micro-batch {} · batch {}", batch.micro, batch.global),
        x: Axis::of_categories("scheme", rows.iter().map(|row| row.scheme.to_owned()).collect()),
        y: Axis::from_zero("bytes over all ranks", Unit::Bytes),
        series: series.collect(),
        ..Chart::default()
    }
}
