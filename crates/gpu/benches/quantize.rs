//! Quantisation beside a copy that reads and writes as many bytes, on one thread of the CPU, with `-- threads=2` on more, or with
//! `-- cuda` on the first GPU.
//!
//! Prints the time of the kernel over that of the copy, and the copy's bytes per second. The two alternate in one run, and the
//! fastest time of each counts, so that other processes disturb little. A ratio of 2 is half the speed of the copy.

use std::rc::Rc;
use std::time::Instant;

use kintsugi_gpu::CUDA;
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::{Bits, BlockFormat, Dequantize, Gradient, Quantize, Requantize};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Buffer, Category, DType, Device};

const ROUNDS: usize = 11;
/// Numbers that share a scale.
const BLOCKS: [usize; 3] = [64, 256, 2048];
/// What eight ranks send in a requantisation, or in a reduction.
const PARTS: usize = 8;

/// The tensors of all operations. Numbers and sums have the same type.
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
        backend.quantize(Quantize { x, out, slices: 1, format: t.format });
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
        backend.requantize(Requantize { codes, out, parts: PARTS, slices: 1, elements, format: t.format });
    }),
];

impl Tensors {
    fn new(backend: &dyn Backend, elements: usize, dtype: DType, format: BlockFormat) -> Self {
        let allocate = |len, dtype| backend.allocate(len, dtype, Category::Activations);
        let part = elements / PARTS;
        Tensors {
            numbers: allocate(elements, dtype),
            sums: allocate(part, dtype),
            codes: allocate(format.slice_bytes(elements), DType::U8),
            parts: allocate(PARTS * format.slice_bytes(part), DType::U8),
            elements,
            format,
        }
    }

    /// Numbers of different magnitudes, which repeat, and their codes.
    fn fill(&self, backend: &dyn Backend) {
        let first: Vec<f32> = (0_u32..1 << 16)
            .map(|i| i.wrapping_mul(0x9e37_79b9) as f32 / (1 << 31) as f32 - 1.0)
            .map(|x| x * x * x)
            .collect();
        let mut filled = first.len();
        backend.upload(&first, self.numbers.slice(0..filled));
        while filled < self.elements {
            backend.copy(self.numbers.slice(0..filled), self.numbers.slice(filled..2 * filled));
            filled *= 2;
        }
        let (part, format) = (self.elements / PARTS, self.format);
        for i in 0..PARTS {
            let (x, bytes) = (self.numbers.slice(0..part), format.slice_bytes(part));
            let out = self.parts.slice(i * bytes..(i + 1) * bytes);
            backend.quantize(Quantize { x, out, slices: 1, format });
        }
    }
}

fn main() {
    let argument = |name: &str| std::env::args().find_map(|a| a.strip_prefix(name).map(str::to_owned));
    let cuda = argument("cuda").is_some();
    let backend: Rc<dyn Backend> = if cuda {
        Rc::new(CUDA.backend(0, 10 << 30, true).expect("a backend on the GPU"))
    } else {
        let threads = argument("threads=").map_or(1, |count| count.parse().expect("a number of threads"));
        Rc::new(CpuBackend::new(Rc::new(Heap::default()), threads))
    };
    // Far more than the caches hold.
    let elements = if cuda { 1 << 29 } else { 1 << 26 };
    println!("time of the kernel over time of the copy, and GB/s of the copy; {elements} elements");
    for (bits, block) in [Bits::Eight, Bits::Four].into_iter().flat_map(|b| BLOCKS.map(|block| (b, block))) {
        println!("int{}, blocks of {block:<20} bf16          fp16          fp32", bits.count());
        let format = BlockFormat { bits, block };
        for (name, kernel) in KERNELS {
            let cell = |dtype| {
                let (ratio, rate) = compare(&*backend, kernel, elements, dtype, format);
                format!("{ratio:.2} {:>6.1}", rate / 1e9)
            };
            println!("  {name:<28} {}", [DType::BF16, DType::F16, DType::F32].map(cell).join("   "));
        }
    }
}

/// The ratio of the kernel's time to the copy's, and the copy's bytes per second.
fn compare(
    backend: &dyn Backend,
    kernel: Kernel,
    elements: usize,
    dtype: DType,
    format: BlockFormat,
) -> (f64, f64) {
    let paper = Paper::new(Device::Cpu { threads: 1 });
    kernel(&paper, &Tensors::new(&paper, elements, dtype, format));
    let bytes = paper.totals().bytes;

    let tensors = Tensors::new(backend, elements, dtype, format);
    tensors.fill(backend);
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
    (ours / copy, bytes as f64 / copy)
}
