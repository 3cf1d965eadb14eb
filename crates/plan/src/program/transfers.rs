//! Messages between stages: activations to the next chunk, gradients to the one before.
//!
//! A stage waits for a sent message only before it sends the next one of that kind to that stage. Waiting at once would
//! deadlock if a send completes only when it is received: in 1F1B two neighbours send to each other and only then
//! receive.

use std::collections::BTreeMap;

use super::{Draft, PassSlots, Position};
use crate::schedule::Pass;
use crate::{Block, Computation, Message, MessageKind, Op, Plan, Transfer};

pub(super) fn insert(plan: &Plan, stage: usize, draft: &mut Draft) {
    let ends = ChunkEnds::of(plan, stage);
    receive(&ends, plan.pipeline.overlap, draft);
    send(&ends, draft);
}

/// Inserts every receive before the computation that needs it and, with overlap, its start before the previous pass.
fn receive(ends: &ChunkEnds, overlap: bool, draft: &mut Draft) {
    for index in 0..draft.passes.len() {
        let PassSlots { pass, slots } = &draft.passes[index];
        let Some(message) = ends.received(*pass) else { continue };
        let reads = |&slot: &usize| draft.slots[slot].computation() != Some(Computation::Recompute);
        let reader = slots.clone().find(reads).expect("a pass computes something");
        let start = Op::Start(Transfer::Receive(message));
        if overlap {
            let earlier = draft.passes[index.saturating_sub(1)].slots.start;
            draft.insert(earlier, Position::Prefetch, start);
        } else {
            draft.insert(reader, Position::Before, start);
        }
        draft.insert(reader, Position::Before, Op::Wait(Transfer::Receive(message)));
    }
}

/// Inserts every send right after the computation that produces it.
fn send(ends: &ChunkEnds, draft: &mut Draft) {
    let mut outstanding: BTreeMap<(usize, MessageKind), Message> = BTreeMap::new();
    for index in 0..draft.passes.len() {
        let PassSlots { pass, slots } = &draft.passes[index];
        let Some(message) = ends.sent(*pass) else { continue };
        let last = slots.end - 1;
        if let Some(message) = outstanding.insert((message.peer, message.kind), message) {
            draft.insert(last, Position::After, Op::Wait(Transfer::Send(message)));
        }
        draft.insert(last, Position::After, Op::Start(Transfer::Send(message)));
    }
    draft.tail.extend(outstanding.into_values().map(|message| Op::Wait(Transfer::Send(message))));
}

/// The first and last block of every chunk of the pipeline.
struct ChunkEnds<'a> {
    plan: &'a Plan,
    stage: usize,
    first: Vec<Block>,
    last: Vec<Block>,
    first_backward: Block,
}

impl<'a> ChunkEnds<'a> {
    fn of(plan: &'a Plan, stage: usize) -> Self {
        let (mut first, mut last) = (Vec::new(), Vec::new());
        let mut layers = 0;
        for (chunk, count) in plan.pipeline.layers.iter().enumerate() {
            first.push(if chunk == 0 { Block::Embedding } else { Block::Layer(layers) });
            layers += count;
            last.push(if layers == plan.model.layers { Block::Head } else { Block::Layer(layers - 1) });
        }
        ChunkEnds { plan, stage, first, last, first_backward: plan.first_backward() }
    }

    /// The message that a pass receives first.
    fn received(&self, pass: Pass) -> Option<Message> {
        match pass {
            Pass::Forward { chunk, micro } => {
                let before = chunk.checked_sub(1)?;
                self.message(MessageKind::Activation, self.first[chunk], micro, before)
            }
            Pass::Backward { chunk, micro } | Pass::BackwardInput { chunk, micro } => {
                self.message(MessageKind::Gradient, self.last[chunk], micro, chunk + 1)
            }
            Pass::BackwardWeight { .. } => None,
        }
    }

    /// The message that a pass sends last.
    fn sent(&self, pass: Pass) -> Option<Message> {
        match pass {
            Pass::Forward { chunk, micro } => {
                let block = *self.first.get(chunk + 1)?;
                self.message(MessageKind::Activation, block, micro, chunk + 1)
            }
            Pass::Backward { chunk, micro } | Pass::BackwardInput { chunk, micro } => {
                let before = chunk.checked_sub(1)?;
                self.message(MessageKind::Gradient, self.last[before], micro, before)
            }
            Pass::BackwardWeight { .. } => None,
        }
    }

    /// A message to or from `chunk`, if there is such a chunk, it is on another stage, and the receiver needs the message.
    fn message(&self, kind: MessageKind, block: Block, micro: usize, chunk: usize) -> Option<Message> {
        let peer = self.plan.stage_of_chunk(chunk);
        let needed = match kind {
            MessageKind::Activation => true,
            MessageKind::Gradient => block >= self.first_backward,
        };
        let crosses = chunk < self.first.len() && peer != self.stage;
        (crosses && needed).then_some(Message { kind, block, micro, peer })
    }
}
