//! Attention of a part's slices on the matrix cores, for context parallelism, beside the CPU backend in fp64 over all keys.
//!
//! Keys come all at once, as if they were gathered, and part by part as in a ring, whose results are joined by their
//! log-sum-exps and whose gradients are added.

use kintsugi_gfx90a::{Argument, CodeObject, Grid};
use kintsugi_tensor::ops::{AttentionShape, Slices};
use kintsugi_tensor::{Backend, Buffer, DType};

use crate::attention_tensors::{dots, tolerances};
use crate::mfma_attention::{BLOCK, THREADS, definitions, exchange_factors, head_dims};
use crate::slice_tensors::{Case, Tensors};
use crate::support::{
    Both, Draw, NULL, Pair, defined_kernels, distance, kernels, pointer, random_cases, size,
};

impl Case {
    fn code(self, file: &str) -> Option<CodeObject> {
        defined_kernels(file, &definitions(self.shape.head_dim, self.dtype))
    }

    /// Launches a kernel on the keys of some parts.
    fn launch(
        self,
        pair: &mut Pair,
        code: &CodeObject,
        kernel: &str,
        tensors: &[Argument],
        [first_owner, owners]: [usize; 2],
    ) {
        let AttentionShape { batch, sequence, heads, kv_heads, .. } = self.shape;
        let slice = sequence / 2;
        let blocks = slice.div_ceil(BLOCK) + (sequence - slice).div_ceil(BLOCK);
        let grid = Grid::new(1, THREADS);
        let grid = match kernel {
            "dkeys_dvalues" => grid.blocks(owners * blocks, kv_heads, batch),
            _ => grid.blocks(blocks, heads, batch),
        };
        let Slices { parts, part } = self.slices;
        let sizes = [parts, part, first_owner, owners, sequence, heads, kv_heads];
        let sizes = sizes.map(|size| Argument::from(size as u32));
        let scale = Argument::from(self.shape.scale() as f32);
        let arguments = [tensors, &sizes, &[scale]].concat();
        pair.machine
            .launch(code, &format!("mfma_sliced_{kernel}"), grid, &arguments)
            .unwrap_or_else(|error| panic!("{self:?}: {error}"));
    }
}

fn error(pair: &Pair, ours: &Both, exact: &Buffer) -> f64 {
    distance(&pair.read(ours), &pair.cpu.read(exact.view()))
}

fn check(pair: &Pair, ours: &Both, exact: &Buffer, tolerance: f64, what: &str) {
    let error = error(pair, ours, exact);
    println!("{what}: relative error {error:.2e}");
    assert!(error <= tolerance, "{what}: relative error {error}");
}

/// The output and the log-sum-exps over all keys at once.
fn gathered_forward(pair: &mut Pair, code: &CodeObject, case: Case, tensors: &Tensors) -> [Both; 2] {
    let out = pair.blank("out", tensors.dout.cpu.len(), case.dtype);
    let log_sums = pair.blank("log_sums", case.shape.rows() * case.shape.heads, DType::F32);
    let arguments = [
        pointer(&tensors.qkv),
        pointer(&tensors.keys),
        tensors.starts(),
        NULL.into(),
        pointer(&out),
        false.into(),
        pointer(&log_sums),
    ];
    case.launch(pair, code, "forward", &arguments, [0, case.slices.parts]);
    [out, log_sums]
}

/// The same part by part.
fn ring_forward(pair: &mut Pair, code: &CodeObject, case: Case, tensors: &Tensors) -> [Both; 2] {
    let out = pair.blank("out", tensors.dout.cpu.len(), case.dtype);
    let partial = pair.blank("partial", tensors.dout.cpu.len(), DType::F32);
    let log_sums = pair.blank("log_sums", case.shape.rows() * case.shape.heads, DType::F32);
    for (step, owner) in case.ring().enumerate() {
        let is_last = step + 1 == case.slices.parts;
        let arguments = [
            pointer(&tensors.qkv),
            tensors.keys_of(case, owner),
            tensors.starts(),
            if step == 0 { NULL.into() } else { pointer(&partial) },
            pointer(if is_last { &out } else { &partial }),
            (!is_last).into(),
            pointer(&log_sums),
        ];
        case.launch(pair, code, "forward", &arguments, [owner, 1]);
    }
    [out, log_sums]
}

