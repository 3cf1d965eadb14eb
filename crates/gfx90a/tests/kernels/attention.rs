//! Portable attention, forward and backward, beside the CPU backend in fp64 on the same numbers.

use kintsugi_gfx90a::{Argument, Grid};
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape, CachedAttention};
use kintsugi_tensor::{Backend, Buffer, Category, DType};

use crate::support::{
    Both, COMPUTE, Draw, NULL, Pair, distance, kernels, pointer, random, random_cases, size, suffix,
};

/// As in the kernels.
const TILE: usize = 32;
const THREADS: usize = 256;
const ROWS_PER_BLOCK: usize = 16;

/// The error of a result beside fp64: rounding of the format, and of sums in fp32.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 3e-3,
        DType::F16 => 4e-4,
        _ => 5e-7,
    }
}

/// The first key that each query attends to, for packed documents of this many tokens.
fn starts(shape: AttentionShape, document: usize) -> Vec<u32> {
    (0..shape.batch * shape.sequence).map(|row| (row % shape.sequence / document * document) as u32).collect()
}

/// The same numbers in fp64 on the CPU.
fn exact(pair: &Pair, of: &Both) -> Buffer {
    let values = pair.cpu.read(of.cpu.view());
    let buffer = pair.cpu.allocate(values.len(), DType::F64, Category::Activations);
    pair.cpu.upload(&values, buffer.view());
    buffer
}

fn check(pair: &Pair, dtype: DType, ours: &Both, exact: &Buffer, what: &str) {
    let error = distance(&pair.read(ours), &pair.cpu.read(exact.view()));
    assert!(error <= tolerance(dtype), "{what}: relative error {error}");
}

/// One case. `document` is the length of packed documents; 0 for none.
#[derive(Clone, Copy, Debug)]
struct Case {
    shape: AttentionShape,
    dtype: DType,
    plain: bool,
    document: usize,
}

impl Case {
    fn grid(self, heads: usize, vectors: usize, scores: usize) -> Grid {
        let floats = TILE * (vectors * (self.shape.head_dim + 1) + scores * (TILE + 1));
        let tiles = self.shape.sequence.div_ceil(TILE);
        Grid::new(1, THREADS).blocks(tiles, heads, self.shape.batch).shared(4 * floats)
    }

    fn kernel(self, name: &str) -> String {
        let masked = if self.document > 0 { "masked_" } else { "" };
        format!("{name}_{masked}{}", suffix(self.dtype))
    }

    /// The shape as the kernels take it.
    fn arguments(self, tensors: &[Argument]) -> Vec<Argument> {
        let AttentionShape { sequence, heads, kv_heads, head_dim, .. } = self.shape;
        let sizes = [sequence, heads, kv_heads, head_dim].map(|size| Argument::from(size as u32));
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        [tensors, &sizes, &[scale.into()]].concat()
    }
}

