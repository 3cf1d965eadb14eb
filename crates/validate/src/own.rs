//! Our own runs, compared with the predictions from the profiles of their machines. The tables and profiles are
//! compiled into the binary.
//!
//! A row is a name, settings as `--set` takes them, and what was measured.

use std::path::Path;

use kintsugi_plan::Plan;
use kintsugi_plan::config::{ConfigError, ConfigSource};
use kintsugi_simulate::{Consumption, Coverage, predict, time};

use super::device;
use super::score::{Figure, Report, errors, spearman};
use super::table::{self, Row};
use super::validated::ValidatedRun;

/// One of our machines.
struct Machine {
    name: &'static str,
    /// The name of the table's file.
    file: &'static str,
    table: &'static str,
    profile: &'static str,
    /// Settings of every run.
    settings: &'static [&'static str],
    /// The largest error that is aimed at, in percent, of time, energy and memory.
    aims: [Option<f64>; 3],
    /// Whether the order of the runs should be right.
    ordered: bool,
}

const MACHINES: [Machine; 3] = [
    Machine {
        name: "our CPU, 8 threads on 2 cores",
        file: "cpu.csv",
        table: include_str!("../measured/cpu.csv"),
        profile: include_str!("../../../profiles/epyc-2-cores.toml"),
        settings: &["model.preset=demo", "batch.micro=4", "batch.global=32"],
        aims: [Some(20.0), None, None],
        ordered: true,
    },
    Machine {
        name: "our H200, one or two batch sizes each",
        file: "h200.csv",
        table: include_str!("../measured/h200.csv"),
        profile: include_str!("../../../profiles/h200.toml"),
        settings: &["cluster.preset=h200", "run.device=cuda", "precision.compute=bf16"],
        aims: [Some(5.0), Some(10.0), Some(1.0)],
        ordered: false,
    },
    Machine {
        name: "our H200, Llama shapes",
        file: "h200-llama.csv",
        table: include_str!("../measured/h200-llama.csv"),
        profile: include_str!("../../../profiles/h200.toml"),
        settings: &["cluster.preset=h200", "run.device=cuda", "precision.compute=bf16"],
        aims: [Some(5.0), Some(10.0), Some(1.0)],
        ordered: false,
    },
];

/// A table of one of our machines that was read from a file. It replaces the one in the binary.
#[derive(Debug)]
pub struct OwnTable {
    machine: usize,
    rows: Vec<Row>,
}

impl OwnTable {
    /// The table of a file, if its header and its name are those of one of our machines. The rows do not say which machine they
    /// are of, so the name does.
    pub fn of(path: &Path, rows: &[Row]) -> Option<Self> {
        let header = rows.first()?.columns();
        let is_ours =
            ["name", "settings", "step_ms"].iter().all(|column| header.iter().any(|one| one == column));
        let machine = MACHINES.iter().position(|machine| path.file_name() == Some(machine.file.as_ref()))?;
        is_ours.then(|| OwnTable { machine, rows: rows.to_vec() })
    }
}

/// A report for each machine that has rows.
pub fn reports(read: &[OwnTable], over: &[String]) -> Vec<Report> {
    let report =
        |(number, machine): (usize, &Machine)| match read.iter().find(|table| table.machine == number) {
            Some(table) => machine.report(&table.rows, over),
            None => machine.report(&table::rows(machine.table).expect("a table of ours is legal"), over),
        };
    let reports = MACHINES.iter().enumerate().map(report);
    reports.filter(|report| report.rows + report.left_out > 0).collect()
}

impl Machine {
    fn report(&self, rows: &[Row], over: &[String]) -> Report {
        let (mut runs, mut refused): (Vec<(&Row, Plan)>, Vec<String>) = (Vec::new(), Vec::new());
        for row in rows {
            match self.plan(row, over) {
                Ok(plan) => runs.push((row, plan)),
                Err(error) => refused.push(format!("{}: {error}", row.text("name"))),
            }
        }
        let pairs = |of: &dyn Fn(&Plan) -> Option<f64>, column: &str, unit: f64| -> Vec<(f64, f64)> {
            let pair = |(row, plan): &(&Row, Plan)| Some((of(plan)?, row.number(column)? * unit));
            runs.iter().filter_map(pair).collect()
        };
        let times = pairs(&|plan| time(plan).map(|timing| timing.step_s), "step_ms", 1e-3);
        let joules =
            pairs(&|plan| Consumption::new(plan, &time(plan)?).map(|used| used.joules), "joules", 1.0);
        let memory = pairs(&|plan| Some(reserved(plan)), "reserved_gib", GIB);
        let mut figures = vec![
            Figure::at_most("time, mean error %", errors(&times).0, None),
            Figure::at_most("time, worst error %", errors(&times).1, self.aims[0]),
        ];
        if self.ordered {
            figures.push(Figure::at_least("rank correlation", spearman(&times), Some(1.0)));
        }
        for (name, pairs, aim) in [("joules", joules, self.aims[1]), ("memory", memory, self.aims[2])] {
            if !pairs.is_empty() {
                figures.push(Figure::at_most(format!("{name}, worst error %"), errors(&pairs).1, aim));
            }
        }
        let predicted = runs.iter().filter_map(|(row, plan)| {
            let (timing, measured) = (time(plan)?, row.number("step_ms")? * 1e-3);
            let ranks = plan.mesh.ranks();
            Some(ValidatedRun::of(row.text("name"), ranks, timing.step_s, measured, Some(timing)))
        });
        Report {
            set: self.name.to_owned(),
            source: "our own".to_owned(),
            rows: runs.len(),
            left_out: refused.len(),
            reason: refused.into_iter().next(),
            outliers: 0,
            figures,
            runs: predicted.collect(),
        }
    }

    fn plan(&self, row: &Row, over: &[String]) -> Result<Plan, ConfigError> {
        let source = ConfigSource::text(self.profile).sets(self.settings);
        source.sets(row.text("settings").split_whitespace()).sets(over).plan()
    }
}

const GIB: f64 = 1_073_741_824.0;

/// Bytes that the fullest rank takes from its device.
fn reserved(plan: &Plan) -> f64 {
    let prediction = predict(plan, device(plan), Coverage::quick(plan));
    prediction.stages.iter().map(|stage| stage.reserved).max().unwrap_or(0) as f64
}
