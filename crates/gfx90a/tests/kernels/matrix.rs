//! Matrix instructions: kernels of our own with every shape, and products that Triton compiled, whose tables of lanes and
//! registers are not ours.

use std::path::Path;

use kintsugi_gfx90a::{Argument, CodeObject, Grid, Machine};

use crate::support::{NULL, WAVE, compiler, distance, random};

const SOURCE: &str = include_str!("matrix.hip");

/// An instruction's element, side, inner dim and number of blocks.
#[derive(Clone, Copy, Debug)]
struct Shape {
    element: &'static str,
    side: usize,
    inner: usize,
    blocks: usize,
}

const fn shape(element: &'static str, side: usize, inner: usize, blocks: usize) -> Shape {
    Shape { element, side, inner, blocks }
}

const SHAPES: [Shape; 15] = [
    shape("f32", 32, 2, 1),
    shape("f32", 32, 1, 2),
    shape("f32", 16, 4, 1),
    shape("f32", 16, 1, 4),
    shape("f32", 4, 1, 16),
    shape("f16", 32, 8, 1),
    shape("f16", 32, 4, 2),
    shape("f16", 16, 16, 1),
    shape("f16", 16, 4, 4),
    shape("f16", 4, 4, 16),
    shape("bf16", 32, 8, 1),
    shape("bf16", 32, 4, 2),
    shape("bf16", 16, 16, 1),
    shape("bf16", 16, 4, 4),
    shape("bf16", 4, 4, 16),
];

/// Numbers in a format, as they are after rounding and as bytes.
fn rounded(values: &[f32], element: &str) -> (Vec<f32>, Vec<u8>) {
    match element {
        "f32" => (values.to_vec(), values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        "f16" => {
            let halves: Vec<half::f16> = values.iter().map(|&x| half::f16::from_f32(x)).collect();
            (
                halves.iter().map(|x| x.to_f32()).collect(),
                halves.iter().flat_map(|x| x.to_le_bytes()).collect(),
            )
        }
        _ => {
            let halves: Vec<half::bf16> = values.iter().map(|&x| half::bf16::from_f32(x)).collect();
            (
                halves.iter().map(|x| x.to_f32()).collect(),
                halves.iter().flat_map(|x| x.to_le_bytes()).collect(),
            )
        }
    }
}

/// `factor · A·B` in fp64, for matrices in row-major order.
fn product(a: &[f32], b: &[f32], side: usize, inner: usize, factor: f64) -> Vec<f32> {
    let at = |i: usize| {
        let (row, column) = (i / side, i % side);
        let terms = (0..inner).map(|k| f64::from(a[row * inner + k]) * f64::from(b[k * side + column]));
        (factor * terms.sum::<f64>()) as f32
    };
    (0..side * side).map(at).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

/// The relative error of an instruction that adds a product twice.
fn error_of(code: &CodeObject, Shape { element, side, inner, blocks }: Shape) -> f64 {
    let len = blocks * side * inner;
    let [(a, a_bytes), (b, b_bytes)] = [1, 2].map(|seed| rounded(&random(len, seed), element));
    let mut machine = Machine::new(1);
    let [a_address, b_address] = [a_bytes, b_bytes].map(|bytes| machine.constant("a matrix", bytes));
    let d = machine.buffer("the product", vec![0xff; 4 * blocks * side * side]);
    let name = format!("{element}_{side}x{side}x{inner}");
    let arguments: Vec<Argument> = vec![a_address.into(), b_address.into(), d.into()];
    machine.launch(code, &name, Grid::new(1, WAVE), &arguments).expect("the kernel runs");
    let ours = floats(&machine.read(d, 4 * blocks * side * side));
    let of_block = |block: usize| {
        let part = block * side * inner..(block + 1) * side * inner;
        product(&a[part.clone()], &b[part], side, inner, 2.0)
    };
    distance(&ours, &(0..blocks).flat_map(of_block).collect::<Vec<_>>())
}

#[test]
fn every_shape_multiplies() {
    let Some(compiler) = compiler() else { return };
    let code = compiler.compile("matrix", SOURCE).expect("the file compiles");
    for shape in SHAPES {
        let error = error_of(&code, shape);
        assert!(error < 1e-6, "{shape:?}: relative error {error}");
    }
}

/// Rows that a lane holds one after the other, instead of four of every eight.
#[test]
fn a_wrong_mapping_of_lanes_is_noticed() {
    let Some(compiler) = compiler() else { return };
    let wrong = "#define MAP_ROW(side, lane, r) (side == 4 ? r : lane / side * (side * side / 64) + r)\n";
    let code = compiler.compile("matrix", &format!("{wrong}{SOURCE}")).expect("the file compiles");
    for shape in SHAPES.into_iter().filter(|shape| shape.side == 32) {
        let error = error_of(&code, shape);
        assert!(error > 0.1, "{shape:?}: relative error {error}");
    }
    // With 16 rows the two mappings are the same.
    for shape in SHAPES.into_iter().filter(|shape| shape.side == 16) {
        assert!(error_of(&code, shape) < 1e-6, "{shape:?}");
    }
}

/// Subnormal numbers in bf16 count as zero.
#[test]
fn subnormal_operands_are_flushed() {
    let Some(compiler) = compiler() else { return };
    let code = compiler.compile("matrix", SOURCE).expect("the file compiles");
    let mut machine = Machine::new(1);
    let subnormal = half::bf16::from_bits(0x0001);
    assert!(subnormal.to_f32() > 0.0);
    let bytes = |value: half::bf16| value.to_le_bytes().repeat(32 * 8);
    let a = machine.constant("a", bytes(subnormal));
    let b = machine.constant("b", bytes(half::bf16::from_f32(1e30)));
    let d = machine.buffer("the product", vec![0xff; 4 * 32 * 32]);
    machine
        .launch(&code, "bf16_32x32x8", Grid::new(1, WAVE), &[a.into(), b.into(), d.into()])
        .expect("the kernel runs");
    assert!(floats(&machine.read(d, 4 * 32 * 32)).iter().all(|&x| x == 0.0));
}

/// Made by `scripts/make-matrix-fixtures`. Each multiplies by two instructions of half the inner dim.
#[test]
fn products_that_triton_compiled() {
    if compiler().is_none() {
        return;
    }
    for (side, inner) in [(32, 16), (16, 32)] {
        let file = format!("tests/fixtures/triton_dot_{side}x{side}x{inner}_bf16.co");
        let code = CodeObject::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect("the fixture");
        let [(a, a_bytes), (b, b_bytes)] = [3, 4].map(|seed| rounded(&random(side * inner, seed), "bf16"));
        let mut machine = Machine::new(2);
        let [a_address, b_address] = [a_bytes, b_bytes].map(|bytes| machine.constant("a matrix", bytes));
        let d = machine.buffer("the product", vec![0xff; 4 * side * side]);
        // The last two are scratch memory of Triton's, which this kernel does not use.
        let arguments: Vec<Argument> =
            vec![a_address.into(), b_address.into(), d.into(), NULL.into(), NULL.into()];
        let grid = Grid::new(1, WAVE).shared(TRITON_SHARED);
        machine.launch(&code, "product", grid, &arguments).expect("the kernel runs");
        let error = distance(&floats(&machine.read(d, 4 * side * side)), &product(&a, &b, side, inner, 1.0));
        assert!(error < 1e-6, "{side}×{side}×{inner}: relative error {error}");
    }
}

/// Bytes of LDS by which Triton's kernels exchange numbers between lanes.
const TRITON_SHARED: usize = 1024;
