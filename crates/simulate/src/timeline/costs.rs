//! What ops cost.

use kintsugi_plan::{Block, Op, Part};

/// The cost of each part of a block's computation, in any unit of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockCosts {
    /// Forward, and recomputation.
    pub forward: f64,
    /// Gradient of the input.
    pub backward_input: f64,
    /// Gradients of the weights.
    pub backward_weight: f64,
}

/// The cost of every op: blocks take time, and what is not named here takes none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// One layer.
    pub layer: BlockCosts,
    /// The embedding.
    pub embedding: BlockCosts,
    /// The head.
    pub head: BlockCosts,
    /// From the start of a send until the message can be received.
    pub message: f64,
}

impl Costs {
    /// Only layers take time: F, B and W of the papers.
    pub fn layers(forward: f64, backward_input: f64, backward_weight: f64) -> Self {
        let layer = BlockCosts { forward, backward_input, backward_weight };
        Costs { layer, ..Costs::default() }
    }

    /// The time that an op keeps its stage busy.
    pub fn of(&self, op: Op) -> f64 {
        match op {
            Op::Forward { block, .. }
            | Op::Evaluate { block, .. }
            | Op::Decode { block, .. }
            | Op::Recompute { block, .. } => self.block(block).forward,
            Op::Backward { block, part, .. } => {
                let BlockCosts { backward_input, backward_weight, .. } = *self.block(block);
                match part {
                    Part::Both => backward_input + backward_weight,
                    Part::Input => backward_input,
                    Part::Weight => backward_weight,
                }
            }
            _ => 0.0,
        }
    }

    fn block(&self, block: Block) -> &BlockCosts {
        match block {
            Block::Embedding => &self.embedding,
            Block::Layer(_) => &self.layer,
            Block::Head => &self.head,
        }
    }
}
