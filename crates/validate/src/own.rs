//! Our own runs, compared with the predictions from the profiles of their machines. The tables and profiles are
//! compiled into the binary.
//!
//! A row is a name, settings as `--set` takes them, and what was measured.

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Consumption, Coverage, predict, time};

use super::device;
use super::predicted::Predicted;
use super::score::{Figure, Report, errors, spearman};
use super::table::{self, Row};

/// One of our machines.
struct Machine {
    name: &'static str,
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
        table: include_str!("../measured/cpu.csv"),
        profile: include_str!("../../../profiles/epyc-2-cores.toml"),
        settings: &["model.preset=demo", "batch.micro=4", "batch.global=32"],
        aims: [Some(20.0), None, None],
        ordered: true,
    },
    Machine {
        name: "our H200, one or two batch sizes each",
        table: include_str!("../measured/h200.csv"),
        profile: include_str!("../../../profiles/h200.toml"),
        settings: &["cluster.preset=h200", "run.device=cuda", "precision.compute=bf16"],
        aims: [Some(5.0), Some(10.0), Some(1.0)],
        ordered: false,
    },
    Machine {
        name: "our H200, Llama shapes",
        table: include_str!("../measured/h200-llama.csv"),
        profile: include_str!("../../../profiles/h200.toml"),
        settings: &["cluster.preset=h200", "run.device=cuda", "precision.compute=bf16"],
        aims: [Some(5.0), Some(10.0), Some(1.0)],
        ordered: false,
    },
];

/// A report for each machine that has rows.
pub fn reports(over: &[String]) -> Vec<Report> {
    MACHINES.iter().map(|machine| machine.report(over)).filter(|report| report.rows > 0).collect()
}

impl Machine {
    fn report(&self, over: &[String]) -> Report {
        let rows = table::rows(self.table).expect("a table of ours is legal");
        let plans: Vec<Plan> = rows.iter().map(|row| self.plan(row, over)).collect();
        let pairs = |of: &dyn Fn(&Plan) -> Option<f64>, column: &str, unit: f64| -> Vec<(f64, f64)> {
            let pair = |(plan, row): (&Plan, &Row)| Some((of(plan)?, row.number(column)? * unit));
            plans.iter().zip(&rows).filter_map(pair).collect()
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
        let runs = rows.iter().zip(&plans).zip(times);
        let runs = runs.map(|((row, plan), (ours, real))| {
            Predicted::of(row.text("name"), plan.mesh.ranks(), ours, real, time(plan))
        });
        Report {
            set: self.name.to_owned(),
            source: "our own".to_owned(),
            rows: rows.len(),
            left_out: 0,
            reason: None,
            sick: 0,
            figures,
            runs: runs.collect(),
        }
    }

    fn plan(&self, row: &Row, over: &[String]) -> Plan {
        let source = ConfigSource::text(self.profile).sets(self.settings);
        let plan = source.sets(row.text("settings").split_whitespace()).sets(over).plan();
        plan.unwrap_or_else(|error| panic!("{}: {error}", row.text("name")))
    }
}

const GIB: f64 = 1_073_741_824.0;

/// Bytes that the fullest rank takes from its device.
fn reserved(plan: &Plan) -> f64 {
    let prediction = predict(plan, device(plan), Coverage::quick(plan));
    prediction.stages.iter().map(|stage| stage.reserved).max().unwrap_or(0) as f64
}
