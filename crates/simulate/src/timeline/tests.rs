//! Schedules against their papers' formulas, and pictures and traces of them.

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Block, Message, MessageKind, Op, Plan, Program};
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

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

fn programs(plan: &Plan) -> Vec<Program> {
    (0..plan.mesh.pp).map(|stage| plan.program(stage)).collect()
}

/// The idle time of the stage that idles most, where a stage's forward, B and W take `costs` in all.
fn worst_idle(plan: &Plan, [forward, input, weight]: [f64; 3]) -> f64 {
    let layers = (2 * plan.pipeline.virtual_stages) as f64;
    let timeline = play(plan, &Costs::layers(forward / layers, input / layers, weight / layers)).unwrap();
    (0..plan.mesh.pp).map(|stage| timeline.idle(stage)).fold(0.0, f64::max)
}

fn assert_close(measured: f64, formula: f64) {
    assert!((measured - formula).abs() < 1e-9, "{measured} is not {formula}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn the_bubble_of_short_plays_is_that_of_the_whole_step(
        schedule in select(vec!["gpipe", "1f1b", "interleaved", "zero-bubble"]),
        pp in 1..=5_usize,
        periods in 1..=12_usize,
        layers in 0..=3_usize,
        costs in (1..=3_u8, 1..=3_u8, 1..=3_u8),
    ) {
        let (pp, v) = if schedule == "interleaved" { (pp.max(2), 2) } else { (pp, 1) };
        let layers = format!("model.layers={}", 2 * pp * v + layers);
        let plan = pipeline(schedule, pp, periods * pp * 2, v, &[&layers, "memory.recompute=full"]);
        let costs = Costs::layers(costs.0.into(), costs.1.into(), costs.2.into());
        assert_close(bubble(&plan, &costs).unwrap(), play(&plan, &costs).unwrap().bubble());
    }

    #[test]
    fn no_schedule_deadlocks_where_sends_end_when_taken(
        schedule in select(vec!["gpipe", "1f1b", "interleaved", "zero-bubble"]),
        pp in 1..=6_usize,
        micro_batches in 1..=12_usize,
        v in 2..=3_usize,
        overlap in any::<bool>(),
        tied in any::<bool>(),
        recompute in select(vec!["none", "full"]),
        evaluated in 1..=9_usize,
    ) {
        let (pp, v) = if schedule == "interleaved" { (pp.max(2), v) } else { (pp, 1) };
        let micro_batches = if v > 1 { micro_batches.next_multiple_of(pp) } else { micro_batches };
        let rest = [
            &*format!("parallel.overlap={overlap}"),
            &*format!("model.tied={tied}"),
            &*format!("memory.recompute={recompute}"),
        ];
        let plan = pipeline(schedule, pp, micro_batches, v, &rest);
        let evaluations: Vec<Program> = (0..pp).map(|stage| plan.evaluation(stage, evaluated)).collect();
        let costs = Costs::layers(1.0, 1.0, 1.0);
        for programs in [programs(&plan), evaluations] {
            let played = play_programs(&programs, |_, op| costs.of(op), 0.0, SendEnds::WhenTaken);
            prop_assert!(played.is_ok(), "{}", played.unwrap_err());
        }
    }

    #[test]
    fn gpipe_and_1f1b_idle_for_the_other_stages(pp in 1..=6_usize, micro_batches in 1..=12_usize) {
        let formula = (pp - 1) as f64 * (2.0 + 3.0 + 1.0);
        for schedule in ["gpipe", "1f1b"] {
            let plan = pipeline(schedule, pp, micro_batches, 1, &[]);
            assert_close(worst_idle(&plan, [2.0, 3.0, 1.0]), formula);
        }
    }

    #[test]
    fn interleaving_divides_the_bubble(pp in 2..=5_usize, groups in 1..=3_usize, v in 2..=4_usize) {
        let plan = pipeline("interleaved", pp, groups * pp, v, &[]);
        assert_close(worst_idle(&plan, [1.0, 1.0, 1.0]), (pp - 1) as f64 * 3.0 / v as f64);
    }

    #[test]
    fn zero_bubble_hides_the_weight_parts(pp in 1..=6_usize, more in 0..=8_usize) {
        let plan = pipeline("zero-bubble", pp, pp + more, 1, &[]);
        assert_close(worst_idle(&plan, [1.0, 1.0, 1.0]), (pp - 1) as f64);
    }

    #[test]
    fn pictures_keep_to_the_width(
        schedule in select(vec!["gpipe", "1f1b", "zero-bubble"]),
        pp in 1..=12_usize,
        micro_batches in 1..=120_usize,
        width in 30..=200_usize,
    ) {
        let plan = pipeline(schedule, pp, micro_batches, 1, &[]);
        let picture = draw(&play(&plan, &Costs::layers(1.0, 1.0, 1.0)).unwrap(), width, Ink::Plain);
        prop_assert!(picture.lines().all(|line| line.chars().count() <= width), "{picture}");
        prop_assert!(picture.lines().count() > pp);
    }
}

