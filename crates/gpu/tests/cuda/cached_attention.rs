//! Attention of new tokens over a key-value cache.

use kintsugi_tensor::ops::{AttentionShape, CachedAttention};

use crate::test_backend::{COMPUTE, agree, any_gpu};

const CAPACITY: usize = 90;

const SHAPES: [AttentionShape; 3] = [
    AttentionShape { batch: 1, sequence: 1, heads: 1, kv_heads: 1, head_dim: 5 },
    AttentionShape { batch: 2, sequence: 3, heads: 6, kv_heads: 2, head_dim: 64 },
    AttentionShape { batch: 3, sequence: 2, heads: 4, kv_heads: 4, head_dim: 256 },
];

#[test]
fn a_prompt_and_what_follows_it() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES {
            agree(&gpu, dtype, &format!("cached attention of {shape:?}"), |backend| {
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
            });
        }
    }
}
