//! The buffers in flight between ops: activations, gradients, and messages between stages, which bring them to another rank.

use std::collections::HashMap;

use kintsugi_comm::{Pending, Tag};
use kintsugi_model::{head, layer};
use kintsugi_plan::{Block, Group, Message, MessageKind};
use kintsugi_tensor::{Buffer, Category};

use crate::rank::Rank;

/// A block and a micro-batch.
pub(crate) type BlockInstance = (Block, usize);

/// The activations that a block saves for its backward.
#[allow(
    clippy::large_enum_variant,
    reason = "a box would be a heap allocation for every block and micro-batch"
)]
pub(crate) enum BlockActivations {
    /// Only the input of a layer, with full recomputation.
    Input(Buffer),
    Layer(layer::LayerActivations),
    Head(head::HeadActivations),
}

/// What the input part of a block's backward saves for the weight part.
#[allow(
    clippy::large_enum_variant,
    reason = "a box would be a heap allocation for every block and micro-batch"
)]
pub(crate) enum BlockWeightInputs {
    /// The gradient of the embedding's output.
    Embedding(Buffer),
    Layer(layer::LayerWeightInputs),
    Head(head::HeadWeightInputs),
}

/// The buffers in flight on one rank.
#[derive(Default)]
pub(crate) struct InFlight {
    /// Token ids by micro-batch, until the embedding's backward.
    pub tokens: HashMap<usize, Buffer>,
    /// Target ids by micro-batch, until the head's forward.
    pub targets: HashMap<usize, Buffer>,
    /// Starts by micro-batch, from the first forward to the last backward of a layer.
    pub starts: HashMap<usize, Buffer>,
    /// Inputs of blocks that have not run yet.
    pub inputs: HashMap<BlockInstance, Buffer>,
    /// Output gradients of blocks whose backward has not run yet.
    pub gradients: HashMap<BlockInstance, Buffer>,
    pub activations: HashMap<BlockInstance, BlockActivations>,
    pub weight_inputs: HashMap<BlockInstance, BlockWeightInputs>,
    pub sending: HashMap<Message, Pending>,
    pub receiving: HashMap<Message, Pending>,
}

impl InFlight {
    /// Whether nothing is in flight, as between steps.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
            && self.targets.is_empty()
            && self.starts.is_empty()
            && self.inputs.is_empty()
            && self.gradients.is_empty()
            && self.activations.is_empty()
            && self.weight_inputs.is_empty()
            && self.sending.is_empty()
            && self.receiving.is_empty()
    }

    /// The buffers that messages of a kind carry.
    fn carried(&mut self, kind: MessageKind) -> &mut HashMap<BlockInstance, Buffer> {
        match kind {
            MessageKind::Activation => &mut self.inputs,
            MessageKind::Gradient => &mut self.gradients,
        }
    }
}

impl Rank {
    pub(crate) fn send_start(&mut self, message: Message) {
        let buffer = self
            .in_flight
            .carried(message.kind)
            .remove(&(message.block, message.micro))
            .expect("a block computes the message before it is sent");
        let pending = self.groups.get(Group::PIPELINE).send(message.peer, self.tag(message), buffer);
        self.in_flight.sending.insert(message, pending);
    }

    pub(crate) fn send_wait(&mut self, message: Message) {
        let pending = self.in_flight.sending.remove(&message).expect("a wait follows its start");
        drop(self.groups.get(Group::PIPELINE).wait(pending));
    }

    pub(crate) fn receive_start(&mut self, message: Message) {
        let shape = self.shape();
        let len = shape.own_rows * shape.hidden;
        let buffer = self.backend.allocate(len, shape.compute, Category::Activations);
        let pending = self.groups.get(Group::PIPELINE).receive(message.peer, self.tag(message), buffer);
        self.in_flight.receiving.insert(message, pending);
    }

    pub(crate) fn receive_wait(&mut self, message: Message) {
        let pending = self.in_flight.receiving.remove(&message).expect("a wait follows its start");
        let buffer = self.groups.get(Group::PIPELINE).wait(pending);
        self.in_flight.carried(message.kind).insert((message.block, message.micro), buffer);
    }

    /// Both ends compute the tag of a message from the receiving block, the micro-batch and the kind.
    fn tag(&self, message: Message) -> Tag {
        let blocks = self.plan.model.layers as u64 + 2;
        let block = match message.block {
            Block::Embedding => 0,
            Block::Layer(i) => 1 + i as u64,
            Block::Head => blocks - 1,
        };
        (message.micro as u64 * blocks + block) * 2 + u64::from(message.kind == MessageKind::Gradient)
    }
}
