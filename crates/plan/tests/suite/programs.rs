//! Properties of programs under random layouts: computations, messages, and that every start has its wait.

use std::collections::{BTreeMap, HashMap};

use crate::support::{computes, layouts, plan, programs};
use kintsugi_plan::{BackwardPart, Block, Message, MessageKind, Op, Plan, Program, Recompute, ScheduleKind};
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
    fn evaluation_runs_every_block_once(sets in layouts(), evaluated in 1..8_usize) {
        let plan = plan(&sets);
        for stage in 0..plan.mesh.pp() {
            let program = plan.evaluation(stage, evaluated);
            for micro in 0..evaluated {
                let of_micro = |op: &Op| match *op {
                    Op::Evaluate { block, micro: of } if of == micro => Some(block),
                    _ => None,
                };
                let blocks: Vec<Block> = program.ops.iter().filter_map(of_micro).collect();
                prop_assert_eq!(blocks, plan.stage_blocks(stage));
            }
            let trains = |op: &Op| {
                matches!(op, Op::Forward { .. } | Op::Backward { .. } | Op::ReduceStart { .. } | Op::Step)
            };
            prop_assert!(!program.ops.iter().any(trains));
            micro_batches_are_loaded_once(&plan, &program);
        }
    }
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
        let visits = |wanted: Option<BackwardPart>| -> Vec<Block> {
            let block = |op: &Op| match *op {
                Op::Forward { block, micro: m } if m == micro && wanted.is_none() => Some(block),
                Op::Backward { block, micro: m, part } if m == micro && wanted == Some(part) => Some(block),
                _ => None,
            };
            program.ops.iter().filter_map(block).collect()
        };
        assert_eq!(visits(None), blocks);
        assert_eq!(visits(Some(BackwardPart::Both)), if split { vec![] } else { reversed.clone() });
        assert_eq!(visits(Some(BackwardPart::Input)), if split { reversed.clone() } else { vec![] });
        assert_eq!(visits(Some(BackwardPart::Weight)), if split { reversed.clone() } else { vec![] });
        for &block in &blocks {
            let backward = |part| at.get(&Op::Backward { block, micro, part });
            let first =
                backward(BackwardPart::Both).or(backward(BackwardPart::Input)).expect("there is a backward");
            assert!(at[&Op::Forward { block, micro }] < *first);
            assert!(backward(BackwardPart::Weight).is_none_or(|weight| first < weight));
        }
    }
}

fn layers_are_recomputed_right_before_their_backward(plan: &Plan, program: &Program) {
    let computations: Vec<Op> = program.ops.iter().copied().filter(computes).collect();
    for pair in computations.windows(2) {
        let recomputed = match pair[0] {
            Op::Recompute { block, micro } => Some((block, micro)),
            _ => None,
        };
        let wanted = match pair[1] {
            Op::Backward {
                block: block @ Block::Layer(_),
                micro,
                part: BackwardPart::Both | BackwardPart::Input,
            } if plan.memory.recompute == Recompute::Full => Some((block, micro)),
            _ => None,
        };
        assert_eq!(recomputed, wanted, "{pair:?}");
    }
}

fn micro_batches_are_loaded_once(plan: &Plan, program: &Program) {
    assert_eq!(program.ops[0], Op::Begin);
    let reads = |block: &Block| plan.masks_documents() || matches!(block, Block::Embedding | Block::Head);
    let stage_reads = plan.stage_blocks(program.stage).iter().any(reads);
    let mut loaded = Vec::new();
    for op in &program.ops {
        match *op {
            Op::Load { micro } => {
                assert!(stage_reads && !loaded.contains(&micro));
                loaded.push(micro);
            }
            Op::Forward { block, micro } | Op::Evaluate { block, micro } if reads(&block) => {
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
        Op::SendStart { message } => Some((message, true)),
        _ => None,
    });
    let others: [Pick; 3] = [
        |op| if let Op::SendWait { message } = op { Some((message, true)) } else { None },
        |op| if let Op::ReceiveStart { message } = op { Some((message, false)) } else { None },
        |op| if let Op::ReceiveWait { message } = op { Some((message, false)) } else { None },
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
        MessageKind::Activation if backward => Op::Forward { block, micro },
        MessageKind::Activation => Op::Evaluate { block, micro },
        MessageKind::Gradient => [BackwardPart::Both, BackwardPart::Input]
            .map(|part| Op::Backward { block, micro, part })
            .into_iter()
            .find(|op| at.contains_key(op))
            .expect("the backward of a message is here"),
    };
    let model: Vec<Block> = (0..plan.chunks()).flat_map(|chunk| plan.chunk_blocks(chunk)).collect();
    for (index, op) in program.ops.iter().enumerate() {
        match *op {
            Op::ReceiveWait { message } => {
                let reader = at[&compute(message.kind, message.block, message.micro)];
                assert!(index < reader && !program.ops[index..reader].iter().any(computes));
            }
            Op::SendStart { message } => {
                let place = model.iter().position(|&b| b == message.block).expect("a block of the model");
                let maker = match message.kind {
                    MessageKind::Activation => model[place - 1],
                    MessageKind::Gradient => model[place + 1],
                };
                let made = at[&compute(message.kind, maker, message.micro)];
                assert!(made < index);
                let between = &program.ops[made + 1..index];
                assert!(between.iter().all(|op| matches!(op, Op::SendWait { .. })), "{between:?}");
            }
            _ => {}
        }
    }
}

fn starts_have_waits(program: &Program) {
    let mut open: HashMap<Op, usize> = HashMap::new();
    for &op in &program.ops {
        let start = match op {
            Op::GatherWait { unit, phase } => Op::GatherStart { unit, phase },
            Op::ReduceWait { unit, phase } => Op::ReduceStart { unit, phase },
            Op::SendWait { message } => Op::SendStart { message },
            Op::ReceiveWait { message } => Op::ReceiveStart { message },
            Op::NormWait { axis } => Op::NormStart { axis },
            Op::RefreshWait { unit, phase } => Op::RefreshStart { unit, phase },
            Op::GatherStart { .. }
            | Op::ReduceStart { .. }
            | Op::SendStart { .. }
            | Op::ReceiveStart { .. }
            | Op::NormStart { .. }
            | Op::RefreshStart { .. } => {
                assert_eq!(open.insert(op, 1), None, "{op} twice");
                continue;
            }
            _ => continue,
        };
        assert!(open.remove(&start).is_some(), "{op} without its start");
    }
    assert!(open.is_empty(), "never waited for: {open:?}");
}
