//! Predictions of published runs must not get worse.
//!
//! The tables are outside the repository, in `shared/validation`. Without them the test says so and passes.

use std::path::PathBuf;

use kintsugi_testing::{Need, skip};
use kintsugi_validate::{Report, own, validate};

/// The figures of each set when its constants were fitted, rounded up (down if more is better).
const HELD: &[(&str, &str, f64)] = &[
    ("korthikanti", "time, mean error %", 3.0),
    ("korthikanti", "time, worst error %", 6.5),
    ("sc21 table 1", "time, mean error %", 5.0),
    ("sc21 table 2, PTD-P", "time, mean error %", 5.0),
    ("sc21 table 2, ZeRO-3", "time, mean error %", 6.0),
    ("megascale's megatron", "time, mean error %", 5.0),
    ("vtrain", "time, mean error %", 9.0),
    ("llm-foundry A100", "time, mean error %", 11.0),
    ("llm-foundry H100", "time, mean error %", 5.5),
    ("simumax B200", "time, mean error %", 3.0),
    ("simumax B200", "memory, mean error %", 1.5),
    ("torchtitan H100", "time, mean error %", 8.0),
    ("torchtitan H100", "memory, mean error %", 4.5),
    ("nanotron llama-1B", "rank correlation", 0.933),
    ("nanotron llama-8B", "rank correlation", 0.86),
    ("nanotron llama-80B", "rank correlation", 0.87),
    ("nanotron llama-1B", "pick, share of the best", 0.95),
    ("nanotron llama-8B", "pick, share of the best", 0.84),
    ("nanotron llama-80B", "pick, share of the best", 0.93),
    ("nanotron llama-1B", "working runs predicted to fit", 0.99),
    ("nanotron llama-8B", "working runs predicted to fit", 0.99),
    ("nanotron llama-80B", "working runs predicted to fit", 1.0),
    ("nanotron llama-1B", "fit agreement", 0.845),
    ("nanotron llama-8B", "fit agreement", 0.928),
    ("nanotron llama-80B", "fit agreement", 0.984),
    ("nanotron llama-1B", "memory, mean error %", 11.8),
    ("nanotron llama-8B", "memory, mean error %", 11.2),
    ("nanotron llama-80B", "memory, mean error %", 6.3),
];

/// The same for our own runs.
const OWN: &[(&str, &str, f64)] = &[
    ("our H200, one or two batch sizes each", "time, worst error %", 3.8),
    ("our H200, one or two batch sizes each", "joules, worst error %", 4.3),
    ("our H200, one or two batch sizes each", "memory, worst error %", 0.2),
    ("our CPU, 8 threads on 2 cores", "time, worst error %", 14.0),
    ("our CPU, 8 threads on 2 cores", "rank correlation", 0.75),
];

#[test]
fn our_own_runs_are_predicted_as_well_as_ever() {
    assert_held(&own(&[]), OWN);
}

#[test]
fn published_runs_are_predicted_as_well_as_ever() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/validation");
    if !folder.exists() {
        skip(Need::Tables, "there are no published runs beside the repository, in shared/validation");
        return;
    }
    assert_held(&validate(&folder, &[], 1, &|_, _| {}).expect("the tables can be read"), HELD);
}

fn assert_held(reports: &[Report], held: &[(&str, &str, f64)]) {
    let value = |set: &str, figure: &str| {
        let report: Option<&Report> = reports.iter().find(|report| report.set == set);
        let figure = report.and_then(|report| report.figures.iter().find(|f| f.name == figure));
        figure.unwrap_or_else(|| panic!("no figure of {set}")).clone()
    };
    let worse: Vec<String> = held
        .iter()
        .map(|&(set, name, held)| (set, held, value(set, name)))
        .filter(|(_, held, figure)| if figure.at_least { figure.value < *held } else { figure.value > *held })
        .map(|(set, held, figure)| format!("{set}: {} is {:.2}, was {held}", figure.name, figure.value))
        .collect();
    assert!(worse.is_empty(), "{worse:#?}");
}
