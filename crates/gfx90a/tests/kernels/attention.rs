//! Portable attention, forward and backward, beside the CPU backend in fp64 on the same numbers.

use kintsugi_gfx90a::{Argument, Grid};
use kintsugi_tensor::ops::{
    AttentionShape, CachedAttention, Columns, SlicedAttention, SlicedAttentionBackward, Slices,
};
use kintsugi_tensor::{Backend, Buffer, DType};

use crate::attention_tensors::{Case, Tensors, shape};
use crate::support::{
    COMPUTE, Draw, NULL, Pair, defined_kernels, kernels, pointer, random, random_cases, size, suffix,
};

/// As in the kernels. For heads of 256 the host chooses the smaller tile, so that it fits into the LDS of a workgroup.
const TILE: usize = 32;
const SMALL_TILE: usize = 16;
const THREADS: usize = 256;
const ROWS_PER_BLOCK: usize = 16;

impl Case {
    fn tile(self) -> usize {
        if self.shape.head_dim > 128 { SMALL_TILE } else { TILE }
    }

    fn grid(self, heads: usize, vectors: usize, scores: usize) -> Grid {
        let tile = self.tile();
        let floats = tile * (vectors * (self.shape.head_dim + 1) + scores * (tile + 1));
        let tiles = self.shape.sequence.div_ceil(tile);
        Grid::new(1, THREADS).blocks(tiles, heads, self.shape.batch).shared(4 * floats)
    }

