//! Pictures and traces of schedules whose device's speed is not known: in unit time.

use std::collections::HashMap;

use kintsugi_draw::{Ink, SpanKind, Trace, TraceSpan, draw, schedule_svg, trace_svg};
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::Timeline;
use proptest::prelude::*;
use proptest::sample::select;

/// The demo as a pipeline of one replica, with two layers in every chunk.
fn pipeline(schedule: &str, pp: usize, micro_batches: usize, virtual_stages: usize, rest: &[&str]) -> Plan {
    let mut sets = vec![
        format!("parallel.schedule={schedule}"),
        format!("parallel.pp={pp}"),
        format!("parallel.virtual_stages={virtual_stages}"),
        format!("model.layers={}", 2 * pp * virtual_stages),
        "parallel.dp=1".to_owned(),
        "parallel.tp=1".to_owned(),
        "batch.micro=1".to_owned(),
        format!("batch.global={micro_batches}"),
    ];
    sets.extend(rest.iter().map(|&set| set.to_owned()));
    ConfigSource::demo().sets(&sets).plan().unwrap_or_else(|error| panic!("{sets:?}: {error}"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn pictures_keep_to_the_width(
        schedule in select(vec!["gpipe", "1f1b", "zero-bubble"]),
        pp in 1..=12_usize,
        micro_batches in 1..=120_usize,
        width in 30..=200_usize,
    ) {
        let plan = pipeline(schedule, pp, micro_batches, 1, &[]);
        let picture = draw(&Timeline::of(&plan), width, Ink::Plain);
        prop_assert!(picture.lines().all(|line| line.chars().count() <= width), "{picture}");
        prop_assert!(picture.lines().count() > pp);
    }
}

fn picture(schedule: &str, pp: usize, micro_batches: usize, ink: Ink) -> String {
    let plan = pipeline(schedule, pp, micro_batches, 1, &[]);
    draw(&Timeline::of(&plan), 72, ink)
}

#[test]
fn a_small_picture_is_whole() {
    let expected = "\
stage 0  F0F1F2F3      B0W0F4B1W1F5B2W2F6B3W3F7B4W4B5W5B6W6B7W7
stage 1    F0F1F2    B0F3B1W0F4B2W1F5B3W2F6B4W3F7B5W4B6W5B7W6W7
stage 2      F0F1  B0F2B1F3B2W0F4B3W1F5B4W2F6B5W3F7B6W4B7W5W6W7
stage 3        F0B0F1B1F2B2F3B3W0F4B4W1F5B5W2F6B6W3F7B7W4W5W6W7
F░ forward   B▒ backward, inputs   W▓ backward, weights   bubble 11.1 %
";
    assert_eq!(picture("zero-bubble", 4, 8, Ink::Plain), expected);
}

#[test]
fn a_long_picture_has_its_ends() {
    let expected = "\
stage 0  F0░░F1░░F2░░                ▒▒ … ▒▒▒▒▒▒    B198▒▒▒▒    B199▒▒▒▒
stage 1      F0░░F1░░        B0▒▒▒▒▒▒░░ … ░░B198▒▒▒▒    B199▒▒▒▒
stage 2          F0░░B0▒▒▒▒▒▒F1░░▒▒▒▒▒▒ … ▒▒F199B199▒▒▒▒
F░ forward   B▒ backward   bubble 1.0 %
";
    assert_eq!(picture("1f1b", 3, 200, Ink::Plain), expected);
}

#[test]
fn the_wait_between_recomputation_and_backward_is_idle() {
    let plan = pipeline("1f1b", 2, 2, 1, &["memory.recompute=full"]);
    let picture = draw(&Timeline::of(&plan), 72, Ink::Plain);
    let expected = "\
stage 0  F0░░F1░░▒▒          B0▒▒▒▒▒▒▒▒▒▒    B1▒▒▒▒▒▒▒▒
stage 1      F0░░B0▒▒▒▒▒▒▒▒▒▒F1░░B1▒▒▒▒▒▒▒▒▒▒
F░ forward   B▒ backward   bubble 30.4 %
";
    assert_eq!(picture, expected);
}

#[test]
fn every_stage_of_a_deep_pipeline_is_seen_at_both_ends() {
    for (pp, micro_batches) in [(16, 64), (32, 256), (64, 64)] {
        let plan = pipeline("1f1b", pp, micro_batches, 1, &[]);
        let picture = draw(&Timeline::of(&plan), 100, Ink::Plain);
        for row in picture.lines().take(pp) {
            let bars = row.split_once("  ").expect("a margin").1;
            let (head, tail) = bars.split_once('…').unwrap_or((bars, bars));
            let drawn = |part: &str| part.chars().any(|c| c == '░' || c == '▒' || c.is_alphanumeric());
            assert!(drawn(head) && drawn(tail), "a blank stage in\n{picture}");
        }
    }
}

#[test]
fn colours_take_the_place_of_letters() {
    let expected = "\
stage 0  \x1b[97;44m0  1  \x1b[0m\x1b[30;43m0     1     \x1b[0m
\x1b[97;44mF \x1b[0m forward   \x1b[30;43mB \x1b[0m backward   bubble 0.0 %
";
    assert_eq!(picture("gpipe", 1, 2, Ink::Colour), expected);
}

#[test]
fn a_trace_has_every_span_that_takes_time() {
    let plan = pipeline("1f1b", 2, 3, 1, &[]);
    let predicted = Trace::predicted(&plan, &Timeline::of(&plan));
    let trace: serde_json::Value = serde_json::from_str(&predicted.to_chrome()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    let computed = complete.iter().filter(|event| event["cat"] == "compute").count();
    assert_eq!(complete.len(), predicted.spans.len());
    assert_eq!(computed, 2 * 2 * 3 * 2, "stages, layers, micro-batches, forward and backward");
    let first = complete.iter().find(|event| event["pid"] == 1 && event["cat"] == "compute").unwrap();
    assert_eq!(first["name"], "forward layer 2, micro-batch 0");
    assert_eq!((first["ts"].as_f64(), first["dur"].as_f64()), (Some(2e6), Some(1e6)));
    let name = events.iter().find(|event| event["name"] == "process_name" && event["pid"] == 1).unwrap();
    assert_eq!(name["args"]["name"], "rank 1, stage 1");
    assert!(first["args"]["flops"].as_u64() > Some(1_000_000));
    assert_eq!(first["args"]["micro"], 0);
    assert_eq!(Trace::from_chrome(&predicted.to_chrome()).map(|read| read.flows), Some(predicted.flows));
    assert!(Trace::from_chrome("{\"traceEvents\": []}").is_none());
}

#[test]
fn transfers_have_rows_of_their_own_with_bytes_and_op() {
    let cluster = ["cluster.preset=h100", "parallel.tp=2", "parallel.dp=2", "sharding.zero=3"];
    let layout = ["parallel.pp=2", "batch.micro=1", "batch.global=4", "precision.compute=bf16"];
    for overlap in ["parallel.overlap_tp=false", "parallel.overlap_tp=true"] {
        let plan = ConfigSource::demo().sets(cluster).sets(layout).set(overlap).plan().expect("a legal plan");
        let predicted = Trace::predicted(&plan, &Timeline::of(&plan));
        let transfers: Vec<_> =
            predicted.spans.iter().filter(|span| span.kind == SpanKind::Transfer).collect();
        assert!(transfers.iter().all(|span| span.bytes > 0 && span.op.is_some() && span.duration > 0.0));
        let with = |name: &str, op: &str| {
            let belongs = |op_of: &Option<String>| op_of.as_ref().is_some_and(|of| of.starts_with(op));
            transfers.iter().filter(|span| span.name == name && belongs(&span.op)).count()
        };
        // Four layers on two stages, two micro-batches for each replica, two sums in each layer.
        let chunks = if overlap.ends_with("true") { 4 } else { 1 };
        assert_eq!(with("all_reduce over tp", "forward layer"), 4 * 2 * 2 * chunks, "{overlap}");
        assert!(with("all_gather over dp", "start gathering") > 0);
        assert!(with("reduce_scatter over dp", "start reducing") > 0);
        assert_eq!(with("send over pp", "start sending"), 4, "both directions, two micro-batches");
        assert_eq!(with("receive over pp", "start receiving"), 4);

        let trace: serde_json::Value = serde_json::from_str(&predicted.to_chrome()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let mut rows: HashMap<(u64, u64), f64> = HashMap::new();
        let mut of_transfers: Vec<_> = events.iter().filter(|event| event["cat"] == "transfers").collect();
        of_transfers.sort_by(|a, b| a["ts"].as_f64().unwrap().total_cmp(&b["ts"].as_f64().unwrap()));
        assert_eq!(of_transfers.len(), transfers.len());
        for event in of_transfers {
            let row = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            let (start, duration) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            let end = rows.insert(row, start + duration).unwrap_or(0.0);
            assert!(start >= end - 1e-6, "two transfers of a row overlap");
        }
        let named = |row: &(u64, u64)| {
            events.iter().any(|event| {
                event["name"] == "thread_name"
                    && (event["pid"].as_u64(), event["tid"].as_u64()) == (Some(row.0), Some(row.1))
                    && event["args"]["name"].as_str().is_some_and(|name| name.starts_with("transfers"))
            })
        };
        assert!(rows.keys().all(named));
        assert_eq!(
            Trace::from_chrome(&predicted.to_chrome()).map(|read| read.spans.len()),
            Some(predicted.spans.len())
        );
    }
}

#[test]
fn arrows_go_from_what_made_a_message_to_what_used_it() {
    let plan = pipeline("1f1b", 3, 2, 1, &["memory.recompute=full"]);
    let trace = Trace::predicted(&plan, &Timeline::of(&plan));
    assert_eq!(trace.flows.len(), 2 * 2 * 2, "borders, micro-batches, activation and gradient");
    for &(from, to) in &trace.flows {
        let (from, to) = (&trace.spans[from], &trace.spans[to]);
        assert_eq!(from.micro, to.micro);
        assert_eq!(from.stage.abs_diff(to.stage), 1);
        let forward = from.kind == SpanKind::Forward;
        assert_eq!(forward, to.stage > from.stage, "{} to {}", from.name, to.name);
        assert!(from.start + from.duration <= to.start + 1e-9 || to.kind == SpanKind::Recompute);
    }
}

#[test]
fn the_schedule_as_svg_has_a_bar_for_every_pass() {
    let plan = pipeline("zero-bubble", 4, 8, 1, &[]);
    let drawn = schedule_svg(&Timeline::of(&plan), "a < b");
    // Forwards, and both parts of backwards; and three in the legend.
    assert_eq!(drawn.matches("<rect").count(), 4 * 8 * 3 + 3);
    assert!(drawn.contains(">W7<") && drawn.contains("a &lt; b") && drawn.contains("bubble 11.1 %"));
}

#[test]
fn a_trace_as_svg_shows_which_part_of_a_transfer_was_waited_for() {
    let span = |rank, kind, start, duration, waited| TraceSpan {
        rank,
        stage: 0,
        name: "all_reduce over dp".to_owned(),
        kind,
        micro: None,
        start,
        duration,
        bytes: 0,
        flops: 0,
        op: None,
        waited,
    };
    let spans = vec![
        span(0, SpanKind::Forward, 0.0, 0.01, None),
        span(0, SpanKind::Transfer, 0.0, 0.02, Some(0.01)),
        span(0, SpanKind::Transfer, 0.005, 0.01, Some(0.0)),
        span(1, SpanKind::Backward, 0.0, 0.02, None),
    ];
    let drawn = trace_svg(&Trace { spans, flows: Vec::new() }, "a < b");
    // The first transfer has two parts; four in the legend.
    assert_eq!(drawn.matches("<rect").count(), 4 + 1 + 4);
    assert!(drawn.contains("a &lt; b") && drawn.contains(">20 ms<"), "{drawn}");
    for row in ["rank 0 compute", "rank 0 transfers", "rank 0 transfers 2", "rank 1 compute"] {
        assert!(drawn.contains(&format!(">{row}<")), "{row}");
    }
}
