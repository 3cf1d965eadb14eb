//! Prints the speed of attention with cuDNN and with our own kernels. Nothing is asserted.

use std::time::Instant;

use kintsugi_conformance::attention::shape;
use kintsugi_conformance::{TestBackend, random};
use kintsugi_gpu::{CUDA, GpuBackend};
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape};
use kintsugi_tensor::{Backend, Buffer, Category, DType};

use kintsugi_testing::{Need, skip};

const MEMORY: u64 = 4 << 30;

/// Batch, sequence, heads, key and value heads, head size.
const SHAPES: [[usize; 5]; 5] = [
    [8, 2048, 16, 16, 128],
    [64, 1024, 12, 12, 64],
    [12, 2048, 24, 24, 88],
    [8, 2048, 32, 8, 128],
    [16, 1024, 25, 25, 64],
];

/// Many numbers in little time: one block, doubled on the GPU.
fn numbers(backend: &TestBackend, len: usize) -> Buffer {
    const BLOCK: usize = 1 << 20;
    let buffer = backend.device.allocate(len, backend.dtype, Category::Activations);
    backend.device.upload(&random(BLOCK, 1), buffer.slice(0..BLOCK));
    let mut filled = BLOCK;
    while filled < len {
        let more = filled.min(len - filled);
        backend.device.copy(buffer.slice(0..more), buffer.slice(filled..filled + more));
        filled += more;
    }
    buffer
}

/// Seconds per call of `body`.
fn seconds(backend: &GpuBackend, body: impl Fn()) -> f64 {
    const TURNS: usize = 20;
    let flag = TestBackend { device: backend, dtype: DType::F32 }.sums(1);
    let run = |turns: usize| {
        let begin = Instant::now();
        (0..turns).for_each(|_| body());
        backend.read_scalar(flag.view(), 0);
        begin.elapsed().as_secs_f64()
    };
    run(3);
    run(TURNS) / TURNS as f64
}

/// Milliseconds of the forward and of the backward; with a document mask if a document length is given.
fn times(gpu: &GpuBackend, shape: AttentionShape, document: Option<usize>) -> [f64; 2] {
    let backend = TestBackend { device: gpu, dtype: DType::BF16 };
    let (width, out_width) = (shape.rows() * shape.qkv_width(), shape.rows() * shape.heads * shape.head_dim);
    let [qkv, dqkv] = [(); 2].map(|()| numbers(&backend, width));
    let [out, dout] = [(); 2].map(|()| numbers(&backend, out_width));
    let sums = backend.sums(shape.rows() * shape.heads);
    let start = |row: usize, length: usize| (row % shape.sequence / length * length) as u32;
    let starts = document.map(|length| (0..shape.rows()).map(|row| start(row, length)).collect::<Vec<_>>());
    let starts = starts.map(|starts| backend.tokens(&starts));
    let starts = starts.as_ref().map(Buffer::view);
    let saved = AttentionSaved::LogSumExp(sums.view());
    let (qkv, out, dout, dqkv) = (qkv.view(), out.view(), dout.view(), dqkv.view());
    let forward = seconds(gpu, || gpu.attention(Attention { qkv, starts, out, saved, shape }));
    let backward = seconds(gpu, || {
        let dbias = None;
        gpu.attention_backward(AttentionBackward { qkv, starts, out, dout, saved, dqkv, dbias, shape });
    });
    [1e3 * forward, 1e3 * backward]
}

#[test]
#[ignore = "prints times, on a GPU that does nothing else"]
fn rates_of_attention() {
    if !CUDA.is_here() {
        skip(Need::Gpu, "the driver shows no device");
        return;
    }
    let backend = || CUDA.backend(0, MEMORY, false).expect("a backend on the GPU");
    let library = backend().without_hopper_attention();
    let (own, portable) = (backend().without_cudnn(), backend().without_cudnn().without_hopper_attention());
    println!("bf16, causal; TFLOP/s of half the scores, five products in the backward");
    for shape in SHAPES.map(shape) {
        let product = shape.score_elements() as f64 * shape.head_dim as f64;
        println!("{shape:?}");
        let kinds = [
            ("cuDNN", &library, None),
            ("ours", &own, None),
            ("ours without Hopper's", &portable, None),
            ("ours, one document", &portable, Some(shape.sequence)),
            ("ours, documents of 500", &portable, Some(500)),
        ];
        for (kind, backend, document) in kinds {
            let [forward, backward] = times(backend, shape, document);
            let rate = |products: f64, milliseconds: f64| products * product / milliseconds / 1e9;
            println!(
                "  {kind:24} forward {forward:7.3} ms {:4.0}  backward {backward:7.3} ms {:4.0}",
                rate(2.0, forward),
                rate(5.0, backward),
            );
        }
    }
}
