//! No step is shorter than its bounds, and none takes less energy.

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_simulate::{Consumption, StepTimer, time};
use proptest::prelude::{ProptestConfig, any, prop_assert, proptest};

use crate::layouts::{bases, plan, strategies};

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn no_step_is_shorter_than_its_bounds(
        base in bases(),
        layout in strategies(),
        fills in 1..=3_usize,
        cores in any::<bool>(),
        links in 0..=2_usize,
    ) {
        let mut base = base;
        base.framework.fills = fills;
        base.cluster.cores = cores.then_some(6);
        // Slow kernels, or slow links between nodes: what takes longest is not always the same.
        base.framework.between_nodes = [1.0, 0.01, 0.0001][links];
        let device = DeviceModel::new(&base.cluster.device, &base.framework).expect("Frontier's speed is known");
        let timer = StepTimer::new(&device);
        if let Some(plan) = plan(&base, &layout) {
            let timing = time(&plan).expect("Frontier's speed is known");
            for bound in [timer.bound_of_passes(&plan), timer.bound(&plan)] {
                prop_assert!(bound.step_s <= timing.step_s, "{bound:?} {timing:?} {}", plan.to_toml());
                prop_assert!(bound.compute_s <= timing.compute_s, "{bound:?} {timing:?} {}", plan.to_toml());
                let joules = Consumption::new(&plan, &timing).map(|used| used.joules);
                let least = Consumption::least_joules(&plan, bound);
                prop_assert!(least <= joules, "{least:?} {joules:?} {}", plan.to_toml());
            }
        }
    }
}

/// The bound of a plan, as a share of its time.
fn share(sets: &[&str]) -> f64 {
    let common =
        ["model.preset=gpt-22b", "cluster.preset=frontier", "precision.compute=fp16", "batch.global=128"];
    let source = ConfigSource::text("").sets(common).sets(["batch.sequence=2048", "memory.recompute=full"]);
    let plan: Plan = source.sets(sets).plan().expect("a right configuration");
    let device = DeviceModel::new(&plan.cluster.device, &plan.framework).expect("Frontier's speed is known");
    StepTimer::new(&device).bound(&plan).step_s / time(&plan).expect("a known speed").step_s
}

#[test]
fn bounds_are_near_the_time() {
    let pipeline = ["parallel.tp=2", "parallel.pp=8", "parallel.dp=2"];
    for schedule in [
        &["parallel.schedule=1f1b"][..],
        &["parallel.schedule=interleaved", "parallel.virtual_stages=3"],
        &["parallel.schedule=gpipe", "sharding.zero=1"],
    ] {
        let share = share(&[&pipeline, schedule].concat());
        assert!((0.95..=1.0).contains(&share), "{schedule:?}: {share}");
    }
    let transfers = share(&["parallel.dp=32", "sharding.zero=3", "sharding.reduce=micro-batch"]);
    assert!((0.5..=1.0).contains(&transfers), "{transfers}");
}
