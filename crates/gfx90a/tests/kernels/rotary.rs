//! Rotary positions, there and back.

use kintsugi_gfx90a::Grid;
use kintsugi_spec::{FrequencyScaling, RotaryScaling, RotaryScalingKind};
use kintsugi_tensor::Backend;
use kintsugi_tensor::ops::{AttentionShape, Rotary, Scores, Slices};

use crate::support::{COMPUTE, NULL, PACK, Pair, kernels, pointer, size, suffix};

const THREADS: usize = 128;

#[test]
fn queries_and_keys_are_rotated() {
    let Some(code) = kernels("rotary") else { return };
    let mut pair = Pair::new(code, 1);
    let shape =
        AttentionShape { batch: 1, sequence: 9, heads: 2, kv_heads: 1, head_dim: 64, scores: Scores::PLAIN };
    let rows = shape.batch * shape.sequence;
    let width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    let scaled = RotaryScaling { positions: 64, ..RotaryScaling::default() };
    let yarn = RotaryScaling { kind: RotaryScalingKind::Yarn, ..scaled };
    for dtype in COMPUTE {
        let part = Slices { parts: 3, part: 1 };
        for (dims, scaling, inverse, moved, slices) in [
            (64, None, false, false, Slices::WHOLE),
            (16, Some(scaled), true, true, part),
            (32, Some(yarn), false, true, part),
            (6, None, false, true, part),
            (8, None, false, false, part),
        ] {
            let scaling = FrequencyScaling::new(scaling, 1e4, dims);
            let qkv = pair.random("qkv", rows * width, dtype, 1);
            let at: Vec<u32> = (0..rows as u32).map(|row| 999 * row + 1).collect();
            let at = pair.tokens("positions", &at);
            pair.cpu.rotary(Rotary {
                qkv: qkv.cpu.view(),
                shape,
                dims,
                base: 1e4,
                scaling,
                inverse,
                positions: moved.then_some(at.cpu.view()),
                slices,
            });
            let pairs = dims / 2;
            let wide = pairs.is_multiple_of(PACK);
            let FrequencyScaling { factor, divided, kept, positions, amplitude } = scaling;
            let [early, late] = slices.offsets(shape.sequence);
            let arguments = [
                pointer(&qkv),
                if moved { pointer(&at) } else { NULL.into() },
                size(rows),
                size(shape.sequence),
                size(early),
                size(late),
                size(width),
                (shape.heads as u32 + shape.kv_heads as u32).into(),
                (shape.head_dim as u32).into(),
                (pairs as u32).into(),
                1e4_f64.into(),
                factor.into(),
                divided.into(),
                kept.into(),
                positions.into(),
                amplitude.into(),
                inverse.into(),
            ];
            let threads = rows * if wide { pairs / PACK } else { pairs };
            let name = format!("rotary_{}{}", if wide { "wide_" } else { "" }, suffix(dtype));
            pair.launch(&name, Grid::new(threads.div_ceil(THREADS), THREADS), &arguments);
            pair.agree(&qkv, &format!("{name} of {dims}"));
        }
    }
}
