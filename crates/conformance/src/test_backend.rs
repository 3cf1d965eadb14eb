//! A backend with a compute type, and inputs that are the same on every backend.

use kintsugi_tensor::ops::Gradient;
use kintsugi_tensor::{Backend, Buffer, Category, DType};

/// The compute types of training.
pub const COMPUTE: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// A backend, with a compute type.
pub struct TestBackend<'a> {
    /// The backend.
    pub device: &'a dyn Backend,
    /// The compute type.
    pub dtype: DType,
}

impl TestBackend<'_> {
    /// Random numbers around zero in the compute type, determined by the seed.
    pub fn input(&self, len: usize, seed: u64) -> Buffer {
        self.numbers(&random(len, seed), self.dtype)
    }

    /// These numbers, rounded to a type.
    pub fn numbers(&self, values: &[f32], dtype: DType) -> Buffer {
        let buffer = self.device.allocate(values.len(), dtype, Category::Activations);
        self.device.upload(values, buffer.view());
        buffer
    }

    /// A buffer in the compute type, filled with a value that no kernel should leave there.
    pub fn output(&self, len: usize) -> Buffer {
        self.blank(len, self.dtype)
    }

    /// The same in f32.
    pub fn sums(&self, len: usize) -> Buffer {
        self.blank(len, DType::F32)
    }

    /// The same in a type.
    pub fn blank(&self, len: usize, dtype: DType) -> Buffer {
        self.numbers(&vec![-7.5; len], dtype)
    }

    /// Token ids.
    pub fn tokens(&self, tokens: &[u32]) -> Buffer {
        let buffer = self.device.allocate(tokens.len(), DType::U32, Category::Activations);
        self.device.upload_tokens(tokens, buffer.view());
        buffer
    }

    /// The numbers of a buffer; bytes count as numbers.
    pub fn values(&self, buffer: &Buffer) -> Vec<f32> {
        if buffer.dtype() != DType::U8 {
            return self.device.read(buffer.view());
        }
        let mut bytes = vec![0; buffer.len()];
        self.device.download(buffer.view(), &mut bytes);
        bytes.into_iter().map(f32::from).collect()
    }
}

/// Random numbers around zero, below two in magnitude.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next() + next()).collect()
}

/// Gradients are f32 or have the compute type.
pub fn gradient_types(dtype: DType) -> Vec<DType> {
    if dtype == DType::F32 { vec![DType::F32] } else { vec![DType::F32, dtype] }
}

/// A gradient that is overwritten or accumulated.
pub fn gradient(buffer: &Buffer, accumulate: bool) -> Gradient<'_> {
    Gradient { view: buffer.view(), accumulate }
}
