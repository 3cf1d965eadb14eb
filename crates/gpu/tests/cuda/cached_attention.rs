//! Attention of new tokens over a key-value cache.

use kintsugi_conformance::COMPUTE;
use kintsugi_conformance::cached_attention::cached_attention;
use kintsugi_tensor::ops::{AttentionShape, Scores};

use crate::test_backend::{agree, any_gpu};

const SHAPES: [AttentionShape; 3] = [
    AttentionShape { batch: 1, sequence: 1, heads: 1, kv_heads: 1, head_dim: 5, scores: Scores::PLAIN },
    AttentionShape { batch: 2, sequence: 3, heads: 6, kv_heads: 2, head_dim: 64, scores: Scores::PLAIN },
    AttentionShape { batch: 3, sequence: 2, heads: 4, kv_heads: 4, head_dim: 256, scores: Scores::PLAIN },
];

#[test]
fn a_prompt_and_what_follows_it() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES {
            agree(&gpu, dtype, &format!("cached attention of {shape:?}"), |backend| {
                cached_attention(backend, shape)
            });
        }
    }
}
