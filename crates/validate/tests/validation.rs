//! Predictions of measured runs must not get worse.
//!
//! The published tables are outside the repository, in `shared/validation`. Without them the test says so and passes.

use std::path::PathBuf;

use kintsugi_testing::{Need, skip};
use kintsugi_validate::{Report, Tables, own, validate};

/// The aims of published runs that are missed, as docs/cost-model.md explains.
const MISSED: &[(&str, &str)] = &[];

/// The figures of our own runs, rounded up (down if more is better).
const OWN: &[(&str, &str, f64)] = &[
    ("our H200, one or two batch sizes each", "time, worst error %", 3.8),
    ("our H200, one or two batch sizes each", "joules, worst error %", 4.3),
    ("our H200, one or two batch sizes each", "memory, worst error %", 0.2),
    ("our H200, Llama shapes", "time, worst error %", 8.5),
    ("our H200, Llama shapes", "memory, worst error %", 0.1),
    ("our CPU, 8 threads on 2 cores", "time, worst error %", 18.2),
    ("our CPU, 8 threads on 2 cores", "rank correlation", 0.94),
];

#[test]
fn our_own_runs_are_predicted_as_well_as_ever() {
    let reports = own(&Tables::default(), &[]);
    let value = |set: &str, figure: &str| {
        let report: Option<&Report> = reports.iter().find(|report| report.set == set);
        let figure = report.and_then(|report| report.figures.iter().find(|f| f.name == figure));
        figure.unwrap_or_else(|| panic!("no figure of {set}")).clone()
    };
    let figures = OWN.iter().map(|&(set, name, held)| (set, held, value(set, name)));
    let worse: Vec<String> = figures
        .filter(|(_, held, figure)| if figure.at_least { figure.value < *held } else { figure.value > *held })
        .map(|(set, held, figure)| format!("{set}: {} is {:.2}, was {held}", figure.name, figure.value))
        .collect();
    assert!(worse.is_empty(), "{worse:#?}");
}

#[test]
fn published_runs_miss_no_other_aims() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/validation");
    if !folder.exists() {
        skip(Need::Tables, "there are no published runs beside the repository, in shared/validation");
        return;
    }
    let reports = validate(&Tables::read(&folder).expect("the tables can be read"), &[]);
    let figures = reports.iter().flat_map(|report| report.figures.iter().map(|figure| (&report.set, figure)));
    let missed: Vec<(&str, &str, f64)> = figures
        .filter(|(_, figure)| !figure.met())
        .map(|(set, figure)| (set.as_str(), figure.name.as_str(), figure.value))
        .filter(|&(set, figure, _)| !MISSED.contains(&(set, figure)))
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
}
