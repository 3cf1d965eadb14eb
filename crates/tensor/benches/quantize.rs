//! Quantisation beside a copy that reads and writes as many bytes, on the CPU, or with `-- cuda` on the first GPU.
//!
//! The two alternate in one run, and the fastest time of each counts, so that other processes disturb little. A ratio of 2 is
//! half the speed of the copy.

use std::rc::Rc;
use std::time::Instant;

use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::cuda::CudaBackend;
use kintsugi_tensor::ops::{Bits, BlockFormat, Dequantize, Gradient, Quantize, Requantize};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Buffer, Category, DType, Device};

const ROUNDS: usize = 15;
/// What eight ranks send in a requantisation, or in a reduction.
const PARTS: usize = 8;

/// The tensors of all operations.
struct Tensors {
    numbers: Buffer,
    sums: Buffer,
    codes: Buffer,
    parts: Buffer,
    elements: usize,
    format: BlockFormat,
}

type Kernel = fn(&dyn Backend, &Tensors);

const KERNELS: [(&str, Kernel); 4] = [
    ("quantize", |backend, t| {
        let (x, out) = (t.numbers.view(), t.codes.view());
        backend.quantize(Quantize { x, out, slices: 1, columns: 1, format: t.format });
    }),
    ("dequantize", |backend, t| {
        let (codes, out) = (t.codes.view(), Gradient { view: t.numbers.view(), accumulate: false });
        backend.dequantize(Dequantize { codes, out, parts: 1, slices: 1, format: t.format });
    }),
    ("dequantize and reduce 8", |backend, t| {
        let (codes, out) = (t.parts.view(), Gradient { view: t.sums.view(), accumulate: false });
        backend.dequantize(Dequantize { codes, out, parts: PARTS, slices: 1, format: t.format });
    }),
    ("requantize 8", |backend, t| {
        let (codes, out, elements) = (t.parts.view(), t.codes.view(), t.elements / PARTS);
        let out = out.slice(0..t.format.slice_bytes(elements));
        let (slices, columns, format) = (1, 1, t.format);
        backend.requantize(Requantize { codes, out, parts: PARTS, slices, columns, elements, format });
    }),
];

impl Tensors {
    fn new(backend: &dyn Backend, elements: usize, dtype: DType, format: BlockFormat) -> Self {
        let allocate = |len, dtype| backend.allocate(len, dtype, Category::Activations);
        let part = elements / PARTS;
        let tensors = Tensors {
            numbers: allocate(elements, dtype),
            sums: allocate(part, DType::F32),
            codes: allocate(format.slice_bytes(elements), DType::U8),
            parts: allocate(PARTS * format.slice_bytes(part), DType::U8),
            elements,
            format,
        };
        backend.fill(0.7, tensors.numbers.view());
        for i in 0..PARTS {
            let (x, bytes) = (tensors.numbers.slice(0..part), format.slice_bytes(part));
            let out = tensors.parts.slice(i * bytes..(i + 1) * bytes);
            backend.quantize(Quantize { x, out, slices: 1, columns: 1, format });
        }
        tensors
    }
}

fn main() {
    let cuda = std::env::args().any(|argument| argument == "cuda");
    let backend: Rc<dyn Backend> = if cuda {
        Rc::new(CudaBackend::new(0, 8 << 30, true).expect("a backend on the GPU"))
    } else {
        Rc::new(CpuBackend::new(Rc::new(Heap::default()), 1))
    };
    // Far more than the caches hold.
    let elements = if cuda { 1 << 29 } else { 1 << 24 };
    println!(
        "{elements} elements; time of the kernel over time of the copy, and bytes read and written per second"
    );
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (bits, block) in
            [Bits::Eight, Bits::Four].into_iter().flat_map(|b| [(b, 64), (b, 256), (b, 2048)])
        {
            let format = BlockFormat { bits, block };
            for (name, kernel) in KERNELS {
                let (ratio, rate) = compare(&*backend, kernel, elements, dtype, format);
                println!(
                    "{dtype:?} int{} block {block:<5} {name:<24} {ratio:.2}  {:.1} GB/s",
                    bits.count(),
                    rate / 1e9
                );
            }
        }
    }
}

/// The ratio of the kernel's time to the copy's, and the kernel's bytes per second.
fn compare(
    backend: &dyn Backend,
    kernel: Kernel,
    elements: usize,
    dtype: DType,
    format: BlockFormat,
) -> (f64, f64) {
    let paper = Paper::new(Device::Cpu { threads: 1 });
    let on_paper = Tensors::new(&paper, elements, dtype, format);
    let before = paper.totals().bytes;
    kernel(&paper, &on_paper);
    let bytes = paper.totals().bytes - before;

    let tensors = Tensors::new(backend, elements, dtype, format);
    let half = bytes as usize / 2 / DType::F32.bytes();
    let [from, to] = [(); 2].map(|()| backend.allocate(half, DType::F32, Category::Activations));
    for buffer in [&from, &to] {
        backend.fill(1.0, buffer.view());
    }
    let seconds = |body: &dyn Fn()| {
        backend.synchronize();
        let begin = Instant::now();
        body();
        backend.synchronize();
        begin.elapsed().as_secs_f64()
    };
    let (mut ours, mut copy) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        ours = ours.min(seconds(&|| kernel(backend, &tensors)));
        copy = copy.min(seconds(&|| backend.copy(from.view(), to.view())));
    }
    (ours / copy, bytes as f64 / ours)
}
