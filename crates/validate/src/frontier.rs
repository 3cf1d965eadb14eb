//! The Frontier study (arXiv 2312.12705) beside our predictions, as a page.
//!
//! The page says which figures are fitted, explained or predicted.

use kintsugi_draw::chart::{Axis, Chart, Series, Style, Unit, svg};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::{Consumption, Coverage, Timing, Training, predict, time};

use crate::device;
use crate::page::{Page, fill};

/// A model of the study: layout, samples of a replica, and what was published.
struct Run {
    name: &'static str,
    preset: &'static str,
    tp: usize,
    pp: usize,
    /// Samples of one replica's step.
    samples: usize,
    /// Hardware TFLOP/s of a GCD.
    throughput: f64,
    /// Joules to train on 20 tokens per parameter.
    energy: f64,
    fitted: bool,
}

impl Run {
    /// How its throughput and energy are predicted.
    fn how(&self) -> &'static str {
        if self.fitted { "fitted" } else { "predicted" }
    }
}

const RUNS: [Run; 3] = [
    Run {
        name: "22B",
        preset: "gpt-22b",
        tp: 1,
        pp: 8,
        samples: 640,
        throughput: 73.5,
        energy: 284e9,
        fitted: true,
    },
    Run {
        name: "175B",
        preset: "gpt-175b",
        tp: 4,
        pp: 16,
        samples: 640,
        throughput: 69.2,
        energy: 17.65e12,
        fitted: true,
    },
    Run {
        name: "1T",
        preset: "gpt-1t",
        tp: 8,
        pp: 64,
        samples: 1600,
        throughput: 61.2,
        energy: 662e12,
        fitted: false,
    },
];

/// Strong scaling: the run, its replicas, the samples of all of them, and the published share of one replica's speed.
const STRONG: [(usize, usize, usize, f64); 2] = [(1, 16, 8000, 89.93), (2, 6, 8016, 87.05)];

/// The authors' log of 175B with two replicas: MiB allocated at the peak of stages 0, 1, 14 and 15.
const MEMORY: [(usize, f64); 4] = [(0, 33902.0), (1, 31435.0), (14, 27535.0), (15, 29138.0)];

/// The text of the page. A name in braces is where the rows of a table go.
const TEMPLATE: &str = include_str!("../data/frontier.md");
/// The text of a sensitivity.
const SENSITIVITY_TEMPLATE: &str = include_str!("../data/frontier-sensitivity.md");

/// The whole page.
pub fn page() -> Page {
    let sensitivities: Vec<Page> = SENSITIVITIES.iter().map(sensitivity).collect();
    let texts: Vec<&str> = sensitivities.iter().map(|page| page.text.trim_end()).collect();
    let text = fill(
        TEMPLATE,
        &[
            ("throughput", throughput()),
            ("scaling", scaling()),
            ("energy", energy()),
            ("memory", memory()),
            ("sensitivities", texts.join("\n\n")),
        ],
    );
    Page { text, pictures: sensitivities.into_iter().flat_map(|page| page.pictures).collect() }
}

fn throughput() -> String {
    let row = |run: &Run| {
        let ours = speed(&plan(run, 1, run.samples)) / 1e12;
        let error = 100.0 * (ours / run.throughput - 1.0);
        let Run { name, tp, pp, samples, throughput, .. } = run;
        let how = run.how();
        format!("| {name} | {tp} | {pp} | {samples} | {throughput} | {ours:.1} | {error:+.1} % | {how} |")
    };
    RUNS.iter().map(row).collect::<Vec<_>>().join("\n")
}

fn scaling() -> String {
    let weak = [(1, 16), (2, 6)].map(|(index, replicas)| {
        let run = &RUNS[index];
        scaling_row(("weak", "predicted"), run, replicas, [run.samples, replicas * run.samples], 100.0)
    });
    let strong = STRONG.map(|(index, replicas, samples, published)| {
        scaling_row(("strong", "explained"), &RUNS[index], replicas, [samples, samples], published)
    });
    [weak, strong].concat().join("\n")
}

