//! LayerNorm, RMSNorm and rotary positions.

use kintsugi_conformance::norm::{norm, rotary};
use kintsugi_conformance::{COMPUTE, gradient_types};
use kintsugi_gpu::GpuBackend;
use kintsugi_tensor::ops::{AttentionShape, Scores};

use crate::test_backend::{agree, any_gpu, gpu};

/// Widths for every kernel: odd, in one warp, in several, two packs per thread, and beyond.
const SHAPES: [(usize, usize); 13] = [
    (2, 7),
    (3, 50),
    (37, 64),
    (700, 768),
    (5, 1001),
    (40, 1600),
    (40, 2048),
    (300, 2112),
    (33, 4096),
    (17, 8192),
    (9, 9000),
    (3, 12_800),
    (2, 33_000),
];

#[test]
fn norms_and_their_backward() {
    if let Some(gpu) = gpu() {
        norms(&gpu, &SHAPES);
    }
}

/// A width of 768 has 96 threads in whole warps of 32, and 128 in whole waves of 64.
#[test]
fn norms_of_few_rows() {
    if let Some(gpu) = any_gpu() {
        norms(&gpu, &[(2, 7), (3, 768), (2, 1600), (2, 4096)]);
    }
}

fn norms(gpu: &GpuBackend, shapes: &[(usize, usize)]) {
    for dtype in COMPUTE {
        for &shape in shapes {
            for gradients in gradient_types(dtype) {
                for centred in [false, true] {
                    let what = format!("norm {shape:?}, centred {centred}, gradients {gradients:?}");
                    agree(gpu, dtype, &what, |backend| norm(backend, shape, centred, gradients));
                }
            }
        }
    }
}

#[test]
fn rotary_turns_queries_and_keys_and_back() {
    let Some(gpu) = any_gpu() else { return };
    let shape =
        AttentionShape { batch: 2, sequence: 70, heads: 4, kv_heads: 2, head_dim: 64, scores: Scores::PLAIN };
    let long = AttentionShape {
        batch: 1,
        sequence: 5000,
        heads: 1,
        kv_heads: 1,
        head_dim: 16,
        scores: Scores::PLAIN,
    };
    for dtype in COMPUTE {
        for (shape, dims) in [(shape, 64), (shape, 16), (shape, 6), (shape, 0), (long, 16)] {
            for inverse in [false, true] {
                agree(&gpu, dtype, &format!("rotary of {dims}, inverse {inverse}"), |backend| {
                    rotary(backend, shape, dims, inverse)
                });
            }
        }
    }
}
