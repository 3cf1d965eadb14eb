//! The keys and values of all tokens so far: what keeps a generated token from running the whole text again.

use kintsugi_tensor::Buffer;

use crate::Context;

/// One layer's keys and values of a batch of samples, `[samples, kv_heads, capacity, head_dim]` each.
#[derive(Debug)]
pub struct Cache {
    pub(crate) keys: Buffer,
    pub(crate) values: Buffer,
    pub(crate) capacity: usize,
}

impl Cache {
    /// Room for `capacity` tokens of every sample of the context's shape; what it holds is undefined until written.
    pub fn new(ctx: &Context, capacity: usize) -> Self {
        let attention = ctx.shape.attention;
        let len = attention.batch * attention.kv_heads * capacity * attention.head_dim;
        Cache { keys: ctx.activation(len), values: ctx.activation(len), capacity }
    }
}
