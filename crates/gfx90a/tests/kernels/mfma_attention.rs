//! Attention on the matrix cores, forward and backward, beside the CPU backend in fp64 on the same numbers.

use kintsugi_gfx90a::{Architecture, Argument, CodeObject, Error, Fault, Grid};
use kintsugi_tensor::DType;
use kintsugi_testing::cases as few_or_all;

use crate::attention_tensors::{Case, Tensors, dots};
use crate::compilers::clang;
use crate::support::{Draw, Pair, defined_kernels, kernels, pointer, random_cases, suffix};

/// As in the kernels.
pub const THREADS: usize = 256;
/// Queries or keys of a block.
pub const BLOCK: usize = 128;

/// Head widths whose tiles differ.
pub const HEAD_DIMS: [usize; 5] = [64, 80, 88, 96, 128];

/// Those that are tested in a format. The lanes of both formats are the same, so few do for fp16.
pub fn head_dims(dtype: DType) -> &'static [usize] {
    if dtype == DType::F16 { few_or_all(&[64, 128], &HEAD_DIMS) } else { &HEAD_DIMS }
}

/// The kernels of one file for a type and a head width.
fn compiled(file: &str, case: Case) -> Option<CodeObject> {
    defined_kernels(file, &definitions(case.shape.head_dim, case.dtype))
}

pub fn definitions(head_dim: usize, dtype: DType) -> Vec<String> {
    vec![
        format!("HEAD_DIM={head_dim}"),
        format!("ELEMENT={}", suffix(dtype)),
        format!("LAUNCH_THREADS={THREADS}"),
    ]
}

/// Launches a kernel, whose last arguments are starts and sizes.
fn launch(
    pair: &mut Pair,
    code: &CodeObject,
    case: Case,
    kernel: &str,
    tensors: &[Argument],
    starts: &[Argument],
) {
    try_launch(pair, code, case, kernel, tensors, starts).unwrap_or_else(|error| panic!("{error}"));
}

fn try_launch(
    pair: &mut Pair,
    code: &CodeObject,
    case: Case,
    kernel: &str,
    tensors: &[Argument],
    starts: &[Argument],
) -> Result<(), Error> {
    let shape = case.shape;
    let heads = if kernel == "dkeys_dvalues" { shape.kv_heads } else { shape.heads };
    let grid = Grid::new(1, THREADS).blocks(shape.sequence.div_ceil(BLOCK), heads, shape.batch);
    let name = format!("mfma_attention_{kernel}{}", if starts.is_empty() { "" } else { "_masked" });
    let sizes = [shape.sequence, shape.heads, shape.kv_heads].map(|size| Argument::from(size as u32));
    let arguments = [tensors, starts, &sizes, &[case.scale().into()]].concat();
    pair.machine.launch(code, &name, grid, &arguments)
}

fn forward(pair: &mut Pair, code: &CodeObject, case: Case, tensors: &Tensors) {
    let starts: Vec<Argument> = tensors.starts.iter().map(pointer).collect();
    let arguments = [pointer(&tensors.qkv), pointer(&tensors.out), pointer(&tensors.saved)];
    launch(pair, code, case, "forward", &arguments, &starts);
}

/// The dots are computed by the portable kernel, which `pair` has.
fn backward(pair: &mut Pair, code: &CodeObject, case: Case, tensors: &Tensors) {
    let Tensors { qkv, dout, out, dqkv, saved, starts, .. } = tensors;
    let dots = dots(pair, case.shape, case.dtype, out, dout);
    let starts: Vec<Argument> = starts.iter().map(pointer).collect();
    let arguments = [pointer(qkv), pointer(dout), pointer(saved), pointer(&dots), pointer(dqkv)];
    launch(pair, code, case, "dkeys_dvalues", &arguments, &starts);
    launch(pair, code, case, "dqueries", &arguments, &starts);
}

/// Ragged ends, grouped queries and documents.
fn cases(dtype: DType, seed: u64) -> Vec<Case> {
    let (mut draw, head_dims) = (Draw::new(seed), head_dims(dtype));
    let named = head_dims.iter().enumerate().map(|(i, &head_dim)| {
        let (sizes, document) = if i % 2 == 0 { ([1, 150, 2, 1], 0) } else { ([2, 70, 2, 2], 33) };
        Case::flash([sizes[0], sizes[1], sizes[2], sizes[3], head_dim], dtype, document)
    });
    let window = Case::flash([1, 150, 2, 1, 64], dtype, 0).limited(Some(40), None);
    let named: Vec<Case> = named.chain([window]).collect();
    let random = (0..random_cases()).map(|i| {
        let (kv_heads, group) = (draw.size(1..=2), draw.size(1..=2));
        let sizes = [1, draw.size(1..=200), kv_heads * group, kv_heads, head_dims[i % head_dims.len()]];
        Case::flash(sizes, dtype, if i % 2 == 0 { draw.size(1..=90) } else { 0 })
    });
    named.into_iter().chain(random).collect()
}

