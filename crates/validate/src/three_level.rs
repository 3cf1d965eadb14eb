//! Three levels of sharding on Frontier (arXiv 2501.04266) and ZeRO++'s own table (arXiv 2306.10209) beside our predictions, as
//! a page.
//!
//! Both studies compare ways to shard in one program, DeepSpeed, so both are predicted with its profile, and what counts are
//! ratios of times. No constant is fitted to either.

use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::time;

use crate::errors;
use crate::page::{Page, fill, row};

const ZERO_3: &[&str] = &["sharding.zero=3"];
/// ZeRO++ as published, and as DeepSpeed has it since version 0.13.2.
const BACKWARD: &[&str] = &["sharding.preset=zero++", "sharding.secondary_use=backward"];
const ALL: &[&str] = &["sharding.preset=zero++"];
const THREE_LEVEL: &[&str] = &["sharding.preset=three-level"];

/// DeepSpeed's profile. Rings reach all adapters of a node: ZeRO++'s authors switch them on one by one.
const DEEPSPEED: &[&str] = &["framework.preset=deepspeed-zero3", "framework.between_nodes=1"];

/// What the study published for 20B: ZeRO++ over ZeRO-3, three levels over ZeRO++ and over ZeRO-3, and the efficiency of scaling.
const PUBLISHED: [f64; 4] = [1.405, 1.71, 2.40, 0.94];
const NEOX: &[&str] = &[
    "model.preset=neox-20b",
    "cluster.preset=frontier",
    "batch.sequence=2048",
    "batch.micro=1",
    "precision.compute=bf16",
    "precision.gradients=compute",
    "memory.recompute=full",
];
const GCDS: [usize; 2] = [64, 384];
const MICRO_BATCHES: [usize; 2] = [1, 8];
/// The GCDs and micro-batches of the experiments.
const EXPERIMENT: (usize, usize) = (384, 8);

/// Settings that differ from those of the first table, for every scheme and for ZeRO++ alone.
struct Experiment {
    what: &'static str,
    all: &'static [&'static str],
    zero_plus_plus: &'static [&'static str],
}

/// A ring over 384 GCDs takes 336 hops of 6 µs and 47 of 19.8 µs; one across 48 nodes takes as long if its 47 hops take 62.7 µs.
const ONE_RING: &[&str] = &["cluster.links.cluster.latency=62.7e-6"];

const EXPERIMENTS: [Experiment; 4] = [
    experiment("as in the table above", &[], &[]),
    experiment("nothing overlaps", &["parallel.overlap=false"], &[]),
    experiment("ZeRO++ gathers around one ring over all GCDs", &[], ONE_RING),
    experiment("the same, and nothing overlaps", &["parallel.overlap=false"], ONE_RING),
];

const fn experiment(
    what: &'static str,
    all: &'static [&'static str],
    zero_plus_plus: &'static [&'static str],
) -> Experiment {
    Experiment { what, all, zero_plus_plus }
}

/// A row of ZeRO++'s table: Gbit/s of a node's adapters, tokens of a GPU, parameters in billions, and TFLOP/s of a GPU with
/// ZeRO-3 and with ZeRO++.
type TableRow = (u32, usize, usize, f64, f64);

/// As read off the labels of the figures.
const TABLE: [TableRow; 20] = [
    (100, 1024, 18, 14.0, 31.0),
    (100, 1024, 49, 11.0, 22.0),
    (100, 1024, 91, 11.0, 22.0),
    (100, 1024, 138, 11.0, 22.0),
    (100, 2048, 18, 26.0, 46.0),
    (100, 2048, 49, 20.0, 38.0),
    (100, 2048, 91, 20.0, 38.0),
    (100, 2048, 138, 20.0, 38.0),
    (200, 2048, 18, 37.0, 50.0),
    (200, 2048, 138, 32.0, 48.0),
    (400, 1024, 18, 25.0, 35.0),
    (400, 1024, 49, 23.0, 36.0),
    (400, 1024, 91, 23.0, 36.0),
    (400, 1024, 138, 23.0, 36.0),
    (400, 2048, 18, 40.0, 53.0),
    (400, 2048, 49, 36.0, 51.0),
    (400, 2048, 91, 36.0, 51.0),
    (400, 2048, 138, 36.0, 50.0),
    (800, 2048, 18, 47.0, 54.0),
    (800, 2048, 138, 48.0, 55.0),
];

const GPUS: usize = 384;
const PER_NODE: f64 = 16.0;
/// Tokens of a sample in the tutorial.
const SEQUENCE: usize = 512;

/// 24 DGX-2: sixteen V100s, each with 150 GB/s through a switch (NVIDIA's data sheet).
const DGX_2: &[&str] = &[
    "cluster.preset=v100",
    "cluster.nodes=24",
    "cluster.per_node=16",
    "cluster.graph=[]",
    "cluster.links.node.bandwidth=150e9",
];

/// The text of the page. A name in braces is where a figure or the rows of a table go.
const TEMPLATE: &str = include_str!("../data/three-level.md");

/// The whole page.
pub fn page() -> Page {
    let experiments = EXPERIMENTS.map(|experiment| (experiment.what, ratios(&experiment)));
    let [plus, three_over_plus, three] = experiments[0].1;
    let experiments = experiments.map(|(what, ratios)| named_row(what, &ratios.map(times)));
    let error = |scheme| percent(&TABLE.map(|row| (table_ratio(&row, scheme), published(&row))));
    let text = fill(
        TEMPLATE,
        &[
            ("scaling", scaling()),
            ("published", PUBLISHED.map(|value| value.to_string()).join(" | ")),
            ("least scaling", times(efficiency(1, GCDS[GCDS.len() - 1]))),
            ("experiments", experiments.join("\n")),
            ("plus", times(plus)),
            ("three over plus", times(three_over_plus)),
            ("three", times(three)),
            ("missing over plus", times(PUBLISHED[1] / three_over_plus)),
            ("missing over zero-3", times(PUBLISHED[2] / three)),
            ("backward error", error(BACKWARD)),
            ("all error", error(ALL)),
        ],
    );
    Page { text, pictures: Vec::new() }
}

