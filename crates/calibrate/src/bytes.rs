//! The rate of copies and the overhead of a launch.

use kintsugi_tensor::DType;

use super::bench::Bench;

/// Sustained bytes per second, read and written, of a copy.
pub fn streaming(bench: &mut Bench, count: usize) -> f64 {
    let (from, to) = (bench.numbers(count, DType::F32), bench.numbers(count, DType::F32));
    let backend = bench.backend;
    let seconds = bench.sustained(&|| backend.copy(from.view(), to.view()));
    2.0 * from.view().bytes() as f64 / seconds
}

/// Seconds from one small operation to the next.
pub fn launch(bench: &mut Bench) -> f64 {
    let small = bench.numbers(64, DType::F32);
    let backend = bench.backend;
    bench.burst(&|| (0..100).for_each(|_| backend.fill(0.0, small.view()))) / 100.0
}
