//! Runs the same inputs on both backends and compares the results.

use std::path::Path;
use std::rc::Rc;
use std::thread;

use kintsugi_gpu::{CUDA, GpuBackend, HIP};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::Gradient;
use kintsugi_tensor::{Backend, Buffer, Category, DType};
use kintsugi_testing::{Need, skip};

/// The compute types of training.
pub const COMPUTE: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

const MEMORY: u64 = 512 << 20;

/// A deterministic backend on the first GPU. If there is none, prints the reason and returns `None`.
pub fn gpu() -> Option<GpuBackend> {
    backend(true)
}

/// A deterministic backend on the first GPU of any maker. If there is none, the calling test runs in a process of its own,
/// on the interpreter of gfx90a code, and this returns `None`.
pub fn any_gpu() -> Option<GpuBackend> {
    /// The interpreter's memory is the host's.
    const INTERPRETED_MEMORY: u64 = 96 << 20;
    if CUDA.is_here() {
        return gpu();
    }
    if HIP.is_here() {
        let memory = if amdhip64::is_here() { INTERPRETED_MEMORY } else { MEMORY };
        return Some(HIP.backend(0, memory, true).expect("a backend on the GPU"));
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if let Err(missing) = amdhip64::check_tools(folder) {
        skip(Need::AmdTools, missing);
        return None;
    }
    let test = thread::current().name().expect("a test's thread has its name").to_owned();
    let mut program = amdhip64::this_program(folder).expect("the interpreter's library");
    let status = program.args([&test, "--exact", "--nocapture"]).status().expect("it starts");
    assert!(status.success(), "{test} on the interpreter: {status}");
    None
}

/// A backend that tunes its products in every run, so that bits may change from call to call.
pub fn tuning_gpu() -> Option<GpuBackend> {
    backend(false).map(GpuBackend::without_tuning_cache)
}

fn backend(deterministic: bool) -> Option<GpuBackend> {
    match CUDA.devices() {
        Ok(0) => skip(Need::Gpu, "the driver shows no device"),
        Err(error) => skip(Need::Gpu, error),
        Ok(_) => return Some(CUDA.backend(0, MEMORY, deterministic).expect("a backend on the GPU")),
    }
    None
}

/// One of the two backends, with a compute type.
pub struct TestBackend<'a> {
    pub device: &'a dyn Backend,
    pub dtype: DType,
}

impl TestBackend<'_> {
    /// Random numbers around zero in the compute type, determined by the seed.
    pub fn input(&self, len: usize, seed: u64) -> Buffer {
        self.numbers(&random(len, seed), self.dtype)
    }

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

    pub fn blank(&self, len: usize, dtype: DType) -> Buffer {
        self.numbers(&vec![-7.5; len], dtype)
    }

    pub fn tokens(&self, tokens: &[u32]) -> Buffer {
        let buffer = self.device.allocate(tokens.len(), DType::U32, Category::Activations);
        self.device.upload_tokens(tokens, buffer.view());
        buffer
    }
}

/// Runs `body` on both backends in `dtype` and expects the returned buffers to agree. On the GPU it runs twice and must
/// give the same bits.
pub fn agree(gpu: &GpuBackend, dtype: DType, what: &str, body: impl Fn(&TestBackend) -> Vec<Buffer>) {
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let run = |backend: &dyn Backend| -> Vec<Vec<f32>> {
        body(&TestBackend { device: backend, dtype })
            .iter()
            .map(|buffer| backend.read(buffer.view()))
            .collect()
    };
    let (expected, ours, again) = (run(&cpu), run(gpu), run(gpu));
    assert_eq!(expected.len(), ours.len());
    for (i, ((expected, ours), again)) in expected.iter().zip(&ours).zip(&again).enumerate() {
        let error = distance(ours, expected);
        assert!(error <= tolerance(dtype), "{what} in {dtype:?}, result {i}: relative error {error}");
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(ours) == bits(again), "{what} in {dtype:?}, result {i}: other bits the second time");
    }
}

/// Runs `body` on the CPU, and `times` on the GPU, and expects the returned buffers to agree every time.
pub fn close(
    gpu: &GpuBackend,
    dtype: DType,
    what: &str,
    times: usize,
    body: impl Fn(&TestBackend) -> Vec<Buffer>,
) {
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let run = |backend: &dyn Backend| -> Vec<Vec<f32>> {
        body(&TestBackend { device: backend, dtype })
            .iter()
            .map(|buffer| backend.read(buffer.view()))
            .collect()
    };
    let expected = run(&cpu);
    for time in 0..times {
        for (i, (expected, ours)) in expected.iter().zip(&run(gpu)).enumerate() {
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

/// `‖a − b‖ / ‖b‖`. Numbers that are not finite must be equal on both sides and are left out.
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
