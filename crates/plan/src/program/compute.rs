//! Passes to block computations, with loads and recomputation.

use super::{Draft, PassSlots, Position};
use crate::schedule::Pass;
use crate::{BackwardPart, Block, Computation, Op, Plan, Recompute};

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
        passes: Vec::with_capacity(passes.len()),
        inserted: Vec::new(),
        tail: Vec::new(),
    };
    let chunks: Vec<Vec<Block>> = (0..plan.chunks()).map(|chunk| plan.chunk_blocks(chunk)).collect();
    let (mut loaded, first_backward) = (Vec::new(), plan.first_backward());
    for pass in passes {
        let first = draft.slots.len();
        compute(plan, first_backward, pass, &chunks[pass.chunk()], mode, &mut draft.slots);
        let slots = first..draft.slots.len();
        for slot in slots.clone() {
            let Some((micro, load)) = load_for(draft.slots[slot], plan.loads_starts()) else { continue };
            if loaded.len() <= micro {
                loaded.resize(micro + 1, false);
            }
            if !std::mem::replace(&mut loaded[micro], true) {
                draft.insert(slot, Position::Before, load);
            }
        }
        draft.passes.push(PassSlots { pass, slots });
    }
    draft
}

fn compute(
    plan: &Plan,
    first_backward: Block,
    pass: Pass,
    blocks: &[Block],
    mode: Mode,
    slots: &mut Vec<Op>,
) {
    let (micro, part) = match pass {
        Pass::Forward { micro, .. } => {
            let computation = |block| match mode {
                Mode::Train if block >= first_backward => Computation::Forward,
                Mode::Train | Mode::Evaluate => Computation::Evaluate,
                Mode::Generate => Computation::Decode,
            };
            slots.extend(blocks.iter().map(|&block| computation(block).on(block, micro)));
            if mode == Mode::Generate && blocks.last() == Some(&Block::Head) {
                slots.push(Op::Choose { micro });
            }
            return;
        }
        Pass::Backward { micro, .. } => (micro, BackwardPart::Both),
        Pass::BackwardInput { micro, .. } => (micro, BackwardPart::Input),
        Pass::BackwardWeight { micro, .. } => (micro, BackwardPart::Weight),
    };
    let again = plan.memory.recompute == Recompute::Full && part != BackwardPart::Weight;
    for &block in blocks.iter().rev().filter(|&&block| block >= first_backward) {
        let part = match part {
            BackwardPart::Weight if plan.is_frozen_block(block) => continue,
            BackwardPart::Both | BackwardPart::Input if plan.is_frozen_block(block) => BackwardPart::Frozen,
            part => part,
        };
        if again && matches!(block, Block::Layer(_)) {
            slots.push(Computation::Recompute.on(block, micro));
        }
        slots.push(Computation::Backward(part).on(block, micro));
    }
}

/// The micro-batch whose tokens, targets or starts this forward reads, and what loads them. A backward
/// finds them loaded; every block of a generation asks for its tokens' positions.
fn load_for(op: Op, loads_starts: bool) -> Option<(usize, Op)> {
    let Op::Compute { kind, block, micro } = op else { return None };
    match kind {
        Computation::Forward | Computation::Evaluate => {
            let reads = loads_starts || !matches!(block, Block::Layer(_));
            reads.then_some((micro, Op::Load { micro }))
        }
        Computation::Decode => Some((micro, Op::Feed { micro })),
        Computation::Recompute | Computation::Backward(_) => None,
    }
}
