//! For every layout the graph gives the times of the discrete-event simulation: to the picosecond, and by category.
#![allow(clippy::float_cmp, reason = "a shortcut gives the same bits")]

use std::collections::{BTreeSet, HashMap};

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{BackwardPart, Group, Op, Plan, Program};
use kintsugi_simulate::cost::{CostCache, DeviceModel};
use kintsugi_simulate::{CompiledStep, StepKey, StepTimer, Timeline};
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};

use crate::event_simulation::{Account, simulate};
use crate::layouts::{bases, plan, strategies};

/// Seconds of a step: of kernels, of transfers in blocks, and of waiting, by level and for other stages.
fn full(plan: &Plan, device: &DeviceModel) -> [f64; 7] {
    let costs = CostCache::new(device).of(plan);
    let programs: Vec<Program> = (0..plan.mesh.pp()).map(|stage| plan.program(stage)).collect();
    let accounts = simulate(&programs, &costs);
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
    fn the_graph_equals_the_event_simulation(base in bases(), layouts in vec(strategies(), 12), more in 1..=12_usize) {
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
        let programs = (0..plan.mesh.pp()).map(|stage| plan.program(stage));
        for (spans, program) in timeline.stages.iter().zip(programs) {
            // The spans follow each other without gaps, in the order of the program.
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

/// The kind of an op of a training step; `None` for an op that no training step has.
fn training_kind(op: Op) -> Option<&'static str> {
    match op {
        Op::Begin => Some("begin"),
        Op::Load { .. } => Some("load"),
        Op::Forward { .. } => Some("forward"),
        Op::Recompute { .. } => Some("recompute"),
        Op::Backward { part: BackwardPart::Both, .. } => Some("backward"),
        Op::Backward { part: BackwardPart::Input, .. } => Some("backward, input"),
        Op::Backward { part: BackwardPart::Weight, .. } => Some("backward, weight"),
        Op::GatherStart { .. } => Some("gather"),
        Op::GatherWait { .. } => Some("gathered"),
        Op::Release { .. } => Some("release"),
        Op::Discard { .. } => Some("discard"),
        Op::ReduceStart { phase, .. } => Some(match phase.over {
            Group::TENSOR => "reduce over tp",
            Group::Tied => "reduce tied",
            Group::Along(..) => "reduce over dp",
        }),
        Op::ReduceWait { phase, .. } => Some(match phase.over {
            Group::TENSOR => "reduced over tp",
            Group::Tied => "reduced tied",
            Group::Along(..) => "reduced over dp",
        }),
        Op::SendStart { .. } => Some("send"),
        Op::SendWait { .. } => Some("sent"),
        Op::ReceiveStart { .. } => Some("receive"),
        Op::ReceiveWait { .. } => Some("received"),
        Op::Measure => Some("measure"),
        Op::NormStart { .. } => Some("norm"),
        Op::NormWait { .. } => Some("normed"),
        Op::Clip => Some("clip"),
        Op::Step => Some("step"),
        Op::RefreshStart { .. } => Some("refresh"),
        Op::RefreshWait { .. } => Some("refreshed"),
        Op::Evaluate { .. }
        | Op::Feed { .. }
        | Op::Decode { .. }
        | Op::Choose { .. }
        | Op::ShareStart
        | Op::ShareWait => None,
    }
}

const KINDS: usize = 28;

#[test]
fn every_kind_of_op_adds_what_it_costs() {
    let mesh =
        ["cluster.preset=frontier", "parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "batch.global=32"];
    let layouts: [&[&str]; 5] = [
        &["parallel.dp=16", "batch.micro=1", "sharding.preset=zero++"],
        &["sharding.zero=3", "parallel.sequence_parallel=true", "memory.recompute=full"],
        &["sharding.zero=1", "parallel.schedule=zero-bubble"],
        &["sharding.zero=2", "parallel.overlap=false"],
        // Ranks that are threads copy what they send, so a transfer occupies a core.
        &["sharding.zero=1", "cluster.cores=64"],
    ];
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for layout in layouts {
        let plan = ConfigSource::demo().sets(mesh).sets(layout).plan().expect("a legal layout");
        let device =
            DeviceModel::new(&plan.cluster.device, &plan.framework).expect("Frontier's speed is known");
        let costs = CostCache::new(&device).of(&plan);
        let (mut compute, mut links) = (0, 0);
        for stage in 0..plan.mesh.pp() {
            for op in plan.program(stage).ops {
                seen.insert(training_kind(op).unwrap_or_else(|| panic!("a training step has {op}")));
                let cost = costs.of(stage, op);
                compute += cost.compute;
                links += cost.links;
            }
        }
        let timing = StepTimer::new(&device).time(&plan);
        let mean = |time: u64| time as f64 * 1e-12 / plan.mesh.pp() as f64;
        assert_eq!((timing.compute_s, timing.tensor_s), (mean(compute), mean(links)), "{layout:?}");
    }
    assert_eq!(seen.len(), KINDS, "{seen:?}");
}