    fn kernel(self, name: &str) -> String {
        let masked = if self.is_masked() { "masked_" } else { "" };
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
    pair.launch(&case.kernel("attention_dkeys_dvalues"), case.grid(shape.kv_heads, 3, 2), &arguments);
    pair.launch(&case.kernel("attention_dqueries"), case.grid(shape.heads, 3, 1), &arguments);
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

#[test]
fn windows_and_soft_caps() {
    let cases = [(Some(9), None), (None, Some(1.5)), (Some(40), Some(1.5))];
    for (number, (window, soft_cap)) in cases.into_iter().enumerate() {
        for (dtype, plain) in [(DType::F32, false), (DType::F32, true), (DType::BF16, false)] {
            let document = if number == 0 { 25 } else { 0 };
            let case = Case { shape: shape([1, 70, 2, 1, 24]), dtype, plain, document };
            let case = case.limited(window, soft_cap);
            let Some(code) = defined_kernels("attention", &case.definitions()) else { return };
            attention(&mut Pair::new(code, 6), case);
        }
    }
}

/// The widest heads, with Gemma 2's windows and soft caps, in the smaller tiles.
#[test]
fn heads_of_256() {
    for (dtype, window) in [(DType::F32, None), (DType::BF16, Some(20))] {
        let case = Case::flash([1, 35, 2, 1, 256], dtype, 0).limited(window, Some(1.5));
        let definitions = [vec![format!("TILE={SMALL_TILE}")], case.definitions()].concat();
        let Some(code) = defined_kernels("attention", &definitions) else { return };
        attention(&mut Pair::new(code, 7), case);
    }
}

/// At this head width larger tiles want more LDS than a workgroup has, which the launch says.
#[test]
fn larger_tiles_do_not_fit_heads_of_256() {
    let Some(code) = kernels("attention") else { return };
    let mut machine = kintsugi_gfx90a::Machine::new(0);
    let case = Case::flash([1, 32, 1, 1, 256], DType::F32, 0);
    let nothing: Vec<Argument> = vec![NULL.into(); 6];
    let grid = Grid::new(1, THREADS).shared(4 * TILE * (3 * (256 + 1) + 2 * (TILE + 1)));
    let error = machine.launch(&code, "attention_dkeys_dvalues_f32", grid, &case.arguments(&nothing));
    let message = error.expect_err("there is not enough LDS").to_string();
    assert_eq!(message, "attention_dkeys_dvalues_f32: 107136 bytes of LDS; a workgroup has at most 65536");
}

/// The queries of one part over the keys of some parts: at once, joined with those of other keys, and the backward.
fn sliced_attention(
    portable: &mut Pair,
    dots: &mut Pair,
    shape: AttentionShape,
    dtype: DType,
    slices: Slices,
) {
    let AttentionShape { batch, sequence: own, heads, kv_heads, head_dim, .. } = shape;
    let (rows, width) = (shape.rows(), heads * head_dim);
    let keys_width = 2 * kv_heads * head_dim;
    // A document begins in the middle of the second slice.
    let second = slices.position(own, own * 3 / 4);
    let start = |row: usize| if slices.position(own, row % own) < second { 1 } else { second };
    let starts: Vec<u32> = (0..rows).map(|row| start(row) as u32).collect();
    let starts = portable.tokens("starts", &starts);
    let qkv = portable.random("qkv", rows * shape.qkv_width(), dtype, 1);
    let dout = portable.random("dout", rows * width, dtype, 2);
    let log_sums = portable.blank("log_sums", rows * heads, DType::F32);
    let out = portable.blank("out", rows * width, dtype);
    let partial = portable.blank("partial", rows * width, DType::F32);
    let tile = |vectors: usize, scores: usize, owners: usize, heads: usize| {
        let floats = TILE * (vectors * (head_dim + 1) + scores * (TILE + 1));
        let tiles = (own / 2).div_ceil(TILE) + (own - own / 2).div_ceil(TILE);
        Grid::new(1, THREADS).blocks(owners * tiles, heads, batch).shared(4 * floats)
    };
    let sizes = |first_owner: usize, owners: usize| {
        let numbers = [slices.parts, slices.part, first_owner, owners, own, heads, kv_heads, head_dim];
        let scale = shape.scale() as f32;
        [&numbers.map(|number| Argument::from(number as u32))[..], &[scale.into()]].concat()
    };
    let what = format!("{shape:?} of {slices:?} in {dtype:?}");
    // The first keys are those of the last part, of which some queries see none.
    let others = slices.parts - 1;
    for (first_owner, owners, before) in [(others, 1, false), (0, others, true)] {
        let seed = first_owner as u64 + 3;
        let keys = portable.random("keys", owners * rows * keys_width, dtype, seed);
        let to = if before { &out } else { &partial };
        portable.cpu.sliced_attention(SlicedAttention {
            qkv: qkv.cpu.view(),
            keys: keys.cpu.view(),
            first_owner,
            owners,
            starts: Some(starts.cpu.view()),
            before: before.then_some(partial.cpu.view()),
            out: to.cpu.view(),
            log_sums: log_sums.cpu.view(),
            shape,
            slices,
        });
        let kind = if before { "" } else { "sums_" };
        let tensors = [&qkv, &keys, &starts].map(pointer);
        let old = if before { pointer(&partial) } else { NULL.into() };
        let arguments = [&tensors[..], &[old, pointer(to), pointer(&log_sums)], &sizes(first_owner, owners)];
        let name = format!("sliced_forward_{kind}{}", suffix(dtype));
        portable.launch(&name, tile(2, 1, 1, heads), &arguments.concat());
        portable.agree(to, &what);
        portable.agree(&log_sums, &what);
    }

    let keys = portable.random("keys", others * rows * keys_width, dtype, 3);
    let dqkv = portable.random("dqkv", rows * shape.qkv_width(), dtype, 4);
    let dkeys = portable.random("dkeys", others * rows * keys_width, DType::F32, 5);
    portable.cpu.sliced_attention_backward(SlicedAttentionBackward {
        qkv: qkv.cpu.view(),
        keys: keys.cpu.view(),
        first_owner: 0,
        owners: others,
        starts: Some(starts.cpu.view()),
        out: out.cpu.view(),
        dout: dout.cpu.view(),
        log_sums: log_sums.cpu.view(),
        dqueries: Columns { view: dqkv.cpu.view(), width: shape.qkv_width(), first: 0 },
        add_queries: false,
        dkeys: dkeys.cpu.view(),
        add_keys: true,
        shape,
        slices,
    });
    // The dots are a kernel of another file.
    let copy = |pair: &mut Pair, buffer: &Buffer| {
        let copy = pair.cpu.allocate(buffer.len(), buffer.dtype(), kintsugi_tensor::Category::Activations);
        let values = pair.cpu.read(buffer.view());
        pair.cpu.upload(&values, copy.view());
        pair.same("a copy", copy)
    };
    let [out_copy, dout_copy] = [&out, &dout].map(|both| copy(dots, &both.cpu));
    let sums = dots.blank("dots", rows * heads, DType::F32);
    let blocks = (rows * heads).div_ceil(ROWS_PER_BLOCK);
    let tensors = [pointer(&out_copy), pointer(&dout_copy), pointer(&sums), size(rows * heads)];
    let of_shape = &sizes(0, others)[4..];
    let name = format!("attention_dots_{}", suffix(dtype));
    dots.launch(&name, Grid::new(blocks, THREADS), &[&tensors, of_shape].concat());
    let values = dots.read(&sums);
    let sums = portable.numbers("dots", &values, DType::F32);

    let inputs = [&qkv, &keys, &starts, &dout, &log_sums, &sums].map(pointer);
    let arguments = [&inputs[..], &[pointer(&dkeys), true.into()], &sizes(0, others)].concat();
    let name = format!("sliced_dkeys_sums_{}", suffix(dtype));
    portable.launch(&name, tile(3, 2, others, kv_heads), &arguments);
    let to = [pointer(&dqkv), size(shape.qkv_width()), size(0), false.into()];
    let arguments = [&inputs[..], &to, &sizes(0, others)].concat();
    portable.launch(&format!("sliced_dqueries_{}", suffix(dtype)), tile(3, 1, 1, heads), &arguments);
    // The machine's output is rounded from f32 as the CPU's is, so the gradients differ as other results do.
    let within = if dtype == DType::F32 { 2e-6 } else { 2e-3 };
    portable.agree_within(&dkeys, &what, within);
    portable.agree_within(&dqkv, &what, within);
}

#[test]
fn attention_of_slices() {
    let (Some(code), Some(dots)) = (kernels("sliced_attention"), kernels("attention")) else { return };
    let (mut portable, mut dots) = (Pair::new(code, 4), Pair::new(dots, 5));
    for dtype in COMPUTE {
        for (sizes, parts, part) in [([2, 12, 2, 1, 8], 2, 1), ([1, 70, 1, 1, 24], 3, 1)] {
            sliced_attention(&mut portable, &mut dots, shape(sizes), dtype, Slices { parts, part });
        }
    }
    let soft_cap = Some(1.2);
    let capped = Case::flash([1, 70, 2, 1, 24], DType::F32, 0).limited(None, soft_cap);
    let Some(code) = defined_kernels("sliced_attention", &capped.definitions()) else { return };
    sliced_attention(
        &mut Pair::new(code, 4),
        &mut dots,
        capped.shape,
        DType::F32,
        Slices { parts: 3, part: 1 },
    );
}

#[test]
fn attention_over_a_cache() {
    let plain = [[2, 3, 6, 2, 64], [1, 1, 1, 1, 5]].map(|sizes| Case::flash(sizes, DType::F32, 0));
    let limited = Case::flash([2, 3, 4, 2, 24], DType::F32, 0).limited(Some(11), Some(1.1));
    for (cases, dtypes) in [(&plain[..], &COMPUTE[..]), (&[limited], &COMPUTE[..1])] {
        let Some(code) = defined_kernels("cached_attention", &cases[0].definitions()) else { return };
        over_a_cache(&mut Pair::new(code, 3), cases, dtypes);
    }
}

fn over_a_cache(pair: &mut Pair, cases: &[Case], dtypes: &[DType]) {
    let capacity = 40;
    for &dtype in dtypes {
        for shape in cases.iter().map(|case| case.shape) {
            let AttentionShape { batch, sequence, heads, kv_heads, head_dim, .. } = shape;
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
            let window = shape.scores.window.unwrap_or(capacity) as u32;
            let limits = [window.into(), (shape.scale() as f32).into()];
            let arguments = [&tensors[..], &[pointer(&out)], &sizes, &limits].concat();
            let grid = Grid::new(1, 128).blocks(sequence, heads, batch);
            pair.launch(&format!("cached_attention_{}", suffix(dtype)), grid, &arguments);
            let what = format!("cached attention, {shape:?} in {dtype:?}");
            for result in [&keys, &values, &out] {
                pair.agree(result, &what);
            }
        }
    }
}
