//! Memory of the card: what comes back is what was put there, and paper knows how much is taken.

use kintsugi_tensor::cuda::CudaBackend;
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Category, DType, Device};

use crate::lab::{COMPUTE, Lab, card, random};

#[test]
fn numbers_come_back_as_they_were_put() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        let lab = Lab { backend: &card, dtype };
        let coarse: Vec<f32> = random(1001, 1).iter().map(|x| (x * 32.0).round() / 32.0).collect();
        let buffer = lab.numbers(&coarse, dtype);
        assert_eq!(card.read(buffer.view()), coarse);
        assert_eq!(card.read(buffer.slice(3..5)), coarse[3..5]);
        assert_eq!(card.read_scalar(buffer.view(), 1000).to_bits(), f64::from(coarse[1000]).to_bits());
    }
}

/// Attention forward and backward, and where the next buffer would lie.
fn play(backend: &dyn Backend) -> u64 {
    let shape = AttentionShape { batch: 2, sequence: 128, heads: 4, kv_heads: 2, head_dim: 64 };
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
        backend.attention_backward(AttentionBackward { qkv, starts, out, dout: out, saved, dqkv, shape });
    }
    backend.allocate(40, DType::F16, Category::Weights).address()
}

#[test]
fn paper_foresees_the_memory_of_the_card() {
    let Some(_) = card() else { return };
    for deterministic in [false, true] {
        let device = Device::Cuda { deterministic };
        let paper = Paper::new(device);
        let foreseen = play(&paper);
        let card = CudaBackend::new(0, paper.memory().reserved(), deterministic).expect("a backend");
        let base = card.allocate(1, DType::F32, Category::Weights).address() - device.workspace_bytes();
        assert_eq!(play(&card) - base, foreseen);
        assert_eq!(card.memory().peak(), paper.memory().peak());
    }
}
