//! The kernels of a framework: where it runs several and this engine one.
//!
//! These are facts of its source, not measurements. The cost model counts the bytes and the launches that follow from them.

use serde::{Deserialize, Serialize};

/// How a framework runs its element-wise operations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KernelsSpec {
    /// Norms.
    pub norm: Fusion,
    /// The sum of a branch and the residual stream, and of their gradients.
    pub residual: Fusion,
    /// GELU or SwiGLU.
    pub activation: Fusion,
    /// Rotary embeddings.
    pub rotary: Fusion,
    /// The loss over the logits.
    pub loss: Fusion,
    /// The sum of a micro-batch's weight gradients and those of earlier ones.
    pub accumulation: Fusion,
    /// How often the forward copies queries, keys and values to another layout. The backward does the same.
    pub copies: f64,
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