/// The samples of a step are given for one replica and for all replicas.
fn scaling_row(
    (kind, how): (&str, &str),
    run: &Run,
    replicas: usize,
    samples: [usize; 2],
    published: f64,
) -> String {
    let [one, all] =
        [(1, samples[0]), (replicas, samples[1])].map(|(dp, samples)| speed(&plan(run, dp, samples)));
    let ours = 100.0 * all / one;
    let (name, ranks, difference) = (run.name, run.tp * run.pp * replicas, ours - published);
    format!(
        "| {kind} | {name} | {ranks} | {published:.2} % | {ours:.2} % | {difference:+.1} points | {how} |"
    )
}

fn energy() -> String {
    let row = |run: &Run| {
        let plan = plan(run, 1, run.samples);
        let timing = timing(&plan);
        let training = Training::new(&plan, &timing, 20.0 * plan.parameter_count() as f64);
        let ours = training.joules.expect("Frontier's power is known");
        let watts = Consumption::new(&plan, &timing).expect("Frontier's power is known").power_w;
        let error = 100.0 * (ours / run.energy - 1.0);
        let (published, ours, hours) = (run.energy / 1e12, ours / 1e12, training.gpu_hours / 1e3);
        let (name, how) = (run.name, run.how());
        format!(
            "| {name} | {published:.3} TJ | {ours:.3} TJ | {error:+.1} % | {watts:.0} | {hours:.0} k | {how} |"
        )
    };
    RUNS.iter().map(row).collect::<Vec<_>>().join("\n")
}

fn memory() -> String {
    let plan = plan(&RUNS[1], 2, 1280);
    let stages = predict(&plan, device(&plan), Coverage::ShortStep).stages;
    let rows = MEMORY.map(|(stage, published)| {
        let ours = stages[stage].total as f64 / 1_048_576.0;
        format!("| {stage} | {published:.0} | {ours:.0} | predicted |")
    });
    rows.join("\n")
}

