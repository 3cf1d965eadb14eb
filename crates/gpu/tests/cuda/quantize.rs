//! Quantisation in blocks.

use std::rc::Rc;

use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::{Bits, BlockFormat, Dequantize, Gradient, Quantize, Requantize};
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

use crate::test_backend::{COMPUTE, TestBackend, any_gpu, gradient, random};

/// Slices, elements of a slice, offset of the first element, and block size: aligned or not, odd, with a shorter
/// last block, groups of threads within and across warps, and several tiles.
const SHAPES: [[usize; 4]; 8] = [
    [1, 8, 0, 32],
    [1, 4096, 0, 2048],
    [6, 1000, 0, 64],
    [6, 1001, 0, 256],
    [2, 37, 3, 32],
    [4, 5000, 0, 4096],
    [2, 9003, 1, 1024],
    [3, 1 << 20, 0, 512],
];

/// The bytes of the codes, those of the sums over all slices quantised again, and the dequantised numbers, overwritten and
/// accumulated, and their sums.
fn there_and_back(backend: &TestBackend, shape: [usize; 4], bits: Bits) -> [Vec<u8>; 5] {
    let [slices, elements, first, block] = shape;
    let (len, format) = (slices * elements, BlockFormat { bits, block });
    let mut numbers = random(first + len, 5);
    // A block of zeros, and one with a number that is not finite.
    numbers[first..first + len.min(block)].fill(0.0);
    numbers[first + len - 1] = f32::INFINITY;
    let x = backend.numbers(&numbers, backend.dtype);
    let [codes, sums] = [slices, 1].map(|slices| blank(backend, slices * format.slice_bytes(elements)));
    let [out, added] = [(); 2].map(|()| backend.output(first + len));
    let sum = backend.output(first + elements);
    let (x, codes, place) = (x.slice(first..first + len), codes.view(), first..first + len);
    backend.device.quantize(Quantize { x, out: codes, slices, format });
    for (out, accumulate) in [(&out, false), (&added, true)] {
        let out = Gradient { view: out.slice(place.clone()), accumulate };
        backend.device.dequantize(Dequantize { codes, out, parts: 1, slices, format });
    }
    let all = gradient(&sum, true);
    let all = Gradient { view: all.view.slice(first..first + elements), ..all };
    backend.device.dequantize(Dequantize { codes, out: all, parts: slices, slices: 1, format });
    let (parts, again) = (slices, sums.view());
    backend.device.requantize(Requantize { codes, out: again, parts, slices: 1, elements, format });
    let bytes = |view: View| {
        let mut bytes = vec![0; view.bytes()];
        backend.device.download(view, &mut bytes);
        bytes
    };
    // All NaNs count as equal.
    let number = |x: f32| if x.is_nan() { f32::NAN } else { x }.to_ne_bytes();
    let numbers = |view: View| backend.device.read(view).into_iter().flat_map(number).collect();
    [bytes(codes), bytes(again), numbers(out.view()), numbers(added.view()), numbers(sum.view())]
}

fn blank(backend: &TestBackend, len: usize) -> Buffer {
    let buffer = backend.device.allocate(len, DType::U8, Category::Communication);
    backend.device.upload_bytes(&vec![0xa5; len], buffer.view());
    buffer
}

#[test]
fn blocks_have_the_same_bits_as_on_the_cpu() {
    let Some(gpu) = any_gpu() else { return };
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    for dtype in COMPUTE {
        for bits in [Bits::Four, Bits::Eight] {
            for shape in SHAPES {
                let [expected, found] = [&cpu as &dyn Backend, &gpu]
                    .map(|backend| there_and_back(&TestBackend { device: backend, dtype }, shape, bits));
                assert!(expected == found, "{shape:?} in {dtype:?}, {bits:?}");
            }
        }
    }
}

/// More parts than one, of several slices.
#[test]
fn sums_over_parts_are_quantised_as_on_the_cpu() {
    let Some(gpu) = any_gpu() else { return };
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    for (bits, elements) in [Bits::Four, Bits::Eight].into_iter().flat_map(|b| [(b, 5000), (b, 333)]) {
        let [expected, found] = [&cpu as &dyn Backend, &gpu].map(|device| {
            let (backend, format) =
                (TestBackend { device, dtype: DType::BF16 }, BlockFormat { bits, block: 128 });
            let (parts, slices) = (4, 6);
            let x = backend.input(parts * slices * elements, 9);
            let [codes, out] =
                [parts * slices, slices].map(|slices| blank(&backend, slices * format.slice_bytes(elements)));
            let (x, codes, all) = (x.view(), codes.view(), parts * slices);
            device.quantize(Quantize { x, out: codes, slices: all, format });
            device.requantize(Requantize { codes, out: out.view(), parts, slices, elements, format });
            let mut bytes = vec![0; out.len()];
            device.download(out.view(), &mut bytes);
            bytes
        });
        assert!(expected == found, "{elements} elements, {bits:?}");
    }
}
