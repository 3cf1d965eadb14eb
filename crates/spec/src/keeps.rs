//! What a layer of a framework keeps from its forward to its backward, and this engine does not.
//!
//! These are facts of its source, not measurements: bytes for each element of a tensor.

use crate::key::spec_table;

spec_table! {
    /// Bytes that a layer keeps beyond ours, for each element of a tensor.
    #[derive(Copy)]
    pub struct KeepsSpec {
        /// bytes that a layer keeps for each element of the residual stream: the masks of dropout on both branches
        stream: f64, default 0.0;
        /// the same under sequence parallelism: the outputs of both norms, which this engine computes again
        norms: f64, default 0.0;
        /// the same of the output of attention: a second copy in another layout
        heads: f64, default 0.0;
        /// the same of the MLP's activation: the activated gate apart from the product with it
        ffn: f64, default 0.0;
        /// the same of the scores of plain attention: the mask of dropout, and the scores after it
        scores: f64, default 0.0;
    }
}

impl KeepsSpec {
    /// Whether a layer keeps nothing beyond ours.
    pub fn is_empty(&self) -> bool {
        *self == KeepsSpec::default()
    }
}
