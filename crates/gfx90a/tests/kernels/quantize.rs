//! Quantisation in blocks: the same bytes as on the CPU.

use kintsugi_gfx90a::{Argument, Grid};
use kintsugi_tensor::ops::{Bits, BlockFormat, Dequantize, Gradient, Quantize, Requantize};
use kintsugi_tensor::{Backend, Category, DType};

use crate::support::{Both, COMPUTE, Draw, PACK, Pair, kernels, pointer, random_cases, size, suffix};

/// Threads of a block, and numbers that each holds.
const THREADS: usize = 256;
const VALUES: usize = 16;
const SUMMED_VALUES: usize = 32;

fn codes(pair: &mut Pair, bytes: usize) -> Both {
    let buffer = pair.cpu.allocate(bytes, DType::U8, Category::Activations);
    pair.cpu.upload_bytes(&vec![0x5a; bytes], buffer.view());
    pair.same("codes", buffer)
}

fn same_bytes(pair: &Pair, both: &Both, what: &str) {
    let mut expected = vec![0; both.cpu.len()];
    pair.cpu.download(both.cpu.view(), &mut expected);
    assert!(pair.machine.read(both.address, expected.len()) == expected, "{what}");
}

/// The shape of a slice as the kernels take it.
fn shape(elements: usize, format: BlockFormat) -> [Argument; 4] {
    let (code_bytes, bytes) = (format.code_bytes(elements), format.slice_bytes(elements));
    [size(elements), size(code_bytes), size(bytes), format.block.ilog2().into()]
}

#[test]
fn codes_are_those_of_the_cpu() {
    let Some(code) = kernels("quantize") else { return };
    let mut pair = Pair::new(code, 1);
    let mut draw = Draw::new(10);
    for dtype in COMPUTE {
        let drawn = (0..random_cases()).map(|i| {
            let bits = if i % 2 == 0 { Bits::Four } else { Bits::Eight };
            (bits, 128 << draw.size(0..=3), draw.size(1..=9000))
        });
        let named = [(Bits::Four, 128, 5000), (Bits::Eight, 2048, 4104)].into_iter();
        for (bits, block, elements) in named.chain(drawn) {
            let (parts, slices, format) = (3, 2, BlockFormat { bits, block });
            let what = format!("{elements} of {dtype:?} in blocks of {block}, {bits:?}");
            let wide = elements.is_multiple_of(PACK);
            let all = parts * slices;
            let x = pair.random("x", all * elements, dtype, 1);
            let quantised = codes(&mut pair, all * format.slice_bytes(elements));
            let sums = pair.random("sums", slices * elements, dtype, 2);
            pair.cpu.quantize(Quantize { x: x.cpu.view(), out: quantised.cpu.view(), slices: all, format });
            let out = Gradient { view: sums.cpu.view(), accumulate: true };
            pair.cpu.dequantize(Dequantize { codes: quantised.cpu.view(), out, parts, slices, format });

            let tiles = elements.div_ceil(THREADS * VALUES);
            let arguments =
                [&[pointer(&x), pointer(&quantised)][..], &shape(elements, format), &[wide.into()]].concat();
            let name = format!("quantize_{}_{}", suffix(dtype), bits.count());
            pair.launch(&name, Grid::new(1, THREADS).blocks(tiles, all, 1), &arguments);
            same_bytes(&pair, &quantised, &what);
            let views = [pointer(&quantised), pointer(&sums), (parts as u32).into(), size(slices)];
            let arguments = [&views[..], &shape(elements, format), &[true.into(), wide.into()]].concat();
            let name = format!("dequantize_{}_{}", suffix(dtype), bits.count());
            pair.launch(&name, Grid::new(1, THREADS).blocks(tiles, slices, 1), &arguments);
            pair.agree_within(&sums, &what, 0.0);
        }
    }
}

#[test]
fn sums_of_codes_become_codes() {
    let Some(code) = kernels("quantize") else { return };
    let mut pair = Pair::new(code, 2);
    for (bits, elements) in [(Bits::Four, 5000), (Bits::Eight, 333)] {
        let (parts, slices, format) = (4, 2, BlockFormat { bits, block: 128 });
        let bytes = format.slice_bytes(elements);
        let x = pair.random("x", parts * slices * elements, DType::BF16, 9);
        let quantised = codes(&mut pair, parts * slices * bytes);
        let out = codes(&mut pair, slices * bytes);
        let from = quantised.cpu.view();
        pair.cpu.quantize(Quantize { x: x.cpu.view(), out: from, slices: parts * slices, format });
        let mut made = vec![0; from.len()];
        pair.cpu.download(from, &mut made);
        pair.machine.write(quantised.address, &made);
        pair.cpu.requantize(Requantize { codes: from, out: out.cpu.view(), parts, slices, elements, format });
        let views = [pointer(&quantised), pointer(&out), (parts as u32).into(), size(slices)];
        let arguments = [&views[..], &shape(elements, format)].concat();
        let tiles = elements.div_ceil(THREADS * SUMMED_VALUES);
        let grid = Grid::new(1, THREADS).blocks(tiles, slices, 1);
        pair.launch(&format!("requantize_{}", bits.count()), grid, &arguments);
        same_bytes(&pair, &out, &format!("{elements} elements, {bits:?}"));
    }
}
