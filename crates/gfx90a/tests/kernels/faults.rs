//! Faults that are seeded on purpose: the interpreter, or the comparison with the CPU, notices each.

use kintsugi_gfx90a::{Argument, CodeObject, Error, Fault, Grid, Machine};

use crate::support::{GROUPS, LANES, WAVE, compiler, kernels, size};

/// Sums over the columns of `[rows, width]`, whose groups exchange their sums in LDS.
fn sum_columns(code: &CodeObject, rows: usize, seed: u64) -> Result<Vec<u8>, Error> {
    let mut machine = Machine::new(seed);
    let ones = 1.0_f32.to_le_bytes().repeat(rows * LANES);
    let x = machine.constant("x", ones);
    let partial = machine.buffer("the sums", vec![0; 4 * LANES]);
    let arguments: Vec<Argument> = vec![x.into(), partial.into(), size(rows), size(LANES)];
    machine.launch(code, "column_sum_f32", Grid::new(1, LANES * GROUPS), &arguments)?;
    Ok(machine.read(partial, 4 * LANES))
}

fn fault(result: Result<Vec<u8>, Error>) -> Fault {
    match result {
        Err(Error::Fault(report)) => report.fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_barrier_is_a_race_in_every_order() {
    let Some(code) = kernels("column_sum") else { return };
    for seed in 0..5 {
        let sums = sum_columns(&code, 20, seed).expect("the kernel as it is has no race");
        assert_eq!(sums, 20.0_f32.to_le_bytes().repeat(LANES));
    }
    let code =
        code.with_changed_instructions(|text| text.starts_with("s_barrier").then(|| "s_nop 0".to_owned()));
    for seed in 0..20 {
        assert!(matches!(fault(sum_columns(&code, 20, seed)), Fault::Race { .. }), "seed {seed}");
    }
}

#[test]
fn an_access_beyond_a_buffer_names_lane_and_buffer() {
    let Some(code) = kernels("elementwise") else { return };
    let mut machine = Machine::new(1);
    let to = machine.buffer("the tensor", vec![0; 4 * 100]);
    let arguments: Vec<Argument> = vec![to.into(), size(101), 1.0_f32.into(), false.into()];
    let error = machine.launch(&code, "fill_f32", Grid::new(1, 128), &arguments).expect_err("one too many");
    let message = error.to_string();
    assert!(message.starts_with("fill_f32, workgroup [0, 0, 0], wave 1, at "), "{message}");
    let end = "lane 36 accesses 4 bytes at 0x100010190, offset 400 of the tensor, which has 400 bytes";
    assert!(message.contains("global_store_dword") && message.ends_with(end), "{message}");
}

#[test]
fn a_write_to_what_was_passed_for_reading_is_refused() {
    let Some(code) = kernels("elementwise") else { return };
    let mut machine = Machine::new(1);
    let to = machine.constant("the tensor", vec![0; 4 * 64]);
    let arguments: Vec<Argument> = vec![to.into(), size(64), 1.0_f32.into(), true.into()];
    match machine.launch(&code, "fill_f32", Grid::new(1, 64), &arguments) {
        Err(Error::Fault(report)) => assert!(matches!(report.fault, Fault::ReadOnly { lane: 0, .. })),
        other => panic!("{other:?}"),
    }
}

/// Threads in whole warps of 32, as the host launches on NVIDIA: the reductions read sums of waves that do not exist.
#[test]
fn a_warp_size_of_32_gives_wrong_sums() {
    let Some(code) = kernels("norm") else { return };
    let (rows, width) = (2, 768);
    let deviation = |threads: usize| {
        let mut machine = Machine::new(1);
        // A row whose mean square differs from that of its parts.
        let row: Vec<u8> = (0..rows * width).flat_map(|i| ((i % width) as f32).to_le_bytes()).collect();
        let x = machine.constant("x", row);
        let weight = machine.constant("weight", 1.0_f32.to_le_bytes().repeat(width));
        let out = machine.buffer("out", vec![0; 4 * rows * width]);
        let statistics = machine.buffer("statistics", vec![0; 8 * rows]);
        let arguments: Vec<Argument> = vec![
            x.into(),
            weight.into(),
            0_u64.into(),
            out.into(),
            statistics.into(),
            size(rows),
            size(width),
            0.0_f32.into(),
        ];
        machine.launch(&code, "norm_held_f32", Grid::new(1, threads), &arguments).expect("the kernel runs");
        let bytes = machine.read(statistics + 4, 4);
        let found = f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes")));
        let mean_square = (0..width).map(|i| (i * i) as f64).sum::<f64>() / width as f64;
        (found * mean_square.sqrt() - 1.0).abs()
    };
    assert!(deviation(WAVE) < 1e-6);
    assert!(deviation(96) > 1e-2, "{}", deviation(96));
}

/// The same if the kernels are compiled for warps of 32.
#[test]
fn kernels_for_warps_of_32_are_noticed() {
    let Some(compiler) = compiler() else { return };
    let source = "
        extern \"C\" __global__ void reduce(float *out) {
            float x = 1.0f;
            for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor(x, mask);
            out[threadIdx.x] = x;
        }";
    for warp in [64, 32] {
        let text = format!("#undef WARP\n#define WARP {warp}\n{source}");
        let code = compiler.compile("reduce", &text).expect("the file compiles");
        let mut machine = Machine::new(1);
        let out = machine.buffer("out", vec![0; 4 * WAVE]);
        machine.launch(&code, "reduce", Grid::new(1, WAVE), &[out.into()]).expect("the kernel runs");
        assert_eq!(machine.read(out, 4 * WAVE), (warp as f32).to_le_bytes().repeat(WAVE));
    }
}

#[test]
fn unknown_instructions_are_named() {
    let Some(code) = kernels("column_sum") else { return };
    let code =
        code.with_changed_instructions(|text| text.starts_with("s_barrier").then(|| "s_trap 2".to_owned()));
    let message = sum_columns(&code, 20, 1).expect_err("it is not known").to_string();
    assert_eq!(message, "column_sum_f32: unknown instructions: s_trap 2");
}

#[test]
fn arguments_are_held_to_the_metadata() {
    let Some(code) = kernels("elementwise") else { return };
    let launch = |arguments: &[Argument], threads| {
        let error = Machine::new(1).launch(&code, "fill_f32", Grid::new(1, threads), arguments);
        error.expect_err("it does not fit").to_string()
    };
    let all: Vec<Argument> = vec![0_u64.into(), size(1), 1.0_f32.into(), true.into()];
    assert_eq!(launch(&all[..3], 64), "fill_f32: 3 arguments; the kernel takes 4");
    let wrong: Vec<Argument> = vec![0_u64.into(), 1_u32.into(), 1.0_f32.into(), true.into()];
    assert_eq!(launch(&wrong, 64), "fill_f32: argument 1 has 4 bytes; the kernel takes 8");
    assert_eq!(launch(&all, 2048), "fill_f32: 2048 threads; the kernel is for 1 to 1024");
}
