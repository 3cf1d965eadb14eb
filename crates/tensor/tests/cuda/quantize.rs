//! Blockwise quantisation.

use std::rc::Rc;

use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::{Bits, Quantize, Restore};
use kintsugi_tensor::{Backend, View};

use crate::test_backend::{COMPUTE, TestBackend, gpu, random};

/// Number of elements, offset of the first, and block size: aligned or not, with a shorter last block, and more than
/// the threads process at once.
const SHAPES: [(usize, usize, usize); 5] =
    [(8, 0, 8), (4096, 0, 2048), (1000, 0, 64), (1000, 3, 4096), (3 << 20, 0, 4096)];

/// Bits of the codes, the scales, and the restored numbers, overwritten and accumulated.
fn there_and_back(
    backend: &TestBackend,
    (len, first, block): (usize, usize, usize),
    bits: Bits,
) -> [Vec<u32>; 4] {
    let mut numbers = random(first + len, 5);
    // A block of zeros, and one with a number that is not finite.
    numbers[first..first + 8].fill(0.0);
    if len > block {
        numbers[first + block] = f32::INFINITY;
    }
    let x = backend.numbers(&numbers, backend.dtype);
    let codes = backend.tokens(&vec![u32::MAX; len / bits.per_word()]);
    let scales = backend.sums(len.div_ceil(block));
    let [out, sum] = [(); 2].map(|()| backend.output(first + len));
    let (x, codes, scales) = (x.slice(first..first + len), codes.view(), scales.view());
    backend.device.quantize(Quantize { x, codes, scales, block, bits });
    for (out, accumulate) in [(&out, false), (&sum, true)] {
        let out = out.slice(first..first + len);
        backend.device.restore(Restore { codes, scales, out, accumulate, block, bits });
    }
    let mut words = vec![0; codes.bytes()];
    backend.device.download(codes, &mut words);
    let words = words.as_chunks().0.iter().map(|&word| u32::from_ne_bytes(word)).collect();
    // All NaNs count as equal.
    let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    let bits = |view: View| backend.device.read(view).into_iter().map(bits).collect();
    [words, bits(scales), bits(out.view()), bits(sum.view())]
}

#[test]
fn blocks_have_the_same_bits_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
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
