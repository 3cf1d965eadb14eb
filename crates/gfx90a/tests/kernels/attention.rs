//! Portable attention, forward and backward, beside the CPU backend in fp64 on the same numbers.

use kintsugi_gfx90a::{Argument, Grid};
use kintsugi_tensor::ops::{AttentionShape, CachedAttention};
use kintsugi_tensor::{Backend, DType};

use crate::attention_tensors::{Case, Tensors, shape};
use crate::support::{COMPUTE, Draw, NULL, Pair, kernels, pointer, random, random_cases, size, suffix};

/// As in the kernels.
const TILE: usize = 32;
const THREADS: usize = 256;
const ROWS_PER_BLOCK: usize = 16;

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
        [tensors, &sizes, &[self.scale().into()]].concat()
    }
}

fn attention(pair: &mut Pair, case: Case) {
    let Case { shape, dtype, plain, .. } = case;
    let rows = shape.batch * shape.sequence;
    let tensors = Tensors::new(pair, case);
    let Tensors { qkv, dout, out, dqkv, saved, starts, .. } = &tensors;

    let masks: Vec<Argument> = starts.iter().map(pointer).collect();
    let saved_arguments = if plain { [NULL.into(), pointer(saved)] } else { [pointer(saved), NULL.into()] };
    let arguments = [&[pointer(qkv), pointer(out)][..], &saved_arguments, &masks].concat();
    pair.launch(&case.kernel("attention_forward"), case.grid(shape.heads, 2, 1), &case.arguments(&arguments));
    tensors.check_forward(pair, case);

    let dots = pair.scratch(4 * rows * shape.heads);
    let blocks = (rows * shape.heads).div_ceil(ROWS_PER_BLOCK);
    let arguments = case.arguments(&[pointer(out), pointer(dout), dots.into(), size(rows * shape.heads)]);
    pair.launch(&format!("attention_dots_{}", suffix(dtype)), Grid::new(blocks, THREADS), &arguments);
    let all = [&[pointer(qkv), pointer(dout)][..], &saved_arguments, &[dots.into(), pointer(dqkv)], &masks];
    let arguments = case.arguments(&all.concat());
    pair.launch(&case.kernel("attention_dkeys_dvalues"), case.grid(shape.kv_heads, 4, 2), &arguments);
    pair.launch(&case.kernel("attention_dqueries"), case.grid(shape.heads, 4, 1), &arguments);
    tensors.check_backward(pair, case);
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
