//! A cached prediction is that of the plan itself, and not of another plan that its key does not distinguish.

use std::collections::HashMap;

use kintsugi_plan::config::{ShardingChoice, Strategy};
use kintsugi_plan::{Axis, Plan, SecondaryUse, Sharding};
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_simulate::{CompiledStep, PeakMemory, StepKey, StepTimer, time};
use kintsugi_tensor::Device;
use proptest::prelude::{ProptestConfig, any, prop_assert_eq, proptest};

use crate::layouts::{bases, plan, strategies};

/// A layout, and the layouts that have one choice of `other` each: a key that forgets this choice does not distinguish them.
fn one_choice_apart(layout: (Strategy, usize), other: (Strategy, usize)) -> Vec<(Strategy, usize)> {
    let ((one, batches), (other, other_batches)) = (layout, other);
    let Strategy { mesh, micro, schedule, virtual_stages, split, sequence_parallel, sharding, recompute } =
        other;
    let ShardingChoice { weights, gradients, states, secondary, gather, reduce, quantized } = sharding;
    let sharded = |sharding| Strategy { sharding, ..one };
    let own = one.sharding;
    let choices = [
        one,
        Strategy { micro, ..one },
        Strategy { schedule, ..one },
        Strategy { schedule, virtual_stages, ..one },
        Strategy { virtual_stages, ..one },
        Strategy { split, ..one },
        Strategy { sequence_parallel, ..one },
        Strategy { recompute, ..one },
        sharded(sharding),
        sharded(ShardingChoice { weights, ..own }),
        sharded(ShardingChoice { gradients, ..own }),
        sharded(ShardingChoice { states, ..own }),
        sharded(ShardingChoice { secondary, ..own }),
        sharded(ShardingChoice { gather, ..own }),
        sharded(ShardingChoice { reduce, ..own }),
        sharded(ShardingChoice { quantized, ..own }),
    ];
    let meshes = Axis::ALL.map(|axis| Strategy { mesh: one.mesh.with(axis, mesh.size(axis)), ..one });
    let layouts = choices.into_iter().chain(meshes).map(|strategy| (strategy, batches));
    layouts.chain([(one, other_batches)]).collect()
}

/// The plan whose secondary shard, if it has one, serves only the backward. No strategy chooses that.
fn for_the_backward(plan: &Plan) -> Plan {
    let has_secondary = plan.sharding.secondary > 1;
    let secondary_use = if has_secondary { SecondaryUse::Backward } else { SecondaryUse::All };
    Plan { sharding: Sharding { secondary_use, ..plan.sharding }, ..plan.clone() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn cached_predictions_equal_fresh_ones(
        base in bases(),
        layout in strategies(),
        other in strategies(),
        cores in any::<bool>(),
        framework in any::<bool>(),
    ) {
        let mut base = base;
        // Ranks that share cores, and a framework with memory of its own, have results that others do not have.
        base.cluster.cores = cores.then_some(6);
        base.framework.parameter_bytes = if framework { 2.0 } else { 0.0 };
        let speed = DeviceModel::new(&base.cluster.device, &base.framework).expect("Frontier's speed is known");
        let fresh_peaks = || PeakMemory::new(Device::Cpu { threads: 1 });
        let (timer, peaks) = (StepTimer::new(&speed), fresh_peaks());
        let mut steps: HashMap<StepKey, CompiledStep> = HashMap::new();
        let layouts = one_choice_apart(layout, other);
        let plans = layouts.iter().filter_map(|layout| plan(&base, layout));
        let plans: Vec<Plan> = plans.flat_map(|plan| [for_the_backward(&plan), plan]).collect();
        for plan in &plans {
            let step = steps.entry(StepKey::of(plan)).or_insert_with(|| CompiledStep::new(plan));
            prop_assert_eq!(Some(timer.time_compiled(plan, step)), time(plan), "{}", plan.to_toml());
            prop_assert_eq!(peaks.resident(plan), fresh_peaks().resident(plan), "{}", plan.to_toml());
            prop_assert_eq!(peaks.of(plan), fresh_peaks().of(plan), "{}", plan.to_toml());
        }
    }
}
