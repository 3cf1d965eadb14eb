//! Device memory: copies return what was written, and the paper backend predicts how much is allocated.

use kintsugi_conformance::{COMPUTE, TestBackend, random};
use kintsugi_gpu::CUDA;
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape, Scores};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Category, DType, Device};

use crate::test_backend::{any_gpu, gpu};

#[test]
fn numbers_are_read_as_they_were_written() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        let backend = TestBackend { device: &gpu, dtype };
        let coarse: Vec<f32> = random(1001, 1).iter().map(|x| (x * 32.0).round() / 32.0).collect();
        let buffer = backend.numbers(&coarse, dtype);
        assert_eq!(gpu.read(buffer.view()), coarse);
        assert_eq!(gpu.read(buffer.slice(3..5)), coarse[3..5]);
        assert_eq!(gpu.read_scalar(buffer.view(), 1000).to_bits(), f64::from(coarse[1000]).to_bits());
    }
}

#[test]
fn copies_longer_than_their_staging_are_whole() {
    let Some(gpu) = any_gpu() else { return };
    let backend = TestBackend { device: &gpu, dtype: DType::F32 };
    // 22 MB go through slots of 8 MiB, with small copies in both directions before, between and after.
    let numbers: Vec<f32> = (0..5_500_003).map(|i| i as f32).collect();
    let tokens: Vec<u32> = (0..70_001).collect();
    for _ in 0..3 {
        let (small, large) = (backend.tokens(&tokens), backend.numbers(&numbers, DType::F32));
        assert_eq!(gpu.read_scalar(large.view(), 5_500_002).to_bits(), 5_500_002_f64.to_bits());
        let again = backend.tokens(&tokens);
        assert!(gpu.read(large.view()) == numbers, "a long copy came back changed");
        for buffer in [small, again] {
            let mut bytes = vec![0; buffer.view().bytes()];
            gpu.download(buffer.view(), &mut bytes);
            let ids: Vec<u32> = bytes.as_chunks().0.iter().map(|&id| u32::from_ne_bytes(id)).collect();
            assert!(ids == tokens, "token ids came back changed");
        }
    }
}

#[test]
fn a_fetch_returns_the_values_at_the_time_of_the_call() {
    let Some(gpu) = any_gpu() else { return };
    let backend = TestBackend { device: &gpu, dtype: DType::F32 };
    let buffer = backend.numbers(&[0.0; 1000], DType::F32);
    let values = [1.5, 2.5, 3.5, 4.5];
    let fetches = values.map(|value| {
        gpu.fill(value, buffer.view());
        // A fetch that is dropped without waiting releases its page to the next.
        drop(gpu.fetch(buffer.slice(0..3)));
        gpu.fetch(buffer.slice(1..1000))
    });
    gpu.fill(-1.0, buffer.view());
    for (fetch, value) in fetches.into_iter().zip(values) {
        assert_eq!(fetch.wait(), vec![value; 999]);
    }
}

/// Attention forward and backward. Returns the address that the next buffer gets.
fn run_attention(backend: &dyn Backend) -> u64 {
    let shape = AttentionShape {
        batch: 2,
        sequence: 128,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        scores: Scores::PLAIN,
    };
    let [qkv, dqkv] = [(); 2]
        .map(|()| backend.allocate(shape.rows() * shape.qkv_width(), DType::BF16, Category::Activations));
    let out = backend.allocate(shape.rows() * 256, DType::BF16, Category::Activations);
    let sums = backend.allocate(shape.rows() * 4, DType::F32, Category::Activations);
    backend.fill(0.5, qkv.view());
    let (qkv, out, dqkv) = (qkv.view(), out.view(), dqkv.view());
    let saved = AttentionSaved::LogSumExp(sums.view());
    let documents = backend.allocate(shape.rows(), DType::U32, Category::Activations);
    backend.upload_tokens(&vec![0; shape.rows()], documents.view());
    for starts in [None, Some(documents.view())] {
        backend.attention(Attention { qkv, starts, out, saved, shape });
        backend.attention_backward(AttentionBackward {
            qkv,
            starts,
            out,
            dout: out,
            saved,
            dqkv,
            dbias: None,
            shape,
        });
    }
    backend.allocate(40, DType::F16, Category::Weights).address()
}

#[test]
fn paper_predicts_the_memory_of_the_gpu() {
    let Some(_) = gpu() else { return };
    for deterministic in [false, true] {
        let device = Device::cuda(deterministic);
        let paper = Paper::new(device);
        let foreseen = run_attention(&paper);
        let gpu = CUDA.backend(0, paper.memory().reserved(), deterministic).expect("a backend");
        let base = gpu.allocate(1, DType::F32, Category::Weights).address() - device.workspace_bytes();
        assert_eq!(run_attention(&gpu) - base, foreseen);
        assert_eq!(gpu.memory().peak(), paper.memory().peak());
    }
}
