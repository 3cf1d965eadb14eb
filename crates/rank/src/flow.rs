//! What is in flight between ops: activations, gradients, what blocks keep, and messages under way.

use std::collections::HashMap;

use kintsugi_comm::Pending;
use kintsugi_model::{head, layer};
use kintsugi_plan::{Block, Message};
use kintsugi_tensor::Buffer;

/// A block and a micro-batch.
pub(crate) type At = (Block, usize);

/// What a block keeps between its forward and its backward.
#[allow(
    clippy::large_enum_variant,
    reason = "a box would be a heap allocation for every block and micro-batch"
)]
pub(crate) enum Saved {
    /// Only the input of a layer: full recomputation.
    Input(Buffer),
    Layer(layer::Saved),
    Head(head::Saved),
}

/// What a block keeps between the two parts of its backward.
#[allow(
    clippy::large_enum_variant,
    reason = "a box would be a heap allocation for every block and micro-batch"
)]
pub(crate) enum Deferred {
    /// The gradient of the embedding's output.
    Embedding(Buffer),
    Layer(layer::Deferred),
    Head(head::Deferred),
}

/// Everything in flight on one rank.
#[derive(Default)]
pub(crate) struct Flow {
    /// Token ids by micro-batch, until the embedding's backward.
    pub tokens: HashMap<usize, Buffer>,
    /// Target ids by micro-batch, until the head's forward.
    pub targets: HashMap<usize, Buffer>,
    /// Beginnings of documents by micro-batch, from the first forward to the last backward of a layer.
    pub starts: HashMap<usize, Buffer>,
    /// Inputs that wait for their block.
    pub inputs: HashMap<At, Buffer>,
    /// Gradients of outputs that wait for their block's backward.
    pub gradients: HashMap<At, Buffer>,
    pub saved: HashMap<At, Saved>,
    pub deferred: HashMap<At, Deferred>,
    pub sending: HashMap<Message, Pending>,
    pub receiving: HashMap<Message, Pending>,
}

impl Flow {
    /// Whether nothing is in flight: true between steps.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
            && self.targets.is_empty()
            && self.starts.is_empty()
            && self.inputs.is_empty()
            && self.gradients.is_empty()
            && self.saved.is_empty()
            && self.deferred.is_empty()
            && self.sending.is_empty()
            && self.receiving.is_empty()
    }
}
