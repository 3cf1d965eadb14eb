//! Helpers for kernel tests: buffers from numbers, random numbers, and finite differences in f64.

use std::rc::Rc;

use super::CpuBackend;
use super::access::Access;
use super::element::{Element, Real};
use super::memory::Heap;
use crate::ops::{AttentionShape, Gradient};
use crate::{Backend, Buffer, Category, DType, View};
use half::{bf16, f16};

/// A CPU backend on the heap, for tests.
pub struct TestBackend {
    pub cpu: CpuBackend,
}

impl TestBackend {
    pub fn new(threads: usize) -> Self {
        TestBackend { cpu: CpuBackend::new(Rc::new(Heap::default()), threads) }
    }

    /// Runs `body` with 1, 2 and 3 threads, each in a pool of that size, and expects the same numbers from all.
    pub fn same_for_all_threads(body: impl Fn(&TestBackend) -> Vec<f64> + Sync) -> Vec<f64> {
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            pool.install(|| body(&TestBackend::new(threads)))
        };
        let [one, two, three] = [1, 2, 3].map(run);
        let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&one), bits(&two), "two threads");
        assert_eq!(bits(&one), bits(&three), "three threads");
        one
    }

    pub fn buffer(&self, values: &[f64], dtype: DType) -> Buffer {
        let buffer = self.cpu.allocate(values.len(), dtype, Category::Activations);
        match dtype {
            DType::F64 => put::<f64>(values, buffer.view()),
            DType::F32 => put::<f32>(values, buffer.view()),
            DType::BF16 => put::<bf16>(values, buffer.view()),
            DType::F16 => put::<f16>(values, buffer.view()),
            DType::U32 | DType::U8 => panic!("no numbers"),
        }
        buffer
    }

    /// A buffer filled with a value that no kernel should leave there.
    pub fn blank(&self, len: usize, dtype: DType) -> Buffer {
        self.buffer(&vec![-7.5; len], dtype)
    }

    pub fn tokens(&self, tokens: &[u32]) -> Buffer {
        let buffer = self.cpu.allocate(tokens.len(), DType::U32, Category::Activations);
        self.cpu.upload_tokens(tokens, buffer.view());
        buffer
    }

    pub fn values(&self, view: View) -> Vec<f64> {
        (0..view.len()).map(|i| self.cpu.read_scalar(view, i)).collect()
    }
}

fn put<T: Element>(values: &[f64], view: View) {
    for (to, &value) in Access::new().write::<T>(view).iter_mut().zip(values) {
        *to = T::narrow(T::Accumulator::from_f64(value));
    }
}

/// A gradient that is overwritten.
pub fn fresh(buffer: &Buffer) -> Gradient<'_> {
    Gradient { view: buffer.view(), accumulate: false }
}

/// A gradient that is added to.
pub fn added(buffer: &Buffer) -> Gradient<'_> {
    Gradient { view: buffer.view(), accumulate: true }
}

/// Random numbers around zero, determined by the seed.
pub fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1 << 23) - 1.0
    };
    (0..len).map(|_| next() + next()).collect()
}

/// The first token of each token's document. Documents have these lengths in turn and continue across the ends of
/// samples.
pub fn starts(shape: AttentionShape, lengths: &[usize]) -> Vec<u32> {
    let mut lengths = lengths.iter().cycle();
    let (mut first, mut end) = (0, 0);
    let start = |row: usize| {
        if row == end {
            (first, end) = (row, row + lengths.next().expect("at least one length"));
        }
        first.saturating_sub(row - row % shape.sequence) as u32
    };
    (0..shape.rows()).map(start).collect()
}

/// The first key of every query: of its document, if there are any, and of the window of the shape.
pub fn first_keys(shape: AttentionShape, documents: Option<&[usize]>) -> Option<Vec<u32>> {
    let Some(window) = shape.scores.window else { return documents.map(|lengths| starts(shape, lengths)) };
    let documents = documents.map_or_else(|| vec![0; shape.rows()], |lengths| starts(shape, lengths));
    let in_window = |row: usize| (row % shape.sequence + 1).saturating_sub(window) as u32;
    Some(documents.into_iter().enumerate().map(|(row, start)| start.max(in_window(row))).collect())
}

/// Expects `left` and `right` to agree to `tolerance`, absolutely below one and relatively above.
pub fn assert_close(left: &[f64], right: &[f64], tolerance: f64) {
    assert_eq!(left.len(), right.len());
    for (i, (l, r)) in left.iter().zip(right).enumerate() {
        assert!((l - r).abs() <= tolerance * r.abs().max(1.0), "element {i}: {l} against {r}");
    }
}

/// `Σ a ∘ b`: a scalar whose gradient with respect to `a` is `b`.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Expects `gradient` to be the derivative of `f` at `x`, by central differences.
pub fn assert_gradient(x: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1e-5;
    assert_eq!(x.len(), gradient.len());
    let numeric: Vec<f64> = (0..x.len())
        .map(|i| {
            let moved = |by: f64| {
                let mut x = x.to_vec();
                x[i] += by;
                f(&x)
            };
            (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
        })
        .collect();
    assert_close(gradient, &numeric, 1e-7);
}
