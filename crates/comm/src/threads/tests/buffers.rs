//! One rank's buffers in tests: numbers in, numbers out, in any element type.

use std::rc::Rc;
use std::slice;

use half::{bf16, f16};
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::{Buffer, Category, DType, Memory};

/// Makes and reads the buffers of one rank.
pub(crate) struct TestBuffers {
    memory: Rc<dyn Memory>,
}

impl TestBuffers {
    pub(crate) fn new() -> Self {
        TestBuffers { memory: Rc::new(Heap::default()) }
    }

    /// A buffer with these numbers, rounded to `dtype`.
    pub(crate) fn buffer(&self, values: &[f64], dtype: DType) -> Buffer {
        let buffer = Buffer::new(&self.memory, values.len(), dtype, Category::Communication);
        match dtype {
            DType::F64 => write(&buffer, values, |x| x),
            DType::F32 => write(&buffer, values, |x| x as f32),
            DType::BF16 => write(&buffer, values, bf16::from_f64),
            DType::F16 => write(&buffer, values, f16::from_f64),
            DType::U32 => write(&buffer, values, |x| x as u32),
            DType::U8 => write(&buffer, values, |x| x as u8),
        }
        buffer
    }

    /// The numbers in a buffer.
    pub(crate) fn values(buffer: &Buffer) -> Vec<f64> {
        match buffer.dtype() {
            DType::F64 => read(buffer, |x: f64| x),
            DType::F32 => read(buffer, |x: f32| x.into()),
            DType::BF16 => read(buffer, bf16::to_f64),
            DType::F16 => read(buffer, f16::to_f64),
            DType::U32 => read(buffer, |x: u32| x.into()),
            DType::U8 => read(buffer, |x: u8| x.into()),
        }
    }
}

fn write<T>(buffer: &Buffer, values: &[f64], round: impl Fn(f64) -> T) {
    // SAFETY: the buffer has `len` elements of type `T` on the heap, and this thread owns it.
    let elements = unsafe { slice::from_raw_parts_mut(buffer.address() as *mut T, buffer.len()) };
    for (element, &value) in elements.iter_mut().zip(values) {
        *element = round(value);
    }
}

fn read<T: Copy>(buffer: &Buffer, widen: impl Fn(T) -> f64) -> Vec<f64> {
    // SAFETY: the buffer has `len` elements of type `T` on the heap, and this thread owns it.
    let elements = unsafe { slice::from_raw_parts(buffer.address() as *const T, buffer.len()) };
    elements.iter().map(|&element| widen(element)).collect()
}
