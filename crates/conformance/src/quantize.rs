//! Quantisation in blocks. Codes and numbers have the same bits on every device.

use kintsugi_tensor::ops::{Bits, BlockFormat, Dequantize, Gradient, Quantize, Requantize};
use kintsugi_tensor::{Buffer, Category, DType};

use crate::test_backend::{TestBackend, gradient, random};

/// The codes, those of the sums over all slices quantised again, and the dequantised numbers, overwritten and accumulated, and
/// their sums. Shapes are slices, elements of a slice, the offset of the first element, and the block size.
pub fn there_and_back(backend: &TestBackend, shape: [usize; 4], bits: Bits) -> Vec<Buffer> {
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
    let place = first..first + len;
    let x = x.slice(place.clone());
    backend.device.quantize(Quantize { x, out: codes.view(), slices, format });
    for (out, accumulate) in [(&out, false), (&added, true)] {
        let out = Gradient { view: out.slice(place.clone()), accumulate };
        backend.device.dequantize(Dequantize { codes: codes.view(), out, parts: 1, slices, format });
    }
    let all = gradient(&sum, true);
    let all = Gradient { view: all.view.slice(first..first + elements), ..all };
    backend.device.dequantize(Dequantize { codes: codes.view(), out: all, parts: slices, slices: 1, format });
    requantize(backend, &codes, &sums, [slices, 1, elements], format);
    vec![codes, sums, out, added, sum]
}

/// Codes of random numbers, and those of their sums over all parts.
pub fn sums_over_parts(
    backend: &TestBackend,
    [parts, slices, elements]: [usize; 3],
    format: BlockFormat,
) -> Vec<Buffer> {
    let x = backend.input(parts * slices * elements, 9);
    let [codes, out] =
        [parts * slices, slices].map(|slices| blank(backend, slices * format.slice_bytes(elements)));
    let all = parts * slices;
    backend.device.quantize(Quantize { x: x.view(), out: codes.view(), slices: all, format });
    requantize(backend, &codes, &out, [parts, slices, elements], format);
    vec![codes, out]
}

fn requantize(
    backend: &TestBackend,
    codes: &Buffer,
    out: &Buffer,
    [parts, slices, elements]: [usize; 3],
    format: BlockFormat,
) {
    let (codes, out) = (codes.view(), out.view());
    backend.device.requantize(Requantize { codes, out, parts, slices, elements, format });
}

fn blank(backend: &TestBackend, len: usize) -> Buffer {
    let buffer = backend.device.allocate(len, DType::U8, Category::Communication);
    backend.device.upload_bytes(&vec![0xa5; len], buffer.view());
    buffer
}