#[test]
fn the_forward_in_both_formats() {
    let Some(portable) = kernels("attention") else { return };
    let mut pair = Pair::new(portable, 1);
    for (dtype, seed) in [(DType::BF16, 1), (DType::F16, 2)] {
        for case in cases(dtype, seed) {
            let Some(code) = compiled("mfma_attention_forward", case) else { return };
            let tensors = Tensors::new(&mut pair, case);
            forward(&mut pair, &code, case, &tensors);
            tensors.check_forward(&pair, case);
        }
    }
}

#[test]
fn the_backward_in_bf16() {
    let Some(portable) = kernels("attention") else { return };
    let mut pair = Pair::new(portable, 2);
    for case in cases(DType::BF16, 3) {
        let [Some(before), Some(code)] =
            ["mfma_attention_forward", "mfma_attention_backward"].map(|file| compiled(file, case))
        else {
            return;
        };
        let tensors = Tensors::new(&mut pair, case);
        forward(&mut pair, &before, case, &tensors);
        backward(&mut pair, &code, case, &tensors);
        tensors.check_backward(&pair, case);
    }
}

/// The same source for MI300, by LLVM's compiler, executed as far as instructions are shared: bf16 has no subnormal numbers
/// here.
#[test]
fn code_for_gfx942_gives_the_same() {
    let (Some(portable), Some(clang)) = (kernels("attention"), clang()) else { return };
    let mut pair = Pair::new(portable, 3);
    for (sizes, document) in [([2, 70, 2, 2, 80], 33), ([1, 150, 2, 1, 128], 0)] {
        let case = Case::flash(sizes, DType::BF16, document);
        let [before, code] = ["mfma_attention_forward", "mfma_attention_backward"].map(|file| {
            let definitions = definitions(case.shape.head_dim, case.dtype);
            clang.kernel_file(file, Architecture::Gfx942, &definitions).expect("the file compiles")
        });
        let tensors = Tensors::new(&mut pair, case);
        forward(&mut pair, &before, case, &tensors);
        tensors.check_forward(&pair, case);
        backward(&mut pair, &code, case, &tensors);
        tensors.check_backward(&pair, case);
    }
}

/// Without barriers, a wave reads tiles that others have not stored, or overwrites those that others read.
#[test]
fn a_missing_barrier_is_a_race_in_each_kernel() {
    let Some(portable) = kernels("attention") else { return };
    let case = Case::flash([1, 140, 1, 1, 64], DType::BF16, 0);
    let compile = || ["mfma_attention_forward", "mfma_attention_backward"].map(|file| compiled(file, case));
    let [Some(before), Some(after)] = compile() else { return };
    let [before, after] = [before, after].map(|code| {
        code.with_changed_instructions(|text| text.starts_with("s_barrier").then(|| "s_nop 0".to_owned()))
    });
    let mut pair = Pair::new(portable, 5);
    let Tensors { qkv, dout, out, dqkv, saved, .. } = Tensors::new(&mut pair, case);
    let [qkv, dout, out, dqkv, saved] = [qkv, dout, out, dqkv, saved].map(|both| pointer(&both));
    let backward = [qkv.clone(), dout, saved.clone(), saved.clone(), dqkv];
    for (code, kernel, tensors) in [
        (&before, "forward", &[qkv, out, saved][..]),
        (&after, "dkeys_dvalues", &backward),
        (&after, "dqueries", &backward),
    ] {
        match try_launch(&mut pair, code, case, kernel, tensors, &[]) {
            Err(Error::Fault(report)) => assert!(matches!(report.fault, Fault::Race { .. }), "{report}"),
            other => panic!("{kernel}: {other:?}"),
        }
    }
}

/// Kernels whose products have exchanged factors, so that lanes hold their transpose.
#[test]
fn a_wrong_mapping_of_lanes_is_noticed_in_each_kernel() {
    let Some(portable) = kernels("attention") else { return };
    let case = Case::flash([1, 40, 1, 1, 64], DType::BF16, 0);
    let compile = || ["mfma_attention_forward", "mfma_attention_backward"].map(|file| compiled(file, case));
    let ([Some(before), _], [Some(wrong_before), Some(wrong)]) = (compile(), compile()) else { return };
    let [wrong_before, wrong] =
        [wrong_before, wrong].map(|code| code.with_changed_instructions(exchange_factors));
    let mut pair = Pair::new(portable, 4);
    let tensors = Tensors::new(&mut pair, case);

    forward(&mut pair, &wrong_before, case, &tensors);
    let error = tensors.output_error(&pair);
    assert!(error > 0.1, "output: relative error {error}");
    forward(&mut pair, &before, case, &tensors);
    backward(&mut pair, &wrong, case, &tensors);
    let errors = tensors.gradient_errors(&pair, case.shape);
    assert!(errors.iter().all(|&error| error > 0.1), "gradients: relative errors {errors:?}");
}

/// `v_mfma_… d, a, b, c` with `a` and `b` exchanged.
pub fn exchange_factors(instruction: &str) -> Option<String> {
    let (name, operands) = instruction.split_once(' ').filter(|(name, _)| name.starts_with("v_mfma"))?;
    let [to, a, b, c] = operands.split(", ").collect::<Vec<_>>().try_into().ok()?;
    Some(format!("{name} {to}, {b}, {a}, {c}"))
}
