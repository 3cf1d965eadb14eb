//! The same inputs on both backends, and how far their results may be apart.

use std::rc::Rc;

use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::cuda::{CudaBackend, libraries};
use kintsugi_tensor::ops::Gradient;
use kintsugi_tensor::{Backend, Buffer, Category, DType};
use kintsugi_testing::{Need, skip};

/// The types that training computes in.
pub const COMPUTE: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

const MEMORY: u64 = 512 << 20;

/// A backend on the first card, or the reason why there is none, said aloud.
pub fn card() -> Option<CudaBackend> {
    backend(true)
}

/// One that looks for the fastest products, every time anew, so that bits may change from call to call.
pub fn tuning_card() -> Option<CudaBackend> {
    backend(false).map(CudaBackend::without_kept_products)
}

fn backend(deterministic: bool) -> Option<CudaBackend> {
    match libraries::devices() {
        Ok(0) => skip(Need::Gpu, "the driver shows no device"),
        Err(error) => skip(Need::Gpu, error),
        Ok(_) => return Some(CudaBackend::new(0, MEMORY, deterministic).expect("a backend on the card")),
    }
    None
}

/// One of the two backends, computing in `dtype`.
pub struct Lab<'a> {
    pub backend: &'a dyn Backend,
    pub dtype: DType,
}

impl Lab<'_> {
    /// Numbers around zero in the compute type, the same for the same seed.
    pub fn input(&self, len: usize, seed: u64) -> Buffer {
        self.numbers(&random(len, seed), self.dtype)
    }

    pub fn numbers(&self, values: &[f32], dtype: DType) -> Buffer {
        let buffer = self.backend.allocate(values.len(), dtype, Category::Activations);
        self.backend.upload(values, buffer.view());
        buffer
    }

    /// A buffer in the compute type that holds numbers no kernel should leave there.
    pub fn output(&self, len: usize) -> Buffer {
        self.blank(len, self.dtype)
    }

    /// The same in f32.
    pub fn sums(&self, len: usize) -> Buffer {
        self.blank(len, DType::F32)
    }

    pub fn blank(&self, len: usize, dtype: DType) -> Buffer {
        self.numbers(&vec![-7.5; len], dtype)
    }

    pub fn tokens(&self, tokens: &[u32]) -> Buffer {
        let buffer = self.backend.allocate(tokens.len(), DType::U32, Category::Activations);
        self.backend.upload_tokens(tokens, buffer.view());
        buffer
    }
}

/// Runs `body` on both backends in `dtype` and expects the buffers that it returns to agree; on the card it runs
/// twice, and the bits must be the same.
pub fn agree(card: &CudaBackend, dtype: DType, what: &str, body: impl Fn(&Lab) -> Vec<Buffer>) {
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let run = |backend: &dyn Backend| -> Vec<Vec<f32>> {
        body(&Lab { backend, dtype }).iter().map(|buffer| backend.read(buffer.view())).collect()
    };
    let (expected, ours, again) = (run(&cpu), run(card), run(card));
    assert_eq!(expected.len(), ours.len());
    for (i, ((expected, ours), again)) in expected.iter().zip(&ours).zip(&again).enumerate() {
        let error = distance(ours, expected);
        assert!(error <= tolerance(dtype), "{what} in {dtype:?}, result {i}: relative error {error}");
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(ours) == bits(again), "{what} in {dtype:?}, result {i}: other bits the second time");
    }
}

/// Runs `body` on the CPU, and `times` on the card, and expects the buffers that it returns to agree every time.
pub fn close(card: &CudaBackend, dtype: DType, what: &str, times: usize, body: impl Fn(&Lab) -> Vec<Buffer>) {
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let run = |backend: &dyn Backend| -> Vec<Vec<f32>> {
        body(&Lab { backend, dtype }).iter().map(|buffer| backend.read(buffer.view())).collect()
    };
    let expected = run(&cpu);
    for time in 0..times {
        for (i, (expected, ours)) in expected.iter().zip(&run(card)).enumerate() {
            let error = distance(ours, expected);
            assert!(error <= tolerance(dtype), "{what} in {dtype:?}, time {time}, result {i}: error {error}");
        }
    }
}

pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-5,
    }
}

/// `‖a − b‖ / ‖b‖`. Numbers that are not finite must be the same on both sides, and count as none.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
        if !(a.is_finite() && b.is_finite()) {
            assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "element {i}: {a} against {b}");
            continue;
        }
        difference += f64::from(a - b).powi(2);
        norm += f64::from(b).powi(2);
    }
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

/// Numbers around zero, below two.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next() + next()).collect()
}

/// Gradients are kept in f32 or in the compute type.
pub fn gradient_types(dtype: DType) -> Vec<DType> {
    if dtype == DType::F32 { vec![DType::F32] } else { vec![DType::F32, dtype] }
}

/// A gradient that is overwritten or added to.
pub fn gradient(buffer: &Buffer, accumulate: bool) -> Gradient<'_> {
    Gradient { view: buffer.view(), accumulate }
}
