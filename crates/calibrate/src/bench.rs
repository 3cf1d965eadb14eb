//! Times work on a device that reports only the completion of all queued work.

use std::thread;
use std::time::{Duration, Instant};

use kintsugi_gpu::PowerMeter;
use kintsugi_tensor::{Backend, Buffer, Category, DType};

use super::products::{self, ProductTypes};
use super::shapes::ProductShape;
use super::{Patience, Progress};

/// A device that is being measured.
pub struct Bench<'a> {
    pub backend: &'a dyn Backend,
    meter: Option<&'a dyn PowerMeter>,
    patience: Patience,
    on_progress: Box<dyn FnMut(Progress) + 'a>,
    progress: Progress,
}

impl<'a> Bench<'a> {
    pub fn new(
        backend: &'a dyn Backend,
        meter: Option<&'a dyn PowerMeter>,
        patience: Patience,
        on_progress: impl FnMut(Progress) + 'a,
        all: usize,
    ) -> Self {
        let on_progress = Box::new(on_progress);
        Bench { backend, meter, patience, on_progress, progress: Progress { done: 0, all } }
    }

    /// A buffer of numbers that look like activations: of both signs, none zero, no two rows alike.
    ///
    /// Zeros would draw less power and run faster than any training does.
    pub fn numbers(&self, len: usize, dtype: DType) -> Buffer {
        const BLOCK: usize = 1 << 20;
        let buffer = self.backend.allocate(len, dtype, Category::Activations);
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0 + 1e-6
        };
        let block: Vec<f32> = (0..BLOCK.min(len)).map(|_| number()).collect();
        self.backend.upload(&block, buffer.slice(0..block.len()));
        // Doubling the filled part takes few copies, whatever the length.
        let mut filled = block.len();
        while filled < len {
            let more = filled.min(len - filled);
            self.backend.copy(buffer.slice(0..more), buffer.slice(filled..filled + more));
            filled += more;
        }
        buffer
    }

    /// Seconds of one run on a rested device: the shortest of a few, since disturbances only make a run longer.
    pub fn burst(&mut self, work: &dyn Fn()) -> f64 {
        const RUNS: usize = 3;
        let runs = |count| self.runs(work, count);
        let first = self.first(work);
        let count = (0.01 / first).clamp(1.0, 100.0) as usize;
        let seconds = (0..RUNS).map(|_| {
            thread::sleep(self.patience.rest);
            runs(count) / count as f64
        });
        let best = seconds.fold(f64::INFINITY, f64::min);
        self.step();
        best
    }

    /// Seconds of one run when many follow each other.
    pub fn sustained(&mut self, work: &dyn Fn()) -> f64 {
        let first = self.first(work);
        // Shorter than a scheduler's time slice, in case other programs run.
        let longest = if self.patience.shared { 2e-3 } else { f64::INFINITY };
        let at_once = (self.patience.sustained.as_secs_f64() / 4.0).min(longest);
        let count = (at_once / first).clamp(1.0, 1e6) as usize;
        let begun = Instant::now();
        let mut runs = vec![first];
        while begun.elapsed() < self.patience.sustained {
            runs.push(self.runs(work, count) / count as f64);
        }
        self.step();
        // A device of its own becomes slower until it is as hot as in training.
        if self.patience.shared { median(runs) } else { runs[runs.len() - 1] }
    }

    /// Keeps the device busy until its temperature is stable. Returns the watts that it drew.
    pub fn warm_up(&mut self, types: ProductTypes, shape: ProductShape) -> Option<f64> {
        let half = self.patience.warm_up / 2;
        products::with(self, types, shape, |bench, work| {
            bench.keep_at(work, half);
            bench.watts(|bench| bench.keep_at(work, half))
        })
    }

    /// Watts of the idle device.
    pub fn idle_power(&mut self) -> Option<f64> {
        self.backend.synchronize();
        thread::sleep(Duration::from_secs(2));
        self.meter?.power()
    }

    /// Mean watts while `work` runs.
    pub fn watts(&mut self, work: impl FnOnce(&mut Self)) -> Option<f64> {
        let before = self.meter.and_then(PowerMeter::energy);
        let begun = Instant::now();
        work(self);
        let (after, seconds) = (self.meter.and_then(PowerMeter::energy)?, begun.elapsed().as_secs_f64());
        Some((after - before?) / seconds)
    }

    fn keep_at(&mut self, work: &dyn Fn(), time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.runs(work, 20);
        }
    }

    /// A rough estimate of the seconds of a run. The first run is not counted: it may compile kernels and choose algorithms.
    fn first(&self, work: &dyn Fn()) -> f64 {
        self.runs(work, 1);
        self.runs(work, 1)
    }

    /// Seconds of `count` runs, the wait for the last one included.
    fn runs(&self, work: &dyn Fn(), count: usize) -> f64 {
        let begun = Instant::now();
        (0..count).for_each(|_| work());
        self.backend.synchronize();
        begun.elapsed().as_secs_f64()
    }

    fn step(&mut self) {
        self.progress.done += 1;
        (self.on_progress)(self.progress);
    }
}

fn median(mut runs: Vec<f64>) -> f64 {
    let middle = runs.len() / 2;
    *runs.select_nth_unstable_by(middle, f64::total_cmp).1
}
