//! Runs over emulated links: what is computed between the start of a transfer and its wait, and what the links change.
//!
//! No measured time decides, except that no step is faster than its links. `scripts/check-overlap` measures how much is hidden.

use kintsugi_engine::{
    Event, MeasuredSpan, MemoryChoice, SpanKind, StepReport, TrainOptions, TrainOutcome, dataset, train,
};
use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Computation, Op, Plan};

/// Bytes per second of every emulated link.
const BANDWIDTH: f64 = 2e7;

/// A name, the settings, and the operation and group whose transfers overlap.
const CASES: [(&str, &[&str], &str); 4] = [
    ("ZeRO-1", &["parallel.dp=2", "sharding.zero=1"], "reduce_scatter over dp"),
    ("ZeRO-3", &["parallel.dp=2", "sharding.zero=3", "parallel.prefetch=2"], "all_gather over dp"),
    ("pipeline", &["parallel.pp=2"], "receive over pp"),
    ("mesh", &["parallel.tp=2", "parallel.dp=2", "cluster.per_node=2"], "all_reduce over dp"),
];

fn plan(settings: &[&str], more: &[&str]) -> Plan {
    let small = [
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.dp=1",
        "sharding.zero=0",
        "model.hidden=32",
        "model.ffn=64",
        "batch.sequence=16",
        "batch.micro=1",
        "batch.global=4",
        "run.steps=3",
        "run.eval_every=0",
    ];
    ConfigSource::demo().sets(small).sets(settings).sets(more).plan().expect("a legal config")
}

/// The steps of a run and its outcome, with a trace of the second step.
fn run(plan: &Plan) -> (Vec<StepReport>, TrainOutcome) {
    let options = TrainOptions { trace_step: Some(1), ..TrainOptions::new(MemoryChoice::Heap) };
    let mut reports = Vec::new();
    let outcome = train(plan, &*dataset(plan).expect("its data"), &options, |event| {
        if let Event::Step(report) = event {
            reports.push(report.clone());
        }
    });
    (reports, outcome.expect("it trains").expect("rank 0 is here"))
}

fn bits(reports: &[StepReport]) -> Vec<[u64; 2]> {
    reports.iter().map(|report| [report.loss, report.grad_norm].map(f64::to_bits)).collect()
}

fn links() -> Vec<String> {
    ["node", "cluster"]
        .iter()
        .flat_map(|level| {
            let key = format!("cluster.emulated.{level}");
            [format!("{key}.bandwidth={BANDWIDTH}"), format!("{key}.latency=1e-4")]
        })
        .collect()
}

/// How many forward and backward ops a rank runs between the start of its transfers of this name and their waits.
fn computed_beside(spans: &[MeasuredSpan], wanted: &str) -> usize {
    let transfers = spans.iter().filter_map(|span| match &span.kind {
        SpanKind::Transfer { name, bytes, waited, .. } if name == wanted => {
            assert!(*bytes > 0, "{name} has bytes");
            let alone = span.duration.saturating_sub(waited.expect("on a CPU"));
            Some((span.rank, span.start, span.start + alone))
        }
        _ => None,
    });
    let is_pass = |span: &&MeasuredSpan| matches!(span.kind, SpanKind::Op(Op::Compute { .. }));
    let inside = |(rank, start, waits)| {
        let passes = spans.iter().filter(is_pass).filter(move |span| span.rank == rank);
        passes.filter(|span| span.start >= start && span.start + span.duration <= waits).count()
    };
    transfers.map(inside).sum()
}

#[test]
fn passes_run_between_start_and_wait_and_links_change_only_the_time() {
    let links = links();
    let links: Vec<&str> = links.iter().map(String::as_str).collect();
    for (name, settings, transfer) in CASES {
        let [overlap, in_turn] = ["parallel.overlap=true", "parallel.overlap=false"];
        let (without_links, _) = run(&plan(settings, &[overlap]));
        for overlaps in [true, false] {
            let setting = if overlaps { overlap } else { in_turn };
            let (reports, outcome) = run(&plan(settings, &[&[setting], &links[..]].concat()));
            assert_eq!(bits(&reports), bits(&without_links), "{name}, {setting}");
            let beside = computed_beside(&outcome.spans, transfer);
            assert_eq!(beside > 0, overlaps, "{name}, {setting}: {beside} passes beside {transfer}");
        }
    }
}

#[test]
fn no_step_is_faster_than_its_links() {
    let links = links();
    for (name, settings, _) in CASES {
        let links: Vec<&str> = links.iter().map(String::as_str).collect();
        let plan = plan(settings, &links);
        let (reports, outcome) = run(&plan);
        let sent: u64 = outcome.measured.comm_bytes.values().flat_map(|operations| operations.values()).sum();
        // Half of the bytes at least leave one of two ranks over one of its links.
        let seconds = sent as f64 / plan.mesh.ranks() as f64 / 2.0 / BANDWIDTH;
        for report in reports {
            assert!(report.step_s >= seconds, "{name}: {} s, and its links take {seconds} s", report.step_s);
        }
    }
}

#[test]
fn the_chunks_of_a_tensor_parallel_sum_are_transfers_of_their_own() {
    let links = links();
    let counts = [false, true].map(|overlap| {
        let setting = format!("parallel.overlap_tp={overlap}");
        let more: Vec<&str> = links.iter().map(String::as_str).chain([setting.as_str()]).collect();
        let (_, outcome) = run(&plan(&["parallel.tp=2"], &more));
        let is_sum = |span: &&MeasuredSpan| {
            let SpanKind::Transfer { name, op, .. } = &span.kind else { return false };
            op.computation() == Some(Computation::Forward) && name == "all_reduce over tp"
        };
        outcome.spans.iter().filter(is_sum).count()
    });
    assert!(counts[0] > 0 && counts[1] > 2 * counts[0], "{counts:?}");
}
