//! Trials until 95 % of the best, on the groups of published tables. `scripts/bench-tune` calls it.
//!
//! Usage: `bench-tune jobs FOLDER` predicts the groups by constants that are fitted without their source and prints them as
//! JSON; `bench-tune run JOBS.json SEEDS` prints, for each group and method, the trials of every seed; `bench-tune speed` times a
//! proposal.
#![allow(missing_docs, reason = "a program")]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use kintsugi_tune::trials::benchmark::{MeasuredJob, Method};
use kintsugi_tune::trials::{Known, Models, Observation, Prior, Process, Proposal, Space, Values};
use kintsugi_validate::{Layout, LayoutGroup, Tables, fit, layout_groups};
use rayon::prelude::*;
use serde_json::json;

/// The source of the groups.
const SOURCE: &str = "nanotron";
const GLOBAL_BATCH: usize = 256;
/// Rows that a group needs.
const LEAST_ROWS: usize = 30;

const METHODS: [(&str, Method); 6] = [
    ("tuner", Method::Tuner),
    ("planner's order", Method::PlannerOrder),
    ("without planner", Method::WithoutPlanner),
    ("reversed planner", Method::ReversedPlanner),
    ("shuffled planner", Method::ShuffledPlanner),
    ("random", Method::Random),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["jobs", folder] => jobs(Path::new(folder)),
        ["run", file, seeds] => run(Path::new(file), seeds.parse().expect("a number of seeds")),
        ["speed"] => speed(),
        ["posterior"] => posterior(),
        _ => panic!(
            "bench-tune jobs FOLDER, bench-tune run JOBS.json SEEDS, bench-tune speed, or bench-tune posterior"
        ),
    }
}

fn jobs(folder: &Path) {
    let tables = Tables::read(folder).expect("tables that can be read");
    let found = fit(&tables.runs, Some(SOURCE), &mut |stage| eprintln!("fitting {stage}"));
    let runs: Vec<_> = tables.runs.into_iter().filter(|run| run.source == SOURCE).collect();
    let groups = layout_groups(&runs, &found.constants, GLOBAL_BATCH);
    let rows =
        |group: &LayoutGroup| group.layouts.iter().map(|layout| layout.measured_s.len()).sum::<usize>();
    let groups: Vec<LayoutGroup> = groups.into_iter().filter(|group| rows(group) >= LEAST_ROWS).collect();
    println!("{}", serde_json::to_string_pretty(&groups).expect("names are strings"));
}

fn job(group: &LayoutGroup) -> MeasuredJob {
    let proposal = |layout: &Layout| Proposal {
        values: layout.values.clone(),
        predicted: layout.predicted_s,
        memory: layout.memory_share,
    };
    let pair = |layout: &Layout| (proposal(layout), layout.measured_s.clone());
    MeasuredJob::new(group.layouts.iter().map(pair).collect())
}

fn run(file: &Path, seeds: u64) {
    let groups: Vec<LayoutGroup> = serde_json::from_slice(&std::fs::read(file).expect("jobs"))
        .expect("jobs as this program prints them");
    let mut results = BTreeMap::new();
    for group in &groups {
        let job = job(group);
        let of = |(name, method): (&str, Method)| {
            let trials = (0..seeds).into_par_iter().map(|seed| job.trials_until_good(method, seed));
            (name.to_owned(), json!(trials.collect::<Vec<_>>()))
        };
        results.insert(group.name.clone(), METHODS.into_iter().map(of).collect::<BTreeMap<_, _>>());
    }
    println!("{}", serde_json::to_string_pretty(&results).expect("names are strings"));
}

/// The time of a proposal among many candidates.
fn speed() {
    const CANDIDATES: usize = 100_000;
    let candidate = |i: usize| {
        let setting = |k: usize| {
            let values = if k < 4 { 8 } else { 3 };
            // Digits of the candidate's number, scattered.
            let digit = (i * (2 * k + 7919) / 13) % values;
            (format!("setting.{k}"), (1_u64 << digit).to_string())
        };
        let values: Values = (0..12).map(setting).collect();
        let predicted = Some(1.0 + (i % 997) as f64 / 500.0);
        Proposal { values, predicted, memory: Some(0.3 + (i % 80) as f64 / 100.0) }
    };
    let space = Space::new(&(0..CANDIDATES).map(candidate).collect::<Vec<_>>());
    for count in [30, 100, 500] {
        let trial = |k: usize| {
            let index = k * 7919 % CANDIDATES;
            let point = &space.points[index];
            let factor = 1.0 + 0.04 * f64::from(point.levels[0]) + 0.0005 * (k * 37 % 100) as f64;
            let value = point.predicted.expect("it is predicted") * factor;
            (index, if k.is_multiple_of(7) { Known::Failure } else { Known::Value(value) })
        };
        let trials: Vec<(usize, Known)> = (0..count).map(trial).collect();
        let begun = Instant::now();
        let models = Models::fit(&space, &trials);
        let fitted = begun.elapsed().as_secs_f64();
        let proposed = models.propose(&space, &trials, 1, 0);
        let all = begun.elapsed().as_secs_f64();
        println!(
            "{count} trials, {CANDIDATES} candidates: {all:.2} s, {fitted:.2} s of it to fit; {proposed:?}"
        );
    }
}

/// A process on a few points, with what its beliefs follow from, for another implementation.
fn posterior() {
    let candidate = |i: usize| {
        let pairs = [("a", 1 << (i % 5)), ("b", 1 << (i / 5 % 3)), ("c", i / 15)];
        let values: Values = pairs.map(|(key, value)| (key.to_owned(), value.to_string())).into();
        Proposal { values, ..Proposal::default() }
    };
    let space = Space::new(&(0..60).map(candidate).collect::<Vec<_>>());
    let trend = |i: usize| 0.02 * (i * 7 % 60) as f64;
    let trials: Vec<usize> = (0..60).step_by(4).collect();
    let value =
        |i: usize| 0.9 * trend(i) + 0.1 * f64::from(space.points[i].levels[0]) + 0.01 * (i % 7) as f64;
    let observe =
        |&i: &usize| Observation { levels: &space.points[i].levels, trend: trend(i), value: value(i) };
    let prior =
        Prior { slope: 1.0, slope_deviation: 0.3, level_deviation: 0.5, residual: 0.2, probability: 1.0 };
    let process = Process::fit(&space, &[prior], &trials.iter().map(observe).collect::<Vec<_>>());
    let points: Vec<(&[u16], f64)> =
        space.points.iter().enumerate().map(|(i, point)| (&point.levels[..], trend(i))).collect();
    let beliefs = points.iter().map(|&(levels, trend)| process.belief(levels, trend));
    let beliefs: Vec<[f64; 2]> = beliefs.map(|belief| [belief.mean, belief.deviation]).collect();
    let values: Vec<f64> = trials.iter().map(|&i| value(i)).collect();
    let trends: Vec<f64> = (0..60).map(trend).collect();
    let parameters = process.parameters(&points);
    println!(
        "{}",
        json!({ "trials": trials, "values": values, "trends": trends, "parameters": parameters, "beliefs": beliefs })
    );
}
