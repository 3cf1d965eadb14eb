//! Attention of new tokens over a key-value cache.

use kintsugi_tensor::Buffer;
use kintsugi_tensor::ops::{AttentionShape, CachedAttention};

use crate::test_backend::TestBackend;

/// Tokens that the cache has room for.
pub const CAPACITY: usize = 90;

/// A prompt of 70 tokens, and `shape.sequence` more.
pub fn cached_attention(backend: &TestBackend, shape: AttentionShape) -> Vec<Buffer> {
    let cache = shape.batch * shape.kv_heads * CAPACITY * shape.head_dim;
    let [keys, values] = [3, 4].map(|seed| backend.input(cache, seed));
    let mut results = Vec::new();
    // Samples have different lengths. In a short sample the last new token is written again.
    for (step, sequence, past) in [(0, 70, 0), (1, shape.sequence, 70)] {
        let shape = AttentionShape { sequence, ..shape };
        let at: Vec<u32> = (0..shape.rows())
            .map(|row| (past + row % sequence).saturating_sub(7 * step * (row / sequence)) as u32)
            .collect();
        let (qkv, at) = (backend.input(shape.rows() * shape.qkv_width(), 5), backend.tokens(&at));
        let out = backend.output(shape.rows() * shape.heads * shape.head_dim);
        backend.device.cached_attention(CachedAttention {
            qkv: qkv.view(),
            positions: at.view(),
            keys: keys.view(),
            values: values.view(),
            out: out.view(),
            shape,
            capacity: CAPACITY,
        });
        results.push(out);
    }
    results.extend([keys, values]);
    results
}
