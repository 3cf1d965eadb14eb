//! Attention of new tokens over a cache.

use kintsugi_tensor::ops::{AttentionShape, CachedAttention};

use crate::lab::{COMPUTE, agree, card};

const CAPACITY: usize = 90;

const SHAPES: [AttentionShape; 3] = [
    AttentionShape { batch: 1, sequence: 1, heads: 1, kv_heads: 1, head_dim: 5 },
    AttentionShape { batch: 2, sequence: 3, heads: 6, kv_heads: 2, head_dim: 64 },
    AttentionShape { batch: 3, sequence: 2, heads: 4, kv_heads: 4, head_dim: 256 },
];

#[test]
fn a_prompt_and_what_follows_it() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES {
            agree(&card, dtype, &format!("cached attention of {shape:?}"), |lab| {
                let cache = shape.batch * shape.kv_heads * CAPACITY * shape.head_dim;
                let [keys, values] = [3, 4].map(|seed| lab.input(cache, seed));
                let mut results = Vec::new();
                // Samples are of different lengths, and the last new token of a short one is seen again.
                for (step, sequence, past) in [(0, 70, 0), (1, shape.sequence, 70)] {
                    let shape = AttentionShape { sequence, ..shape };
                    let at: Vec<u32> = (0..shape.rows())
                        .map(|row| (past + row % sequence).saturating_sub(7 * step * (row / sequence)) as u32)
                        .collect();
                    let (qkv, at) = (lab.input(shape.rows() * shape.qkv_width(), 5), lab.tokens(&at));
                    let out = lab.output(shape.rows() * shape.heads * shape.head_dim);
                    lab.backend.cached_attention(CachedAttention {
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
