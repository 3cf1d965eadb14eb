//! The graph gives every layout the times of the discrete-event player: every picosecond, and what it went into.
#![allow(clippy::float_cmp, reason = "a shortcut gives the same bits")]

use std::collections::HashMap;

use kintsugi_plan::{Plan, Program};
use kintsugi_simulate::cost::{CostCache, DeviceModel};
use kintsugi_simulate::{CompiledStep, StepKey, StepTimer, Timeline};
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};

use crate::layouts::{bases, plan, strategies};
use crate::player::{Account, play};

/// Seconds of a step, of kernels, of transfers in blocks, and of waiting: for each level and for other stages.
fn full(plan: &Plan, device: &DeviceModel) -> [f64; 7] {
    let costs = CostCache::new(device).of(plan);
    let programs: Vec<Program> = (0..plan.mesh.pp).map(|stage| plan.program(stage)).collect();
    let accounts = play(&programs, &costs);
    let end = accounts.iter().map(|account| account.end).max().unwrap_or(0);
    let mean = |of: &dyn Fn(&Account) -> u64| {
        accounts.iter().map(of).sum::<u64>() as f64 * 1e-12 / accounts.len() as f64
    };
    [
        end as f64 * 1e-12 + costs.fixed() as f64 * 1e-12,
        mean(&|account| account.compute),
        mean(&|account| account.tensor),
        mean(&|account| account.exposed[0]),
        mean(&|account| account.exposed[1]),
        mean(&|account| account.exposed[2]),
        mean(&|account| account.idle + end - account.end),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn the_graph_equals_the_player(base in bases(), layouts in vec(strategies(), 12), more in 1..=12_usize) {
        let device = DeviceModel::new(&base.cluster.device, &base.framework).expect("Frontier's speed is known");
        let timer = StepTimer::new(&device);
        let mut compiled: HashMap<StepKey, CompiledStep> = HashMap::new();
        for plan in layouts.iter().filter_map(|layout| plan(&base, layout)) {
            let plan = plan.with_micro_batches(plan.micro_batches() * more);
            let step = compiled.entry(StepKey::of(&plan)).or_insert_with(|| CompiledStep::new(&plan));
            let timing = timer.time_compiled(&plan, step);
            let [package, node, cluster] = timing.exposed_s;
            let parts = [timing.step_s, timing.compute_s, timing.tensor_s, package, node, cluster, timing.idle_s];
            prop_assert_eq!(parts, full(&plan, &device), "{}", plan.to_toml());
        }
    }

    #[test]
    fn the_spans_of_a_step_add_up_to_its_time(base in bases(), layout in strategies()) {
        let Some(plan) = plan(&base, &layout) else { return Ok(()) };
        let timeline = Timeline::of(&plan);
        let programs = (0..plan.mesh.pp).map(|stage| plan.program(stage));
        for (spans, program) in timeline.stages.iter().zip(programs) {
            // One after the other, without gaps, in the order of the program.
            let mut ops = program.ops.iter();
            let mut now = 0.0;
            for span in spans {
                prop_assert_eq!(span.start, now);
                prop_assert!(ops.any(|op| *op == span.op), "{} is not next", span.op);
                now = span.end;
            }
            prop_assert!(now <= timeline.end);
        }
    }
}