fn times(ratio: f64) -> String {
    format!("{ratio:.2}")
}

/// The mean distance of predicted from published ratios.
fn percent(pairs: &[(f64, f64)]) -> String {
    format!("{:.1} %", errors(pairs).0)
}

fn named_row(name: &str, cells: &[String]) -> String {
    row(&[&[name.to_owned()], cells].concat())
}

/// Seconds of a step.
fn seconds(sizes: &[String], settings: &[&[&str]]) -> f64 {
    let source = settings.iter().fold(ConfigSource::text("").sets(sizes), |source, sets| source.sets(*sets));
    let plan = source.plan().unwrap_or_else(|error| panic!("{sizes:?} {settings:?}: {error}"));
    time(&plan).expect("the speed of the device is known").step_s
}

/// Seconds of a step of NeoX-20B on Frontier.
fn neox(gcds: usize, micro_batches: usize, settings: &[&[&str]]) -> f64 {
    let sizes = [format!("parallel.dp={gcds}"), format!("batch.global={}", gcds * micro_batches)];
    seconds(&sizes, &[&[NEOX], settings].concat())
}

/// ZeRO++ over ZeRO-3, three levels over ZeRO++, and three levels over ZeRO-3.
fn ratios(experiment: &Experiment) -> [f64; 3] {
    let &Experiment { what: _, all, zero_plus_plus } = experiment;
    let (gcds, micro_batches) = EXPERIMENT;
    let of = |scheme: &[&str], more: &[&str]| neox(gcds, micro_batches, &[DEEPSPEED, scheme, all, more]);
    let (zero_3, plus, three) = (of(ZERO_3, &[]), of(BACKWARD, zero_plus_plus), of(THREE_LEVEL, &[]));
    [zero_3 / plus, plus / three, zero_3 / three]
}

/// The speed of a GCD under three levels over that on the fewest GCDs.
fn efficiency(micro_batches: usize, gcds: usize) -> f64 {
    let of = |gcds| neox(gcds, micro_batches, &[DEEPSPEED, THREE_LEVEL]);
    of(GCDS[0]) / of(gcds)
}

/// The rows of the table of NeoX-20B.
fn scaling() -> String {
    let of_steps = |micro_batches: usize| {
        let of = |gcds: usize, scheme: &[&str]| neox(gcds, micro_batches, &[DEEPSPEED, scheme]);
        let of_gcds = |gcds: usize| {
            let [zero_3, plus, three] = [ZERO_3, BACKWARD, THREE_LEVEL].map(|scheme| of(gcds, scheme));
            let ratios = [zero_3 / plus, plus / three, zero_3 / three, efficiency(micro_batches, gcds)];
            let cells = ratios.map(times);
            row(&[&[gcds.to_string(), micro_batches.to_string()], &cells[..]].concat())
        };
        GCDS.map(of_gcds).join("\n")
    };
    MICRO_BATCHES.map(of_steps).join("\n")
}

/// How many times as fast as ZeRO-3 ZeRO++ was in a row of its table.
fn published(&(_, _, _, zero_3, plus): &TableRow) -> f64 {
    plus / zero_3
}

/// How many times as fast as ZeRO-3 a scheme is predicted to be on the machine of a row of ZeRO++'s table.
fn table_ratio(&(gigabits, tokens, billions, ..): &TableRow, scheme: &[&str]) -> f64 {
    // The shape of 18B is that of the tutorial. Those of the others are not stated: as many layers of a common width as give
    // their sizes.
    let [layers, hidden, heads] = match billions {
        18 => [40, 6144, 32],
        49 => [60, 8192, 64],
        91 => [112, 8192, 64],
        _ => [171, 8192, 64],
    };
    let micro = tokens / SEQUENCE;
    let sizes = [
        format!("model.layers={layers}"),
        format!("model.hidden={hidden}"),
        format!("model.heads={heads}"),
        "model.vocab=50257".to_owned(),
        format!("batch.sequence={SEQUENCE}"),
        format!("batch.micro={micro}"),
        format!("batch.global={}", micro * GPUS),
        format!("parallel.dp={GPUS}"),
        format!("cluster.links.cluster.bandwidth={}", f64::from(gigabits) * 1e9 / 8.0 / PER_NODE),
    ];
    let [zero_3, own] = [ZERO_3, scheme].map(|scheme| seconds(&sizes, &[DGX_2, DEEPSPEED, scheme]));
    zero_3 / own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_the_docs_is_this_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/three-level.md");
        assert_eq!(page().text, std::fs::read_to_string(path).expect("the page"));
    }

    /// Nothing is fitted to these figures.
    #[test]
    fn zero_plus_plus_is_as_much_faster_as_published() {
        let error = |scheme| errors(&TABLE.map(|row| (table_ratio(&row, scheme), published(&row)))).0;
        let (backward, all) = (error(BACKWARD), error(ALL));
        assert!(backward < 8.0 && backward < all, "{backward} {all}");
        let [plus, ..] = ratios(&EXPERIMENTS[0]);
        assert!((plus / PUBLISHED[0] - 1.0).abs() < 0.05, "{plus}");
        let scaling = efficiency(1, GCDS[GCDS.len() - 1]);
        assert!((scaling / PUBLISHED[3] - 1.0).abs() < 0.06, "{scaling}");
    }
}
