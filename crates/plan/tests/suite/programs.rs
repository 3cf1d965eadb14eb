//! Properties of programs under random layouts: computations, messages, and that every start has its wait.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::support::{computes, layouts, plan, programs};
use kintsugi_plan::{
    BackwardPart, Block, Computation, Message, MessageKind, Op, OpKind, Plan, Program, Recompute,
    ScheduleKind, StepOp, Transfer,
};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn every_micro_batch_goes_forward_and_back_in_order(sets in layouts()) {
        let plan = plan(&sets);
        for program in programs(&plan) {
            passes_visit_all_blocks_in_order(&plan, &program);
            layers_are_recomputed_right_before_their_backward(&plan, &program);
            micro_batches_are_loaded_once(&plan, &program);
        }
    }

    #[test]
    fn sends_match_receives_in_order(sets in layouts(), evaluated in 1..8_usize) {
        let plan = plan(&sets);
        messages_match(&plan, &programs(&plan), plan.micro_batches(), true);
        let stages = 0..plan.mesh.pp();
        let evaluations: Vec<Program> = stages.map(|stage| plan.evaluation(stage, evaluated)).collect();
        messages_match(&plan, &evaluations, evaluated, false);
    }

    #[test]
    fn every_start_has_one_wait_after_it(sets in layouts(), evaluated in 1..8_usize) {
        let plan = plan(&sets);
        for stage in 0..plan.mesh.pp() {
            starts_have_waits(&plan.program(stage));
            starts_have_waits(&plan.evaluation(stage, evaluated));
        }
    }

    #[test]
    fn a_stage_starts_every_transfer_at_least_as_often_as_is_known_without_its_program(sets in layouts()) {
        let plan = plan(&sets);
        for program in programs(&plan) {
            let mut least: HashMap<OpKind, usize> = HashMap::new();
            for (transfer, count) in plan.least_transfers(program.stage, plan.micro_batches()) {
                *least.entry(Op::Start(transfer).kind()).or_default() += count;
            }
            for (kind, least) in least {
                let found = program.ops.iter().filter(|op| op.kind() == kind).count();
                prop_assert!(found >= least, "{}: {found}, not {least}", kind.op());
            }
        }
    }

    #[test]
    fn evaluation_runs_every_block_once(sets in layouts(), evaluated in 1..8_usize) {
        let plan = plan(&sets);
        for stage in 0..plan.mesh.pp() {
            let program = plan.evaluation(stage, evaluated);
            for micro in 0..evaluated {
                let blocks = computed(&program, Computation::Evaluate, micro);
                prop_assert_eq!(blocks, plan.stage_blocks(stage));
            }
            let trains = |op: &Op| match *op {
                Op::Compute { kind, .. } => kind != Computation::Evaluate,
                Op::Start(transfer) => matches!(transfer, Transfer::Reduce { .. }),
                op => op == Op::Step(StepOp::Update),
            };
            prop_assert!(!program.ops.iter().any(trains));
            micro_batches_are_loaded_once(&plan, &program);
        }
    }
}

/// The blocks on which a program runs a computation for a micro-batch, in order.
fn computed(program: &Program, computation: Computation, micro: usize) -> Vec<Block> {
    let block = |op: &Op| op.block().filter(|&block| *op == computation.on(block, micro));
    program.ops.iter().filter_map(block).collect()
}

/// The index of each op in its program.
fn positions(program: &Program) -> HashMap<Op, usize> {
    program.ops.iter().enumerate().map(|(index, &op)| (op, index)).collect()
}

fn passes_visit_all_blocks_in_order(plan: &Plan, program: &Program) {
    let blocks = plan.stage_blocks(program.stage);
    let reversed: Vec<Block> = blocks.iter().rev().copied().collect();
    let split = plan.pipeline.schedule == ScheduleKind::ZeroBubble;
    let at = positions(program);
    for micro in 0..plan.micro_batches() {
        let visits = |computation| computed(program, computation, micro);
        let backward = |part| visits(Computation::Backward(part));
        assert_eq!(visits(Computation::Forward), blocks);
        assert_eq!(backward(BackwardPart::Both), if split { vec![] } else { reversed.clone() });
        assert_eq!(backward(BackwardPart::Input), if split { reversed.clone() } else { vec![] });
        assert_eq!(backward(BackwardPart::Weight), if split { reversed.clone() } else { vec![] });
        for &block in &blocks {
            let backward = |part| at.get(&Computation::Backward(part).on(block, micro));
            let first =
                backward(BackwardPart::Both).or(backward(BackwardPart::Input)).expect("there is a backward");
            assert!(at[&Computation::Forward.on(block, micro)] < *first);
            assert!(backward(BackwardPart::Weight).is_none_or(|weight| first < weight));
        }
    }
}

