//! The buffers in flight between ops: activations, gradients, and messages between stages.

use std::collections::HashMap;

use kintsugi_comm::Pending;
use kintsugi_model::{head, layer};
use kintsugi_plan::{Block, Message};
use kintsugi_tensor::Buffer;

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
}
