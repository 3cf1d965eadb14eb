//! LayerNorm, RMSNorm and rotary positions.

use kintsugi_gpu::GpuBackend;
use kintsugi_spec::RotaryScaling;
use kintsugi_tensor::ops::{AttentionShape, Norm, NormBackward, Rotary, Slices};
use kintsugi_tensor::{Buffer, DType};

use crate::test_backend::{COMPUTE, TestBackend, agree, any_gpu, gpu, gradient, gradient_types};

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

/// Forward and backward of one norm. Returns everything that they write.
fn norm(
    backend: &TestBackend,
    (rows, width): (usize, usize),
    centred: bool,
    gradients: DType,
) -> Vec<Buffer> {
    let [x, dy, residual] = [1, 2, 3].map(|seed| backend.input(rows * width, seed));
    let [weight, bias] = [4, 5].map(|seed| backend.input(width, seed));
    let (out, statistics) = (backend.output(rows * width), backend.sums(2 * rows));
    backend.device.norm(Norm {
        x: x.view(),
        weight: weight.view(),
        bias: centred.then_some(bias.view()),
        out: out.view(),
        statistics: statistics.view(),
        epsilon: 1e-5,
        rows,
        width,
    });
    let mut written = vec![out, statistics];
    for in_place in [false, true] {
        let dx = if in_place { backend.input(rows * width, 2) } else { backend.output(rows * width) };
        let [dweight, dbias, sum] = [(); 3].map(|()| backend.blank(width, gradients));
        backend.device.norm_backward(NormBackward {
            dy: if in_place { dx.view() } else { dy.view() },
            x: x.view(),
            statistics: written[1].view(),
            weight: weight.view(),
            residual: in_place.then_some(residual.view()),
            residual_sum: in_place.then_some(gradient(&sum, centred)),
            dx: dx.view(),
            dweight: gradient(&dweight, in_place),
            dbias: centred.then_some(gradient(&dbias, in_place)),
            rows,
            width,
        });
        written.extend([dx, dweight, dbias, sum]);
    }
    written
}

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
    let shape = AttentionShape { batch: 2, sequence: 70, heads: 4, kv_heads: 2, head_dim: 64 };
    let long = AttentionShape { batch: 1, sequence: 5000, heads: 1, kv_heads: 1, head_dim: 16 };
    for dtype in COMPUTE {
        for (shape, dims) in [(shape, 64), (shape, 16), (shape, 6), (shape, 0), (long, 16)] {
            for inverse in [false, true] {
                agree(&gpu, dtype, &format!("rotary of {dims}, inverse {inverse}"), |backend| {
                    let qkv = backend.input(shape.rows() * shape.qkv_width(), 1);
                    let (base, positions) = (1e4, None);
                    backend.device.rotary(Rotary {
                        qkv: qkv.view(),
                        shape,
                        dims,
                        base,
                        scaling: None,
                        inverse,
                        positions,
                        slices: Slices::WHOLE,
                    });
                    let at: Vec<u32> = (0..shape.rows() as u32).map(|row| 3 * row + 1).collect();
                    let (moved, at) = (backend.input(qkv.len(), 2), backend.tokens(&at));
                    let positions = Some(at.view());
                    let scaling = Some(RotaryScaling { factor: 8.0, low: 1.0, high: 4.0, positions: 64 });
                    backend.device.rotary(Rotary {
                        qkv: moved.view(),
                        shape,
                        dims,
                        base,
                        scaling,
                        inverse,
                        positions,
                        slices: Slices::WHOLE,
                    });
                    vec![qkv, moved]
                });
            }
        }
    }
}