fn layers_are_recomputed_right_before_their_backward(plan: &Plan, program: &Program) {
    let computations: Vec<Op> = program.ops.iter().copied().filter(computes).collect();
    for pair in computations.windows(2) {
        let recomputed = match pair[0] {
            Op::Compute { kind: Computation::Recompute, block, micro } => Some((block, micro)),
            _ => None,
        };
        let wanted = match pair[1] {
            Op::Compute {
                kind: Computation::Backward(BackwardPart::Both | BackwardPart::Input),
                block: block @ Block::Layer(_),
                micro,
            } if plan.memory.recompute == Recompute::Full => Some((block, micro)),
            _ => None,
        };
        assert_eq!(recomputed, wanted, "{pair:?}");
    }
}

fn micro_batches_are_loaded_once(plan: &Plan, program: &Program) {
    assert_eq!(program.ops[0], Op::Step(StepOp::Begin));
    let reads = |block: &Block| plan.loads_starts() || matches!(block, Block::Embedding | Block::Head);
    let stage_reads = plan.stage_blocks(program.stage).iter().any(reads);
    let mut loaded = Vec::new();
    for op in &program.ops {
        match *op {
            Op::Load { micro } => {
                assert!(stage_reads && !loaded.contains(&micro));
                loaded.push(micro);
            }
            Op::Compute { kind: Computation::Forward | Computation::Evaluate, block, micro }
                if reads(&block) =>
            {
                assert!(loaded.contains(&micro));
            }
            _ => {}
        }
    }
}

/// Messages by sender, receiver and kind, in the order of one of the four ops.
type Routes = BTreeMap<(usize, usize, MessageKind), Vec<(Block, usize)>>;

/// The message of one of the four ops, and whether it is sent here.
type Pick = fn(Op) -> Option<(Message, bool)>;

fn routes(programs: &[Program], pick: Pick) -> Routes {
    let mut routes = Routes::new();
    for program in programs {
        for (message, sent) in program.ops.iter().filter_map(|&op| pick(op)) {
            let (from, to) = if sent { (program.stage, message.peer) } else { (message.peer, program.stage) };
            routes.entry((from, to, message.kind)).or_default().push((message.block, message.micro));
        }
    }
    routes
}

fn messages_match(plan: &Plan, programs: &[Program], micro_batches: usize, backward: bool) {
    let sends = routes(programs, |op| match op {
        Op::Start(Transfer::Send(message)) => Some((message, true)),
        _ => None,
    });
    let others: [Pick; 3] = [
        |op| if let Op::Wait(Transfer::Send(message)) = op { Some((message, true)) } else { None },
        |op| if let Op::Start(Transfer::Receive(message)) = op { Some((message, false)) } else { None },
        |op| if let Op::Wait(Transfer::Receive(message)) = op { Some((message, false)) } else { None },
    ];
    for other in others {
        assert_eq!(routes(programs, other), sends);
    }
    let boundaries = plan.chunks() - 1;
    let directions = if backward { 2 } else { 1 };
    assert_eq!(sends.values().map(Vec::len).sum::<usize>(), directions * boundaries * micro_batches);
    for program in programs {
        messages_are_beside_their_computations(plan, program, backward);
    }
}

/// A message is received before the block it names is computed, and sent right after the block next to it.
fn messages_are_beside_their_computations(plan: &Plan, program: &Program, backward: bool) {
    let at = positions(program);
    let compute = |kind, block, micro| match kind {
        MessageKind::Activation if backward => Computation::Forward.on(block, micro),
        MessageKind::Activation => Computation::Evaluate.on(block, micro),
        MessageKind::Gradient => [BackwardPart::Both, BackwardPart::Input]
            .map(|part| Computation::Backward(part).on(block, micro))
            .into_iter()
            .find(|op| at.contains_key(op))
            .expect("the backward of a message is here"),
    };
    let model: Vec<Block> = (0..plan.chunks()).flat_map(|chunk| plan.chunk_blocks(chunk)).collect();
    for (index, op) in program.ops.iter().enumerate() {
        match *op {
            Op::Wait(Transfer::Receive(message)) => {
                let reader = at[&compute(message.kind, message.block, message.micro)];
                assert!(index < reader && !program.ops[index..reader].iter().any(computes));
            }
            Op::Start(Transfer::Send(message)) => {
                let place = model.iter().position(|&b| b == message.block).expect("a block of the model");
                let maker = match message.kind {
                    MessageKind::Activation => model[place - 1],
                    MessageKind::Gradient => model[place + 1],
                };
                let made = at[&compute(message.kind, maker, message.micro)];
                assert!(made < index);
                let between = &program.ops[made + 1..index];
                assert!(between.iter().all(|op| matches!(op, Op::Wait(Transfer::Send(_)))), "{between:?}");
            }
            _ => {}
        }
    }
}

fn starts_have_waits(program: &Program) {
    let mut open: HashSet<Transfer> = HashSet::new();
    for &op in &program.ops {
        match op {
            Op::Start(transfer) => assert!(open.insert(transfer), "{op} twice"),
            Op::Wait(transfer) => assert!(open.remove(&transfer), "{op} without its start"),
            _ => {}
        }
    }
    assert!(open.is_empty(), "never waited for: {open:?}");
}
