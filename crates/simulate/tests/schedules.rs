//! Schedules against their papers' formulas.

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::Timeline;
use kintsugi_simulate::cost::Costs;
use proptest::prelude::*;

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

/// A second in picoseconds.
const SECOND: u64 = 1_000_000_000_000;

/// A step in which each layer's forward, B and W take this long.
fn timeline(plan: &Plan, costs: [u64; 3]) -> Timeline {
    let [forward, input, weight] = costs.map(|seconds| seconds * SECOND);
    Timeline::with(plan, &Costs::of_layers(plan, forward, input, weight))
}

/// The longest idle time of a stage, if the forward, B and W of a stage take `costs` in total.
fn worst_idle(plan: &Plan, costs: [u64; 3]) -> f64 {
    let layers = 2 * plan.pipeline.virtual_stages as u64;
    let [forward, input, weight] = costs.map(|seconds| seconds * SECOND / layers);
    let timeline = Timeline::with(plan, &Costs::of_layers(plan, forward, input, weight));
    let computes =
        |op: &kintsugi_plan::Op| op.to_string().contains("layer") && !op.to_string().contains("wait");
    let busy = |stage: usize| -> f64 {
        let spans = timeline.stages[stage].iter().filter(|span| computes(&span.op));
        spans.map(|span| span.end - span.start).sum()
    };
    (0..plan.mesh.pp()).map(|stage| timeline.end - busy(stage)).fold(0.0, f64::max)
}

fn assert_close(measured: f64, formula: f64) {
    assert!((measured - formula).abs() < 1e-9, "{measured} is not {formula}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn gpipe_and_1f1b_idle_for_the_other_stages(pp in 1..=6_usize, micro_batches in 1..=12_usize) {
        let formula = (pp - 1) as f64 * 6.0;
        for schedule in ["gpipe", "1f1b"] {
            let plan = pipeline(schedule, pp, micro_batches, 1, &[]);
            assert_close(worst_idle(&plan, [2, 3, 1]), formula);
        }
    }

    #[test]
    fn interleaving_divides_the_bubble(pp in 2..=5_usize, groups in 1..=3_usize, v in 2..=4_usize) {
        let plan = pipeline("interleaved", pp, groups * pp, v, &[]);
        assert_close(worst_idle(&plan, [12, 12, 12]), (pp - 1) as f64 * 36.0 / v as f64);
    }

    #[test]
    fn zero_bubble_hides_the_weight_parts(pp in 1..=6_usize, more in 0..=8_usize) {
        let plan = pipeline("zero-bubble", pp, pp + more, 1, &[]);
        assert_close(worst_idle(&plan, [1, 1, 1]), (pp - 1) as f64);
    }
}

#[test]
fn recomputation_costs_a_forward_and_begins_before_the_gradient_is_here() {
    let plan = pipeline("1f1b", 3, 4, 1, &["memory.recompute=full"]);
    let (other_stages, first_of_two_layers) = (2.0, 0.5);
    assert_close(worst_idle(&plan, [1, 1, 1]), other_stages * (4.0 - first_of_two_layers));
}

#[test]
fn the_bubble_is_the_share_of_waiting_for_other_stages() {
    let plan = pipeline("1f1b", 4, 8, 1, &[]);
    let bubble = timeline(&plan, [1, 1, 1]).bubble;
    assert_close(bubble, 3.0 / (8.0 + 3.0));
}
