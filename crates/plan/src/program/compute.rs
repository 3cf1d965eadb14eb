//! Passes to block computations, with loads and recomputation.

use std::collections::{BTreeMap, BTreeSet};

use super::{Draft, Place, Stretch};
use crate::schedule::Pass;
use crate::{Block, Op, Part, Plan, Recompute};

/// What forwards are for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Train,
    Evaluate,
    Generate,
}

/// One slot per block computation, in order.
pub(super) fn lower(plan: &Plan, passes: Vec<Pass>, mode: Mode) -> Draft {
    let mut draft = Draft {
        slots: Vec::new(),
        stretches: Vec::with_capacity(passes.len()),
        inserted: Vec::new(),
        tail: Vec::new(),
    };
    let mut blocks = BTreeMap::new();
    let mut loaded = BTreeSet::new();
    for pass in passes {
        let chunk = pass.chunk();
        let blocks = blocks.entry(chunk).or_insert_with(|| plan.chunk_blocks(chunk));
        let first = draft.slots.len();
        for op in computations(pass, blocks, mode, plan.memory.recompute) {
            if let Some((_, load)) =
                load_for(op, plan.masks_documents()).filter(|&(micro, _)| loaded.insert(micro))
            {
                draft.insert(draft.slots.len(), Place::Needs, load);
            }
            draft.slots.push(op);
        }
        draft.stretches.push(Stretch { pass, slots: first..draft.slots.len() });
    }
    draft
}

fn computations(pass: Pass, blocks: &[Block], mode: Mode, recompute: Recompute) -> Vec<Op> {
    let backward = |micro, part| {
        let again = move |block| {
            recompute == Recompute::Full && part != Part::Weight && matches!(block, Block::Layer(_))
        };
        let ops = blocks.iter().rev().flat_map(move |&block| {
            let recompute = again(block).then_some(Op::Recompute { block, micro });
            recompute.into_iter().chain([Op::Backward { block, micro, part }])
        });
        ops.collect()
    };
    match pass {
        Pass::Forward { micro, .. } => {
            let forward = |&block| match mode {
                Mode::Train => Op::Forward { block, micro },
                Mode::Evaluate => Op::Evaluate { block, micro },
                Mode::Generate => Op::Decode { block, micro },
            };
            let chooses = mode == Mode::Generate && blocks.last() == Some(&Block::Head);
            let choose = chooses.then_some(Op::Choose { micro });
            blocks.iter().map(forward).chain(choose).collect()
        }
        Pass::Backward { micro, .. } => backward(micro, Part::Both),
        Pass::BackwardInput { micro, .. } => backward(micro, Part::Input),
        Pass::BackwardWeight { micro, .. } => backward(micro, Part::Weight),
    }
}

/// The micro-batch whose tokens, targets or beginnings of documents this forward reads, and what loads them. A backward
/// finds them loaded; every block of a generation asks for its tokens' positions.
fn load_for(op: Op, masks_documents: bool) -> Option<(usize, Op)> {
    match op {
        Op::Forward { block, micro } | Op::Evaluate { block, micro } => {
            let reads = masks_documents || !matches!(block, Block::Layer(_));
            reads.then_some((micro, Op::Load { micro }))
        }
        Op::Decode { micro, .. } => Some((micro, Op::Feed { micro })),
        _ => None,
    }
}
