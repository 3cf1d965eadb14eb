//! Quantisation in blocks.

use std::rc::Rc;

use kintsugi_conformance::quantize::{sums_over_parts, there_and_back};
use kintsugi_conformance::{COMPUTE, TestBackend};
use kintsugi_gpu::GpuBackend;
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::{Bits, BlockFormat};
use kintsugi_tensor::{Backend, Buffer, DType};

use crate::test_backend::any_gpu;

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

/// Expects the same bits on both backends. All NaNs count as equal.
fn same_bits(gpu: &GpuBackend, dtype: DType, what: &str, body: impl Fn(&TestBackend) -> Vec<Buffer>) {
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let [expected, found] = [&cpu as &dyn Backend, gpu].map(|device| -> Vec<Vec<u32>> {
        let backend = TestBackend { device, dtype };
        let bits = |x: &f32| if x.is_nan() { f32::NAN } else { *x }.to_bits();
        body(&backend).iter().map(|buffer| backend.values(buffer).iter().map(bits).collect()).collect()
    });
    assert!(expected == found, "{what} in {dtype:?}");
}

#[test]
fn blocks_have_the_same_bits_as_on_the_cpu() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for bits in [Bits::Four, Bits::Eight] {
            for shape in SHAPES {
                let what = format!("{shape:?}, {bits:?}");
                same_bits(&gpu, dtype, &what, |backend| there_and_back(backend, shape, bits));
            }
        }
    }
}

/// More parts than one, of several slices.
#[test]
fn sums_over_parts_are_quantised_as_on_the_cpu() {
    let Some(gpu) = any_gpu() else { return };
    for (bits, elements) in [Bits::Four, Bits::Eight].into_iter().flat_map(|b| [(b, 5000), (b, 333)]) {
        let (what, format) = (format!("{elements} elements, {bits:?}"), BlockFormat { bits, block: 128 });
        same_bits(&gpu, DType::BF16, &what, |backend| sums_over_parts(backend, [4, 6, elements], format));
    }
}
