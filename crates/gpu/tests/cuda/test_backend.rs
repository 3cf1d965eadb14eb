//! Runs the same inputs on both backends and compares the results.

use std::path::Path;
use std::rc::Rc;
use std::thread;

use kintsugi_conformance::{Comparison, TestBackend, compare, distance, tolerance};
use kintsugi_gpu::{CUDA, GpuBackend, HIP};
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::{Backend, Buffer, DType};
use kintsugi_testing::{Need, skip};

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

/// Runs `body` on both backends in `dtype` and expects the returned buffers to agree. On the GPU it runs twice and must
/// give the same bits.
pub fn agree(gpu: &GpuBackend, dtype: DType, what: &str, body: impl Fn(&TestBackend) -> Vec<Buffer>) {
    let Comparison { error, result, repeats } = compare(gpu, dtype, &body);
    assert!(error <= tolerance(dtype), "{what} in {dtype:?}, result {result}: relative error {error}");
    assert!(repeats, "{what} in {dtype:?}: other bits the second time");
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
