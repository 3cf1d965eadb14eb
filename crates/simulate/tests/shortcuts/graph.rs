//! For every layout the graph gives the times of the discrete-event simulation: to the picosecond, and by category.
#![allow(clippy::float_cmp, reason = "a shortcut gives the same bits")]

use std::collections::{BTreeSet, HashMap};

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{Group, Op, Plan, Program, Transfer};
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_simulate::{CompiledStep, StepKey, StepTimer, Timeline};
use kintsugi_spec::Level;
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};

use crate::event_simulation::{Account, simulate};
use crate::layouts::{bases, plan, strategies};

/// Seconds of a step: of kernels, of transfers in blocks, and of waiting, for other stages and by level.
fn full(plan: &Plan, device: &DeviceModel) -> Vec<f64> {
    let costs = StepTimer::new(device).costs(plan);
    let programs: Vec<Program> = (0..plan.mesh.pp()).map(|stage| plan.program(stage)).collect();
    let accounts = simulate(&programs, &costs);
    let end = accounts.iter().map(|account| account.end).max().unwrap_or(0);
    let mean = |of: &dyn Fn(&Account) -> u64| {
        accounts.iter().map(of).sum::<u64>() as f64 * 1e-12 / accounts.len() as f64
    };
    let step = end as f64 * 1e-12 + costs.fixed() as f64 * 1e-12;
    let idle = mean(&|account| account.idle + end - account.end);
    let parts = [step, mean(&|account| account.compute), mean(&|account| account.tensor), idle];
    let exposed = Level::ALL.map(|level| mean(&|account| account.exposed[level]));
    [&parts[..], &exposed].concat()
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
            let parts = [timing.step_s, timing.compute_s, timing.tensor_s, timing.idle_s];
            let parts = [&parts[..], &timing.exposed_s].concat();
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

/// What distinguishes the ops of a training step here: a transfer's name without its unit, layer or stage, and whether it starts.
fn training_kind(op: Op) -> String {
    let first_words = |text: String, words| text.split(' ').take(words).collect::<Vec<_>>().join(" ");
    match op {
        Op::Start(transfer) | Op::Wait(transfer) => {
            let words = if op == Op::Start(transfer) { 2 } else { 3 };
            let axis = match (transfer, transfer.group()) {
                (Transfer::Reduce { .. }, Some(Group::TENSOR)) => " over tp",
                (Transfer::Reduce { .. }, Some(Group::Tied)) => " tied",
                _ => "",
            };
            first_words(op.to_string(), words) + axis
        }
        Op::Step(_)
        | Op::Load { .. }
        | Op::Compute { .. }
        | Op::Matrices { .. }
        | Op::Release { .. }
        | Op::Discard { .. } => first_words(op.to_string(), 1),
        Op::Feed { .. } | Op::Choose { .. } => panic!("a training step has {op}"),
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
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for layout in layouts {
        let plan = ConfigSource::demo().sets(mesh).sets(layout).plan().expect("a legal layout");
        let device =
            DeviceModel::new(&plan.cluster.device, &plan.framework).expect("Frontier's speed is known");
        let costs = StepTimer::new(&device).costs(&plan);
        let (mut compute, mut links) = (0, 0);
        for stage in 0..plan.mesh.pp() {
            for op in plan.program(stage).ops {
                seen.insert(training_kind(op));
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
