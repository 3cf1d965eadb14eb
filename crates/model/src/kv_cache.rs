//! The KV cache: keys and values of all tokens so far, so that a new token does not run the whole text again.

use kintsugi_tensor::Buffer;

use crate::Context;

/// One layer's keys and values of a batch of samples, `[samples, kv_heads, capacity, head_dim]` each.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) keys: Buffer,
    pub(crate) values: Buffer,
    pub(crate) capacity: usize,
}

impl KvCache {
    /// Allocates a cache for `capacity` tokens of every sample of the context's shape. Its contents are undefined until they
    /// are written.
    pub fn new(ctx: &Context, capacity: usize) -> Self {
        let attention = ctx.shape.attention;
        let len = attention.batch * attention.kv_heads * capacity * attention.head_dim;
        KvCache { keys: ctx.activation(len), values: ctx.activation(len), capacity }
    }
}