/// Gradients of the queries, in the columns before those of keys and values, and of keys and values, over all keys at once.
fn gathered_backward(
    pair: &mut Pair,
    code: &CodeObject,
    case: Case,
    tensors: &Tensors,
    [dots, log_sums]: [&Both; 2],
) -> [Both; 2] {
    let dqkv = pair.blank("dqkv", tensors.qkv.cpu.len(), case.dtype);
    let dkeys = pair.blank("dkeys", tensors.keys.cpu.len(), DType::F32);
    let Tensors { qkv, keys, dout, .. } = tensors;
    let inputs =
        [pointer(qkv), pointer(keys), tensors.starts(), pointer(dout), pointer(log_sums), pointer(dots)];
    let all = [0, case.slices.parts];
    let arguments = [&inputs[..], &[pointer(&dkeys), true.into(), false.into()]].concat();
    case.launch(pair, code, "dkeys_dvalues", &arguments, all);
    let to = [pointer(&dqkv), false.into(), false.into(), size(case.shape.qkv_width()), size(0)];
    case.launch(pair, code, "dqueries", &[&inputs[..], &to].concat(), all);
    let rows = pair.read(&dqkv);
    let dqueries: Vec<f32> =
        rows.chunks(case.shape.qkv_width()).flat_map(|row| row[..case.width()].to_vec()).collect();
    [pair.numbers("dqueries", &dqueries, case.dtype), dkeys]
}

/// The same part by part.
fn ring_backward(
    pair: &mut Pair,
    code: &CodeObject,
    case: Case,
    tensors: &Tensors,
    [dots, log_sums]: [&Both; 2],
) -> [Both; 2] {
    let dqueries = pair.blank("dqueries", tensors.dout.cpu.len(), DType::F32);
    let dkeys = pair.blank("dkeys", tensors.keys.cpu.len(), case.dtype);
    for (step, owner) in case.ring().enumerate() {
        let inputs = [
            pointer(&tensors.qkv),
            tensors.keys_of(case, owner),
            tensors.starts(),
            pointer(&tensors.dout),
            pointer(log_sums),
            pointer(dots),
        ];
        let to: Argument = (dkeys.address + (owner * case.keys() * case.dtype.bytes()) as u64).into();
        let arguments = [&inputs[..], &[to, false.into(), false.into()]].concat();
        case.launch(pair, code, "dkeys_dvalues", &arguments, [owner, 1]);
        let to = [pointer(&dqueries), true.into(), (step > 0).into(), size(case.width()), size(0)];
        case.launch(pair, code, "dqueries", &[&inputs[..], &to].concat(), [owner, 1]);
    }
    [dqueries, dkeys]
}

/// Slices that are shorter and longer than a block, one head and groups, documents, parts at both ends and in the middle.
fn cases(dtype: DType, seed: u64) -> Vec<Case> {
    let named = [
        Case::new([1, 150, 2, 1, 64], dtype, [2, 0], 0),
        Case::new([2, 40, 2, 2, 128], dtype, [3, 1], 33),
        Case::new([1, 280, 1, 1, 64], dtype, [2, 1], 100),
    ];
    let mut draw = Draw::new(seed);
    let random = (0..random_cases()).map(|i| {
        let (kv_heads, group, parts) = (draw.size(1..=2), draw.size(1..=2), draw.size(1..=3));
        let head_dim = head_dims(dtype)[i % head_dims(dtype).len()];
        let sizes = [1, 2 * draw.size(1..=35), kv_heads * group, kv_heads, head_dim];
        Case::new(
            sizes,
            dtype,
            [parts, draw.size(0..=parts - 1)],
            if i % 2 == 0 { draw.size(1..=90) } else { 0 },
        )
    });
    named.into_iter().chain(random).collect()
}