#[test]
fn recomputation_costs_a_forward_and_begins_before_the_gradient_is_here() {
    let plan = pipeline("1f1b", 3, 4, 1, &["memory.recompute=full"]);
    let (other_stages, first_of_two_layers) = (2.0, 0.5);
    assert_close(worst_idle(&plan, [1.0, 1.0, 1.0]), other_stages * (4.0 - first_of_two_layers));
}

#[test]
fn messages_that_travel_lengthen_the_fill_and_the_drain() {
    let plan = pipeline("gpipe", 3, 4, 1, &[]);
    let at_once = play(&plan, &Costs::layers(1.0, 1.0, 1.0)).unwrap().makespan;
    let costs = Costs { message: 0.25, ..Costs::layers(1.0, 1.0, 1.0) };
    assert_close(play(&plan, &costs).unwrap().makespan, at_once + 4.0 * 0.25);
}

#[test]
fn a_deadlock_names_stages_and_ops() {
    let message = |peer| Message { kind: MessageKind::Activation, block: Block::Layer(1), micro: 0, peer };
    let exchange = |stage: usize| {
        let message = message(1 - stage);
        let ops = vec![
            Op::SendStart { message },
            Op::SendWait { message },
            Op::ReceiveStart { message },
            Op::ReceiveWait { message },
        ];
        Program { stage, ops }
    };
    let error = play_programs(&[exchange(0), exchange(1)], |_, _| 0.0, 0.0, SendEnds::WhenTaken).unwrap_err();
    assert_eq!(
        error.to_string(),
        "deadlock: stage 0 is in \"wait for sent input of layer 1, micro-batch 0, stage 1\"; \
         stage 1 is in \"wait for sent input of layer 1, micro-batch 0, stage 0\""
    );
}

fn picture(schedule: &str, pp: usize, micro_batches: usize, ink: Ink) -> String {
    let plan = pipeline(schedule, pp, micro_batches, 1, &[]);
    draw(&play(&plan, &Costs::layers(1.0, 1.0, 1.0)).unwrap(), 72, ink)
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
    let picture = draw(&play(&plan, &Costs::layers(1.0, 1.0, 1.0)).unwrap(), 72, Ink::Plain);
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
        let picture = draw(&play(&plan, &Costs::layers(1.0, 1.0, 1.0)).unwrap(), 100, Ink::Plain);
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
    let timeline = play(&plan, &Costs::layers(1.0, 1.0, 1.0)).unwrap();
    let spans = timeline.trace(4);
    let trace: serde_json::Value = serde_json::from_str(&chrome(&spans)).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    let computed = complete.iter().filter(|event| event["cat"] == "compute").count();
    assert_eq!(complete.len(), spans.len());
    assert_eq!(computed, 2 * 2 * 3 * 2, "stages, layers, micro-batches, forward and backward");
    let first = complete.iter().find(|event| event["pid"] == 4 && event["cat"] == "compute").unwrap();
    assert_eq!(first["name"], "forward layer 2, micro-batch 0");
    assert_eq!((first["ts"].as_f64(), first["dur"].as_f64()), (Some(2e6), Some(1e6)));
    let name = events.iter().find(|event| event["name"] == "process_name" && event["pid"] == 4).unwrap();
    assert_eq!(name["args"]["name"], "rank 4, stage 1");
}
