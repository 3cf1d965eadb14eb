//! The clock says of every layout what the full play says: every picosecond, and what it went into.
#![allow(clippy::float_cmp, reason = "a shortcut gives the same bits")]

use std::collections::HashMap;

use kintsugi_plan::{Plan, Program};
use kintsugi_simulate::time::{Account, Costs, DeviceModel, play};
use kintsugi_simulate::{Clock, Score, ScoreKey};
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, prop_assert_eq, proptest};

use crate::layouts::{bases, plan, strategies};

/// Seconds of a step, of kernels, of transfers in blocks, and of waiting: for each level and for other stages.
fn full(plan: &Plan, model: &DeviceModel) -> [f64; 7] {
    let costs = Costs::new(plan, model);
    let programs: Vec<Program> = (0..plan.mesh.pp).map(|stage| plan.program(stage)).collect();
    let accounts = play(&programs, &costs);
    let end = accounts.iter().map(|account| account.end).max().unwrap_or(0);
    let mean = |of: &dyn Fn(&Account) -> u64| {
        accounts.iter().map(of).sum::<u64>() as f64 * 1e-12 / accounts.len() as f64
    };
    [
        end as f64 * 1e-12 + costs.fixed as f64 * 1e-12,
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
    fn the_clock_equals_the_full_play(base in bases(), layouts in vec(strategies(), 12), more in 1..=12_usize) {
        let model = DeviceModel::new(&base.cluster.device, &base.framework).expect("Frontier's speed is known");
        let clock = Clock::new(&model);
        let mut groups: HashMap<ScoreKey, Vec<Plan>> = HashMap::new();
        for plan in layouts.iter().filter_map(|layout| plan(&base, layout)) {
            let plan = plan.with_micro_batches(plan.micro_batches() * more);
            groups.entry(ScoreKey::of(&plan)).or_default().push(plan);
        }
        let timed = groups.into_values().flat_map(|plans| {
            let times = clock.times(&plans, &Score::of(&plans[0]));
            plans.into_iter().zip(times)
        });
        for (plan, quick) in timed {
            let [package, node, cluster] = quick.exposed_s;
            let quick = [quick.step_s, quick.compute_s, quick.tensor_s, package, node, cluster, quick.idle_s];
            prop_assert_eq!(quick, full(&plan, &model), "{}", plan.to_toml());
        }
    }
}