#[test]
fn the_forward_of_slices_in_both_formats() {
    let Some(portable) = kernels("attention") else { return };
    let mut pair = Pair::new(portable, 1);
    for (dtype, seed) in [(DType::BF16, 4), (DType::F16, 5)] {
        for case in cases(dtype, seed) {
            let Some(code) = case.code("mfma_attention_forward") else { return };
            let tensors = Tensors::new(&mut pair, case);
            let gathered = gathered_forward(&mut pair, &code, case, &tensors);
            let joined = ring_forward(&mut pair, &code, case, &tensors);
            for ([out, log_sums], how) in [(gathered, "at once"), (joined, "joined")] {
                let what = format!("{how}, {case:?}");
                check(&pair, &out, &tensors.exact.out, tolerances(dtype)[0], &what);
                check(&pair, &log_sums, &tensors.exact.log_sums, tolerances(DType::F32)[0], &what);
            }
        }
    }
}

#[test]
fn the_backward_of_slices_in_bf16() {
    let Some(portable) = kernels("attention") else { return };
    let mut pair = Pair::new(portable, 2);
    for case in cases(DType::BF16, 6) {
        let [Some(before), Some(code)] =
            ["mfma_attention_forward", "mfma_attention_backward"].map(|file| case.code(file))
        else {
            return;
        };
        let tensors = Tensors::new(&mut pair, case);
        let [out, log_sums] = gathered_forward(&mut pair, &before, case, &tensors);
        let dots = dots(&mut pair, case.shape, case.dtype, &out, &tensors.dout);
        let saved = [&dots, &log_sums];
        let gathered = gathered_backward(&mut pair, &code, case, &tensors, saved);
        let added = ring_backward(&mut pair, &code, case, &tensors, saved);
        for ([dqueries, dkeys], how) in [(gathered, "at once"), (added, "added")] {
            let what = format!("{how}, {case:?}");
            check(&pair, &dqueries, &tensors.exact.dqueries, tolerances(case.dtype)[1], &what);
            check(&pair, &dkeys, &tensors.exact.dkeys, tolerances(case.dtype)[1], &what);
        }
    }
}

/// Kernels whose products have exchanged factors, so that lanes hold their transpose.
#[test]
fn a_wrong_mapping_of_lanes_is_noticed_in_slices() {
    let Some(portable) = kernels("attention") else { return };
    let case = Case::new([1, 40, 1, 1, 64], DType::BF16, [2, 1], 0);
    let codes = || ["mfma_attention_forward", "mfma_attention_backward"].map(|file| case.code(file));
    let ([Some(before), _], [Some(wrong_before), Some(wrong)]) = (codes(), codes()) else { return };
    let [wrong_before, wrong] =
        [wrong_before, wrong].map(|code| code.with_changed_instructions(exchange_factors));
    let mut pair = Pair::new(portable, 3);
    let tensors = Tensors::new(&mut pair, case);

    let [out, _] = gathered_forward(&mut pair, &wrong_before, case, &tensors);
    let output = error(&pair, &out, &tensors.exact.out);
    assert!(output > 0.1, "output: relative error {output}");
    let [out, log_sums] = gathered_forward(&mut pair, &before, case, &tensors);
    let dots = dots(&mut pair, case.shape, case.dtype, &out, &tensors.dout);
    let [dqueries, dkeys] = gathered_backward(&mut pair, &wrong, case, &tensors, [&dots, &log_sums]);
    for (ours, exact) in [(dqueries, &tensors.exact.dqueries), (dkeys, &tensors.exact.dkeys)] {
        let error = error(&pair, &ours, exact);
        assert!(error > 0.1, "gradients: relative error {error}");
    }
}
