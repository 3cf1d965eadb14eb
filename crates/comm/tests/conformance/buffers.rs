//! Numbers in and out of buffers of any type.

use std::rc::Rc;

use half::{bf16, f16};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::{Backend, Buffer, Category, DType};

/// A rank's device in tests.
pub fn backend() -> Rc<dyn Backend> {
    Rc::new(CpuBackend::new(Rc::new(Heap::default()), 1))
}

/// A buffer with these small integers.
pub fn buffer(backend: &dyn Backend, values: &[f64], dtype: DType) -> Buffer {
    let buffer = backend.allocate(values.len(), dtype, Category::Communication);
    let bytes: Vec<u8> = values.iter().flat_map(|&value| encode(value, dtype)).collect();
    backend.upload_bytes(&bytes, buffer.view());
    buffer
}

/// The numbers in a buffer.
pub fn values(backend: &dyn Backend, buffer: &Buffer) -> Vec<f64> {
    let mut bytes = vec![0; buffer.len() * buffer.dtype().bytes()];
    backend.download(buffer.view(), &mut bytes);
    bytes.chunks_exact(buffer.dtype().bytes()).map(|bytes| decode(bytes, buffer.dtype())).collect()
}

fn encode(value: f64, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F64 => value.to_ne_bytes().to_vec(),
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(value).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(value).to_ne_bytes().to_vec(),
        DType::U32 => (value as u32).to_ne_bytes().to_vec(),
        DType::U8 => vec![value as u8],
    }
}

fn decode(bytes: &[u8], dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::from_ne_bytes(bytes.try_into().expect("eight bytes")),
        DType::F32 => f32::from_ne_bytes(bytes.try_into().expect("four bytes")).into(),
        DType::BF16 => bf16::from_ne_bytes(bytes.try_into().expect("two bytes")).to_f64(),
        DType::F16 => f16::from_ne_bytes(bytes.try_into().expect("two bytes")).to_f64(),
        DType::U32 => u32::from_ne_bytes(bytes.try_into().expect("four bytes")).into(),
        DType::U8 => bytes[0].into(),
    }
}
