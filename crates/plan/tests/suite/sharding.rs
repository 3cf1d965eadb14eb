//! Properties of programs under random layouts: weights are gathered before they are read, gradients are reduced after
//! they are written, and the step ends in order.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::{computes, layouts, plan, programs};
use kintsugi_plan::{
    BackwardPart, Block, Computation, Group, Op, Phase, PhaseKind, Plan, Program, SecondaryUse, StepOp,
    Transfer, Unit, When,
};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn weights_are_gathered_before_they_are_read(sets in layouts(), evaluated in 1..8_usize) {
        let plan = plan(&sets);
        for stage in 0..plan.mesh.pp() {
            for program in [plan.program(stage), plan.evaluation(stage, evaluated)] {
                weights_are_gathered(&plan, &program);
                weights_are_kept_only_for_a_near_use(&plan, &program);
            }
        }
    }

    #[test]
    fn gradients_are_reduced_after_they_are_written(sets in layouts()) {
        let plan = plan(&sets);
        for program in programs(&plan) {
            for unit in plan.stage_units(program.stage) {
                unit_is_reduced(&plan, &program, unit);
            }
            outstanding_gradients_are_few(&plan, &program);
        }
    }

    #[test]
    fn the_step_ends_in_order(sets in layouts()) {
        let plan = plan(&sets);
        for program in programs(&plan) {
            let measure = program.ops.iter().position(|op| *op == Op::Step(StepOp::Measure)).expect("a step is measured");
            let late = |op: &Op| matches!(op, Op::Wait(Transfer::Send(_) | Transfer::Reduce { .. })) || computes(op);
            prop_assert!(!program.ops[measure..].iter().any(late));
            let mut expected = vec![Op::Step(StepOp::Measure)];
            for axis in plan.norm_axes() {
                expected.extend(Op::start_and_wait(Transfer::Norm { axis }));
            }
            expected.extend([Op::Step(StepOp::Clip), Op::Step(StepOp::Update)]);
            let (tail, refresh) = program.ops[measure..].split_at(expected.len());
            prop_assert_eq!(tail, expected.as_slice());
            // Every unit is refreshed phase by phase, each started and waited for.
            let phases = plan.sharding.refreshes();
            let units = plan.stage_units(program.stage);
            prop_assert_eq!(refresh.len(), 2 * phases.len() * units.len());
            prop_assert_eq!(phases.is_empty(), plan.sharding.states == plan.sharding.weights);
            for unit in units {
                let of_unit = |op: &&Op| {
                    matches!(op.transfer(), Some(Transfer::Refresh { .. })) && op.unit() == Some(unit)
                };
                let found: Vec<Op> = refresh.iter().filter(of_unit).copied().collect();
                let each = |&phase| Op::start_and_wait(Transfer::Refresh { unit, phase });
                prop_assert_eq!(found, phases.iter().flat_map(each).collect::<Vec<_>>());
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Weights {
    Sharded,
    /// This phase is under way, and the gather began before this computation.
    Gathering(usize, usize),
    /// This many phases are done, and the gather began before this computation.
    Gathered(usize, usize),
    Whole,
}

/// The units whose weights an op reads.
fn read(plan: &Plan, op: &Op) -> Vec<Unit> {
    match *op {
        Op::Compute { kind: Computation::Backward(BackwardPart::Weight), .. } => vec![],
        Op::Compute { block, .. } => plan.block_units(block),
        _ => vec![],
    }
}

fn weights_are_gathered(plan: &Plan, program: &Program) {
    let sharding = &plan.sharding;
    let sharded = sharding.weights > 1;
    let (first, later) = (sharding.gathers(), sharding.later_gathers());
    let units = plan.stage_units(program.stage);
    let mut state: BTreeMap<Unit, Weights> = units.iter().map(|&unit| (unit, Weights::Sharded)).collect();
    let mut secondary: BTreeSet<Unit> = BTreeSet::new();
    let (mut done, mut gathers) = (0, 0);
    // Whether the latest gather of a unit filled a secondary shard, until an op reads what it gathered; and the units read so far.
    let mut filled: BTreeMap<Unit, bool> = BTreeMap::new();
    let mut used: BTreeSet<Unit> = BTreeSet::new();
    for op in &program.ops {
        match *op {
            Op::Start(Transfer::Gather { unit, phase }) => {
                let from_secondary = secondary.contains(&unit);
                let phases = if from_secondary && later.contains(&phase) { &later } else { &first };
                let next = match state[&unit] {
                    Weights::Sharded => Weights::Gathering(0, done),
                    Weights::Gathered(number, since) => Weights::Gathering(number, since),
                    other => panic!("{op} while it is {other:?}"),
                };
                let Weights::Gathering(number, _) = next else { unreachable!() };
                assert_eq!(phases[number], phase, "{op}");
                gathers += usize::from(phase == later[later.len() - 1]);
                *filled.entry(unit).or_default() |= sharding.secondary > 1 && !later.contains(&phase);
                state.insert(unit, next);
            }
            Op::Wait(Transfer::Gather { unit, phase }) => {
                let Weights::Gathering(number, since) = state[&unit] else {
                    panic!("{op}: it is not being gathered")
                };
                let fills = sharding.secondary > 1 && !later.contains(&phase);
                let last = phase == later[later.len() - 1];
                if fills && number + 1 == first.len() - later.len() {
                    assert!(secondary.insert(unit), "{unit} has a secondary shard already");
                    state.insert(unit, Weights::Gathered(0, since));
                } else if last {
                    starts_early(plan, (since, done), number + 1, op);
                    state.insert(unit, Weights::Whole);
                } else {
                    state.insert(unit, Weights::Gathered(number + 1, since));
                }
            }
            Op::Release { unit } => assert_eq!(state.insert(unit, Weights::Sharded), Some(Weights::Whole)),
            Op::Discard { unit } => assert!(secondary.remove(&unit), "{op}"),
            _ => {
                let whole = |unit: &Unit| state[unit] == Weights::Whole;
                assert!(!sharded || read(plan, op).iter().all(whole), "{op}");
                for unit in read(plan, op) {
                    let first_use = used.insert(unit);
                    if let Some(filled) = filled.remove(&unit) {
                        let fills =
                            first_use || sharding.secondary_use == SecondaryUse::Backward && !is_backward(op);
                        assert_eq!(filled, sharding.secondary > 1 && fills, "{unit} for {op}");
                    }
                }
            }
        }
        done += usize::from(computes(op));
    }
    assert!(state.values().all(|state| *state == Weights::Sharded), "gathered and never released: {state:?}");
    assert!(secondary.is_empty(), "never discarded: {secondary:?}");
    match (sharded, sharding.gather) {
        (false, _) => assert_eq!(gathers, 0),
        (true, When::Step) => assert_eq!(gathers, units.len()),
        (true, When::MicroBatch) => assert!(gathers >= units.len()),
    }
}

fn is_backward(op: &Op) -> bool {
    matches!(op.computation(), Some(Computation::Backward(_)))
}

/// The last phase of a gather starts `prefetch` computations ahead, and every phase before it one computation earlier.
fn starts_early(plan: &Plan, (since, done): (usize, usize), phases: usize, op: &Op) {
    let ahead = if plan.pipeline.overlap { plan.pipeline.prefetch } else { 0 };
    let outer = plan.sharding.gathers().len() - plan.sharding.later_gathers().len();
    let reach = |phases: usize| if ahead > 0 { (ahead + phases - 1).min(done) } else { 0 };
    let allowed = [reach(phases), reach(phases + outer)];
    assert!(allowed.contains(&(done - since)), "{op} started {} computations ahead", done - since);
}

/// Between two uses a unit is gathered again exactly if they are further apart than a gather reaches ahead.
fn weights_are_kept_only_for_a_near_use(plan: &Plan, program: &Program) {
    if plan.sharding.weights == 1 || plan.sharding.gather == When::Step {
        return;
    }
    let ahead = if plan.pipeline.overlap { plan.pipeline.prefetch } else { 0 };
    let later = plan.sharding.later_gathers();
    let reach = if ahead > 0 { ahead + later.len() - 1 } else { 0 };
    let (mut done, mut gathered, mut last_use) = (0, BTreeSet::new(), BTreeMap::new());
    for op in &program.ops {
        if let Op::Wait(Transfer::Gather { unit, phase }) = *op
            && later.last() == Some(&phase)
        {
            gathered.insert(unit);
        }
        for unit in read(plan, op) {
            let again = gathered.remove(&unit);
            let last: Option<usize> = last_use.insert(unit, done);
            assert_eq!(again, last.is_none_or(|last| done - last > reach + 1), "{unit} for {op}");
        }
        done += usize::from(computes(op));
    }
}

/// The block and micro-batch whose weight gradients an op adds.
fn written(op: &Op) -> Option<(Block, usize)> {
    match *op {
        Op::Compute {
            kind: Computation::Backward(BackwardPart::Both | BackwardPart::Weight),
            block,
            micro,
        } => Some((block, micro)),
        _ => None,
    }
}

fn unit_is_reduced(plan: &Plan, program: &Program, unit: Unit) {
    let summed = plan.layout(unit).summed_over_tp(plan.sequence_parallel);
    let tensor = plan.mesh.tp() > 1 && summed > 0;
    let data = plan.mesh.dp() > 1;
    let every_micro = plan.sharding.gradients > 1 && plan.sharding.reduce == When::MicroBatch;
    let tied = unit == Unit::Table && plan.holds_tied_copy(program.stage);
    let times = if every_micro { plan.micro_batches() } else { 1 };
    let pair = |phase| Op::start_and_wait(Transfer::Reduce { unit, phase });
    let sum = |over| Phase::plain(over, PhaseKind::Sum);
    let inner = plan.sharding.inner_reductions();
    let outer = plan.sharding.outer_reductions();
    assert_eq!(inner.is_empty() && outer.is_empty(), !data);
    let tensor = tensor.then(|| sum(Group::TENSOR));
    let round: Vec<Op> = tensor.into_iter().chain(inner).flat_map(pair).collect();
    let mut expected = round.repeat(times);
    expected.extend(outer.into_iter().flat_map(pair));
    // The phases that no write of this unit may come between: those that work on the gradient that is written.
    let round = if plan.sharding.gradients > 1 { round } else { expected.clone() };
    expected.extend(tied.then(|| pair(sum(Group::Tied))).into_iter().flatten());
    let reductions =
        |op: &&Op| matches!(op.transfer(), Some(Transfer::Reduce { .. })) && op.unit() == Some(unit);
    let found: Vec<Op> = program.ops.iter().filter(reductions).copied().collect();
    assert_eq!(found, expected, "of {unit} on stage {}", program.stage);
    if !round.is_empty() {
        writes_come_before_their_reduction(
            plan,
            program,
            unit,
            every_micro,
            (round[0], *round.last().unwrap()),
        );
    }
}

/// No write is between the first start and the last wait of a reduction, no write is left over, and each reduction
/// covers the writes of the step or of one micro-batch.
fn writes_come_before_their_reduction(
    plan: &Plan,
    program: &Program,
    unit: Unit,
    every_micro: bool,
    (first, last): (Op, Op),
) {
    let (mut fresh, mut under_way) = (BTreeSet::new(), false);
    for op in &program.ops {
        if let Some((_, micro)) = written(op).filter(|(block, _)| plan.block_units(*block).contains(&unit)) {
            assert!(!under_way, "{op} while {unit} is being reduced");
            fresh.insert(micro);
        } else if *op == first {
            assert_eq!(fresh.len(), if every_micro { 1 } else { plan.micro_batches() });
            fresh.clear();
            under_way = true;
        } else if *op == last {
            under_way = false;
        }
    }
    assert!(fresh.is_empty(), "{unit} is written and not reduced");
}

/// If gradients are reduced for every micro-batch, only the whole gradients of as many computations as a reduction has phases
/// may be in flight.
fn outstanding_gradients_are_few(plan: &Plan, program: &Program) {
    if plan.sharding.gradients == 1 || plan.sharding.reduce == When::Step {
        return;
    }
    let phases = plan.sharding.inner_reductions();
    let mut under_way: BTreeSet<Unit> = BTreeSet::new();
    let mut previous: Vec<Vec<Unit>> = Vec::new();
    for op in &program.ops {
        match *op {
            Op::Start(Transfer::Reduce { unit, phase }) if phases.first() == Some(&phase) => {
                under_way.insert(unit);
            }
            Op::Wait(Transfer::Reduce { unit, phase }) if phases.last() == Some(&phase) => {
                under_way.remove(&unit);
            }
            op if computes(&op) => {
                let recent: Vec<Unit> = previous.iter().rev().take(phases.len()).flatten().copied().collect();
                assert!(under_way.iter().all(|unit| recent.contains(unit)), "{op}: {under_way:?}");
                assert!(plan.pipeline.overlap || under_way.is_empty());
                previous.push(written(&op).map_or(vec![], |(block, _)| plan.block_units(block)));
            }
            _ => {}
        }
    }
}

const ONE_LAYER_PER_STAGE: &str =
    "parallel.pp=2 parallel.dp=2 parallel.tp=1 model.layers=2 batch.micro=1 batch.global=2 model.tied=true";

fn plan_of(sets: &str) -> Plan {
    plan(&sets.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
}

fn lines(program: &Program) -> String {
    program.ops.iter().map(Op::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_last_of_two_stages_with_sharded_states() {
    let plan = plan_of(&format!("{ONE_LAYER_PER_STAGE} sharding.zero=1"));
    insta::assert_snapshot!(lines(&plan.program(1)));
}

#[test]
fn the_last_of_two_stages_with_everything_sharded() {
    let plan = plan_of(&format!("{ONE_LAYER_PER_STAGE} sharding.zero=3 memory.recompute=full"));
    insta::assert_snapshot!(lines(&plan.program(1)));
}
