//! Attention of new tokens over a key-value cache, for generation.

use super::{AttentionShape, Check};
use crate::{DType, View};

/// Writes the keys and values of the new tokens into the cache at their positions. Then computes
/// `out = softmax(scores(q·kᵀ)) · v` for each new query over the cached keys up to its own position, as far as the window.
///
/// A prompt adds many new tokens to a sample; each generated token adds one. Entries beyond a query's position are
/// never read, so the samples of a batch may have different lengths.
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention<'a> {
    /// Read, in the layout of [`AttentionShape`]: the new tokens.
    pub qkv: View<'a>,
    /// Read, `[batch, sequence]`, u32: the position of each new token in its sample, below `capacity`.
    pub positions: View<'a>,
    /// Read and written, `[batch, kv_heads, capacity, head_dim]`.
    pub keys: View<'a>,
    /// Read and written, `[batch, kv_heads, capacity, head_dim]`.
    pub values: View<'a>,
    /// Written, `[batch, sequence, heads, head_dim]`.
    pub out: View<'a>,
    /// Shape of the new tokens: `sequence` of them in every sample.
    pub shape: AttentionShape,
    /// Tokens per sample that fit into the cache.
    pub capacity: usize,
}

impl Check for CachedAttention<'_> {
    fn check(&self) {
        let AttentionShape { batch, heads, kv_heads, head_dim, .. } = self.shape;
        let (rows, cache) = (self.shape.rows(), batch * kv_heads * self.capacity * head_dim);
        assert_eq!(self.qkv.len(), rows * self.shape.qkv_width(), "elements of qkv");
        assert_eq!(self.positions.len(), rows, "positions");
        assert_eq!(self.positions.dtype(), DType::U32, "positions are whole numbers");
        assert_eq!([self.keys.len(), self.values.len()], [cache; 2], "elements of the cache");
        assert_eq!(self.out.len(), rows * heads * head_dim, "elements of out");
    }
}
