//! What is saved for the backward pass, and what is computed again.

use serde::{Deserialize, Serialize};

use crate::config::keys::RawMemory;

/// What is saved for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryOptions {
    /// Recomputation.
    pub recompute: Recompute,
    /// Attention.
    pub attention: AttentionKind,
}

/// Activation recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Save everything.
    None,
    /// Save the results of matrix products and attention; recompute norms and activation functions.
    Selective,
    /// Save only each layer's input.
    Full,
}

/// Attention algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKind {
    /// Tiled; saves only the log-sum-exp (arXiv 2205.14135).
    Flash,
    /// Saves the probabilities.
    Plain,
}

impl MemoryOptions {
    /// What the keys of `[memory]` say.
    pub(crate) fn resolve(raw: &RawMemory) -> Self {
        MemoryOptions { recompute: raw.recompute(), attention: raw.attention() }
    }
}
