//! The kernels of a framework: where it runs several and this engine one.
//!
//! These are facts of its source, not measurements. The cost model counts the bytes and the launches that follow from them.

use serde::{Deserialize, Serialize};

use crate::key::spec_table;

spec_table! {
    /// How a framework runs its element-wise operations.
    pub struct KernelsSpec {
        /// norms: `"fused"` as in this engine, `"kernel"` as a kernel of its own, `"eager"` as one for each of PyTorch's
        /// primitives ([counts](cost-model.md#kernels-of-other-frameworks))
        norm: Fusion, default Fusion::Fused;
        /// the same for sums of a branch and the residual stream
        residual: Fusion, default Fusion::Fused;
        /// the same for GELU and SwiGLU
        activation: Fusion, default Fusion::Fused;
        /// the same for the softmax of plain attention, with its mask
        softmax: Fusion, default Fusion::Fused;
        /// the same for rotary embeddings
        rotary: Fusion, default Fusion::Fused;
        /// the same for the loss
        loss: Fusion, default Fusion::Fused;
        /// the same for the sum of weight gradients over micro-batches
        accumulation: Fusion, default Fusion::Fused;
        /// how often queries, keys and values are copied in the forward; the backward does the same
        copies: f64, default 0.0;
    }
}

/// How an element-wise operation runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fusion {
    /// As in this engine: in the kernel before it where that is possible.
    #[default]
    Fused,
    /// As a kernel of its own.
    Kernel,
    /// As one kernel for each of PyTorch's primitives, in fp32 where the framework computes in fp32.
    Eager,
}
