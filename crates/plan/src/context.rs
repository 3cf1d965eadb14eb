//! Context parallelism: how attention reaches the tokens of other ranks, and which lengths of sequences can be divided.

use serde::{Deserialize, Serialize};

use crate::config::ConfigError;
use crate::config::error::invalid;
use crate::{AttentionKind, Batch, MemoryOptions, Mesh};

/// How attention reaches the keys and values of the other ranks of cp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContextAttention {
    /// Every rank gathers the keys and values of all, as in the training of Llama 3 (arXiv 2407.21783).
    Gather,
}

/// Refuses sequences that cp cannot divide into two slices for each rank, and what does not work with slices.
pub(crate) fn check(mesh: Mesh, batch: Batch, memory: MemoryOptions) -> Result<(), ConfigError> {
    let (cp, sequence) = (mesh.cp(), batch.sequence);
    if cp == 1 {
        return Ok(());
    }
    let slices = 2 * cp;
    if !sequence.is_multiple_of(slices) {
        let below = sequence - sequence % slices;
        let nearest = if below == 0 { slices.to_string() } else { format!("{below} or {}", below + slices) };
        let rule = format!(
            "is not a multiple of 2 · parallel.cp = {slices}, and every rank of cp has two slices of each sequence; use {nearest}"
        );
        return Err(invalid("batch.sequence", sequence, rule));
    }
    if memory.attention == AttentionKind::Plain {
        let rule =
            format!("keeps the scores of whole sequences, which parallel.cp = {cp} divides; use \"flash\"");
        return Err(invalid("memory.attention", "\"plain\"", rule));
    }
    Ok(())
}
