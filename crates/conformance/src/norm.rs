//! LayerNorm, RMSNorm and rotary positions.

use kintsugi_spec::{FrequencyScaling, RotaryScaling, RotaryScalingKind};
use kintsugi_tensor::ops::{AttentionShape, Norm, NormBackward, Rotary, Slices};
use kintsugi_tensor::{Buffer, DType};

use crate::test_backend::{TestBackend, gradient};

/// Forward and backward of one norm. Returns everything that they write.
pub fn norm(
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
    for (in_place, trained) in [(false, true), (true, true), (false, false)] {
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
            centred,
            dweight: trained.then_some(gradient(&dweight, in_place)),
            dbias: (centred && trained).then_some(gradient(&dbias, in_place)),
            rows,
            width,
        });
        written.extend([dx, dweight, dbias, sum]);
    }
    written
}

/// Rotates `dims` features, by the place in the sequence and by given positions with scaling.
pub fn rotary(backend: &TestBackend, shape: AttentionShape, dims: usize, inverse: bool) -> Vec<Buffer> {
    let qkv = backend.input(shape.rows() * shape.qkv_width(), 1);
    let (base, positions) = (1e4, None);
    backend.device.rotary(Rotary {
        qkv: qkv.view(),
        shape,
        dims,
        base,
        scaling: FrequencyScaling::NONE,
        inverse,
        positions,
        slices: Slices::WHOLE,
    });
    let at: Vec<u32> = (0..shape.rows() as u32).map(|row| 3 * row + 1).collect();
    let (moved, at) = (backend.input(qkv.len(), 2), backend.tokens(&at));
    let positions = Some(at.view());
    let scaled = RotaryScaling { positions: 64, ..RotaryScaling::default() };
    for kind in [RotaryScalingKind::Llama3, RotaryScalingKind::Yarn, RotaryScalingKind::Linear] {
        backend.device.rotary(Rotary {
            qkv: moved.view(),
            shape,
            dims,
            base,
            scaling: FrequencyScaling::new(Some(RotaryScaling { kind, ..scaled }), base, dims),
            inverse,
            positions,
            slices: Slices::WHOLE,
        });
    }
    vec![qkv, moved]
}