/// The name of a curve, and the settings for a value on the horizontal axis.
type Curve = (&'static str, fn(usize) -> Vec<String>);

/// What one setting changes for 22B, and what the study found of it.
struct Sensitivity {
    /// The name of its picture.
    picture: &'static str,
    title: &'static str,
    along: &'static str,
    finding: &'static str,
    curves: &'static [Curve],
    values: &'static [usize],
}

const SENSITIVITIES: [Sensitivity; 4] = [
    Sensitivity {
        picture: "frontier-tp.svg",
        title: "Tensor parallelism",
        along: "tp",
        finding: "tensor parallelism belongs inside a node: beyond 8 GCDs its collectives cross the links between nodes, \
                  and throughput collapses",
        curves: &[("pp 1, 64 samples", |tp| sets(&[("parallel.tp", tp), ("batch.global", 64)]))],
        values: &[1, 2, 4, 8, 16],
    },
    Sensitivity {
        picture: "frontier-pp.svg",
        title: "Pipeline stages",
        along: "pp",
        finding: "at a fixed batch more stages lose throughput; if the batch grows with the stages, they do not",
        curves: &[
            ("128 samples", |pp| sets(&[("parallel.pp", pp), ("batch.global", 128)])),
            ("16 samples for each stage", |pp| sets(&[("parallel.pp", pp), ("batch.global", 16 * pp)])),
        ],
        values: &[1, 2, 4, 8, 16, 24],
    },
    Sensitivity {
        picture: "frontier-batch.svg",
        title: "Samples of a step",
        along: "samples",
        finding: "the bubble is about the number of stages over that of micro-batches, so a larger batch fills the pipeline",
        curves: &[("pp 8", |samples| sets(&[("parallel.pp", 8), ("batch.global", samples)]))],
        values: &[32, 64, 128, 256, 640],
    },
    Sensitivity {
        picture: "frontier-micro.svg",
        title: "Samples of a micro-batch",
        along: "samples of a micro-batch",
        finding: "all of its recipes have micro-batches of one sample; larger ones make fewer of them, and the bubble grows",
        curves: &[("pp 8, 640 samples", |micro| {
            sets(&[("parallel.pp", 8), ("batch.global", 640), ("batch.micro", micro)])
        })],
        values: &[1, 2, 4, 8],
    },
];

fn sets(values: &[(&str, usize)]) -> Vec<String> {
    values.iter().map(|(key, value)| format!("{key}={value}")).collect()
}

/// The text of a sensitivity, and its picture.
fn sensitivity(sensitivity: &Sensitivity) -> Page {
    let Sensitivity { picture, title, along, finding, curves, values } = sensitivity;
    let names: Vec<String> = values.iter().map(ToString::to_string).collect();
    let (x, places) = Axis::of_values(along, &names);
    let mut chart = Chart {
        title: format!("22B on Frontier, predicted: {}", title.to_lowercase()),
        caption: format!("The study: {finding}."),
        x,
        y: Axis::from_zero("hardware FLOP/s per GCD", Unit::Flops),
        ..Chart::default()
    };
    for (colour, (name, settings)) in curves.iter().enumerate() {
        let speeds = values.iter().map(|&value| speed_of_22b(settings(value)));
        let points = places.iter().copied().zip(speeds);
        chart.series.push(Series::new(*name, Style::Line, colour).points(points));
    }
    let texts = [
        ("title", (*title).to_owned()),
        ("finding", (*finding).to_owned()),
        ("picture", (*picture).to_owned()),
    ];
    Page { text: fill(SENSITIVITY_TEMPLATE, &texts), pictures: vec![((*picture).to_owned(), svg(&chart))] }
}

fn speed_of_22b(settings: Vec<String>) -> Option<f64> {
    let base = ["model.preset=gpt-22b", "parallel.dp=1"].map(str::to_owned);
    let all: Vec<String> = base.into_iter().chain(settings).collect();
    resolved(&all).map(|plan| speed(&plan))
}

fn plan(run: &Run, dp: usize, samples: usize) -> Plan {
    let sets = [
        format!("model.preset={}", run.preset),
        format!("parallel.tp={}", run.tp),
        format!("parallel.pp={}", run.pp),
        format!("parallel.dp={dp}"),
        format!("batch.global={samples}"),
    ];
    resolved(&sets).expect("the study's own layouts are legal")
}

fn resolved(sets: &[String]) -> Option<Plan> {
    let on = ["cluster.preset=frontier", "framework.preset=frontier-megatron"];
    ConfigSource::text("").sets(on).sets(sets).plan().ok()
}

fn timing(plan: &Plan) -> Timing {
    time(plan).expect("Frontier's speed is known")
}

/// Hardware FLOP/s of a GCD.
fn speed(plan: &Plan) -> f64 {
    plan.flops().hardware / timing(plan).step_s / plan.mesh.ranks() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_the_docs_is_this_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/frontier.md");
        assert_eq!(page().text, std::fs::read_to_string(path).expect("the page"));
    }

    /// The page says which figures are fitted, explained or predicted. All are published in arXiv 2312.12705.
    #[test]
    fn the_studys_figures_are_met() {
        for run in &RUNS {
            let plan = plan(run, 1, run.samples);
            let error = speed(&plan) / 1e12 / run.throughput - 1.0;
            assert!(error.abs() < 0.04, "{} throughput {error}", run.name);
            let training = Training::new(&plan, &timing(&plan), 20.0 * plan.parameter_count() as f64);
            let error = training.joules.unwrap() / run.energy - 1.0;
            assert!(error.abs() < 0.08, "{} energy {error}", run.name);
        }
        for (index, replicas, samples, published) in STRONG {
            let run = &RUNS[index];
            let share = 100.0 * speed(&plan(run, replicas, samples)) / speed(&plan(run, 1, samples));
            assert!((share - published).abs() < 3.0, "{} {share}", run.name);
        }
    }
}
