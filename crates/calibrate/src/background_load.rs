//! Background load: the other cores multiply matrices during a measurement, as they do in training.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::Linear;
use kintsugi_tensor::{Backend, Category, DType};

/// Runs `work` while `others` other threads multiply matrices. Fails if a thread cannot be started.
pub fn under_background_load<T>(others: usize, work: impl FnOnce() -> T) -> io::Result<T> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        // The other threads end even if `work` panics.
        let _end = End(&done);
        for _ in 0..others {
            thread::Builder::new().spawn_scoped(scope, || multiply_until(&done))?;
        }
        Ok(work())
    })
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn multiply_until(done: &AtomicBool) {
    const SIDE: usize = 256;
    let backend = CpuBackend::new(Rc::new(Heap::default()), 1);
    let matrices = [(); 3].map(|()| {
        let matrix = backend.allocate(SIDE * SIDE, DType::F32, Category::Activations);
        backend.fill(1e-3, matrix.view());
        matrix
    });
    let [x, weight, out] = matrices.each_ref().map(|matrix| matrix.view());
    let (rows, inputs, outputs) = (SIDE, SIDE, SIDE);
    while !done.load(Ordering::Relaxed) {
        backend.linear(Linear {
            x,
            weight,
            bias: None,
            gelu: None,
            residual: None,
            out,
            rows,
            inputs,
            outputs,
            float8: None,
        });
    }
}
