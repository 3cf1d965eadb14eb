//! Context parallelism: how attention reaches the tokens of other ranks, and which lengths of sequences can be divided.

use kintsugi_spec::ModelSpec;
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
    /// Keys and values pass around the ranks (arXiv 2310.01889).
    Ring,
    /// Ranks exchange their slices of all heads for whole samples of some heads (arXiv 2309.14509).
    AllToAll,
}

/// Refuses sequences that cp cannot divide into two slices for each rank, and what does not work with slices.
pub(crate) fn check(
    model: &ModelSpec,
    mesh: Mesh,
    attention: ContextAttention,
    batch: Batch,
    memory: MemoryOptions,
) -> Result<(), ConfigError> {
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
    match attention {
        ContextAttention::Gather | ContextAttention::Ring => Ok(()),
        ContextAttention::AllToAll => check_heads(model, mesh),
    }
}

/// Refuses heads that cannot be exchanged: every rank needs as many query heads, and whole key heads.
fn check_heads(model: &ModelSpec, mesh: Mesh) -> Result<(), ConfigError> {
    let (cp, tp) = (mesh.cp(), mesh.tp());
    let (heads, kv_heads) = (model.heads / tp, model.kv_heads / tp);
    let refused = |what: &str, rule: &str| {
        let rule = format!("{what} and parallel.cp = {cp}: {rule}; use \"gather\" or \"ring\"");
        Err(invalid("parallel.cp_attention", "\"all-to-all\"", rule))
    };
    if !heads.is_multiple_of(cp) {
        let what = format!("does not work with {heads} query heads for each rank of tp");
        return refused(&what, "the heads must be a multiple of cp");
    }
    if !kv_heads.is_multiple_of(cp) && !cp.is_multiple_of(kv_heads) {
        let what = format!("does not work with {kv_heads} key heads for each rank of tp");
        return refused(&what, "one must be a multiple of the other");
    }
    Ok(())
}