fn attention(pair: &mut Pair, case: Case) {
    let Case { shape, dtype, plain, document } = case;
    let rows = shape.batch * shape.sequence;
    let out_len = rows * shape.heads * shape.head_dim;
    let qkv = pair.random("qkv", rows * (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype, 1);
    let dout = pair.random("dout", out_len, dtype, 2);
    let (out, dqkv) = (pair.blank("out", out_len, dtype), pair.blank("dqkv", qkv.cpu.len(), dtype));
    let kept = if plain {
        pair.blank("probabilities", shape.batch * shape.heads * shape.sequence * shape.sequence, dtype)
    } else {
        pair.blank("log-sum-exps", rows * shape.heads, DType::F32)
    };
    let starts = (document > 0).then(|| pair.tokens("starts", &starts(shape, document)));

    let [x, dy, y, dx, saved] = [&qkv, &dout, &out, &dqkv, &kept].map(|both| exact(pair, both));
    let saved_view = if plain {
        AttentionSaved::Probabilities(saved.view())
    } else {
        AttentionSaved::LogSumExp(saved.view())
    };
    let starts_view = starts.as_ref().map(|starts| starts.cpu.view());
    pair.cpu.attention(Attention {
        qkv: x.view(),
        starts: starts_view,
        out: y.view(),
        saved: saved_view,
        shape,
    });
    pair.cpu.attention_backward(AttentionBackward {
        qkv: x.view(),
        starts: starts_view,
        out: y.view(),
        dout: dy.view(),
        saved: saved_view,
        dqkv: dx.view(),
        dbias: None,
        shape,
    });

    let masks: Vec<Argument> = starts.iter().map(pointer).collect();
    let saved_arguments = if plain { [NULL.into(), pointer(&kept)] } else { [pointer(&kept), NULL.into()] };
    let arguments = [&[pointer(&qkv), pointer(&out)][..], &saved_arguments, &masks].concat();
    pair.launch(&case.kernel("attention_forward"), case.grid(shape.heads, 2, 1), &case.arguments(&arguments));
    check(pair, dtype, &out, &y, &format!("forward, {case:?}"));
    check(pair, kept.cpu.dtype(), &kept, &saved, &format!("saved, {case:?}"));

    let dots = pair.scratch(4 * rows * shape.heads);
    let blocks = (rows * shape.heads).div_ceil(ROWS_PER_BLOCK);
    let arguments = case.arguments(&[pointer(&out), pointer(&dout), dots.into(), size(rows * shape.heads)]);
    pair.launch(&format!("attention_dots_{}", suffix(dtype)), Grid::new(blocks, THREADS), &arguments);
    let tensors =
        [&[pointer(&qkv), pointer(&dout)][..], &saved_arguments, &[dots.into(), pointer(&dqkv)], &masks];
    let arguments = case.arguments(&tensors.concat());
    pair.launch(&case.kernel("attention_dkeys_dvalues"), case.grid(shape.kv_heads, 4, 2), &arguments);
    pair.launch(&case.kernel("attention_dqueries"), case.grid(shape.heads, 4, 1), &arguments);
    check(pair, dtype, &dqkv, &dx, &format!("backward, {case:?}"));
}

fn shape([batch, sequence, heads, kv_heads, head_dim]: [usize; 5]) -> AttentionShape {
    AttentionShape { batch, sequence, heads, kv_heads, head_dim }
}

#[test]
fn flash_attention_in_every_format() {
    let Some(code) = kernels("attention") else { return };
    let (mut pair, mut draw) = (Pair::new(code, 1), Draw::new(9));
    for dtype in COMPUTE {
        let drawn = (0..random_cases()).map(|i| {
            let (kv_heads, group) = (draw.size(1..=2), draw.size(1..=2));
            let sizes = [1, draw.size(1..=60), kv_heads * group, kv_heads, 8 * draw.size(1..=5)];
            (sizes, if i % 2 == 0 { 0 } else { draw.size(1..=40) })
        });
        for (sizes, document) in [([2, 37, 4, 2, 24], 0), ([1, 70, 1, 1, 64], 11)].into_iter().chain(drawn) {
            attention(&mut pair, Case { shape: shape(sizes), dtype, plain: false, document });
        }
    }
}

#[test]
fn plain_attention_and_wide_heads() {
    let Some(code) = kernels("attention") else { return };
    let mut pair = Pair::new(code, 2);
    for dtype in [DType::F32, DType::BF16] {
        for (sizes, document) in [([1, 45, 2, 1, 16], 0), ([1, 33, 1, 1, 8], 10)] {
            attention(&mut pair, Case { shape: shape(sizes), dtype, plain: true, document });
        }
    }
    attention(
        &mut pair,
        Case { shape: shape([1, 34, 1, 1, 96]), dtype: DType::F32, plain: false, document: 0 },
    );
}

/// At this head width the backward in fp32 wants more LDS than a workgroup has, which the launch says.
#[test]
fn the_backward_of_heads_of_128_does_not_fit() {
    let Some(code) = kernels("attention") else { return };
    let mut machine = kintsugi_gfx90a::Machine::new(0);
    let case = Case { shape: shape([1, 32, 1, 1, 128]), dtype: DType::F32, plain: false, document: 0 };
    let nothing: Vec<Argument> = vec![NULL.into(); 6];
    let arguments = case.arguments(&nothing);
    let error = machine.launch(&code, "attention_dkeys_dvalues_f32", case.grid(1, 4, 2), &arguments);
    let message = error.expect_err("there is not enough LDS").to_string();
    assert_eq!(message, "attention_dkeys_dvalues_f32: 74496 bytes of LDS; a workgroup has at most 65536");
}

#[test]
fn attention_over_a_cache() {
    let Some(code) = kernels("cached_attention") else { return };
    let mut pair = Pair::new(code, 3);
    let capacity = 40;
    for dtype in COMPUTE {
        for shape in [[2, 3, 6, 2, 64], [1, 1, 1, 1, 5]].map(shape) {
            let AttentionShape { batch, sequence, heads, kv_heads, head_dim } = shape;
            let rows = batch * sequence;
            let cache = batch * kv_heads * capacity * head_dim;
            let [keys, values] = [3, 4].map(|seed| pair.numbers("cache", &random(cache, seed), dtype));
            let qkv = pair.random("qkv", rows * (heads + 2 * kv_heads) * head_dim, dtype, 5);
            let at: Vec<u32> =
                (0..rows).map(|row| (30 + row % sequence - 7 * (row / sequence)) as u32).collect();
            let at = pair.tokens("positions", &at);
            let out = pair.blank("out", rows * heads * head_dim, dtype);
            pair.cpu.cached_attention(CachedAttention {
                qkv: qkv.cpu.view(),
                positions: at.cpu.view(),
                keys: keys.cpu.view(),
                values: values.cpu.view(),
                out: out.cpu.view(),
                shape,
                capacity,
            });
            let sizes =
                [sequence, heads, kv_heads, head_dim, capacity].map(|size| Argument::from(size as u32));
            let tensors = [pointer(&qkv), pointer(&at), pointer(&keys), pointer(&values)];
            let arguments = [&tensors[..], &sizes].concat();
            pair.launch(&format!("cache_append_{}", suffix(dtype)), Grid::new(rows, 128), &arguments);
            let scale = ((1.0 / (head_dim as f64).sqrt()) as f32).into();
            let arguments = [&tensors[..], &[pointer(&out)], &sizes, &[scale]].concat();
            let grid = Grid::new(1, 128).blocks(sequence, heads, batch);
            pair.launch(&format!("cached_attention_{}", suffix(dtype)), grid, &arguments);
            let what = format!("cached attention, {shape:?} in {dtype:?}");
            for result in [&keys, &values, &out] {
                pair.agree(result, &what);
            }
        }
    }
}
