//! Steps that the GPU replays as a captured graph.

use std::rc::Rc;

use kintsugi_conformance::TestBackend;
use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::{Embedding, Linear};
use kintsugi_tensor::{Backend, Buffer, Category, DType, Fetch, ReplayOutcome, ReplayRequest};

use crate::test_backend::{gpu, tuning_gpu};

const ROWS: usize = 8;
const WIDTH: usize = 16;
const WORDS: u32 = 50;

/// A step that embeds its tokens, multiplies them by a matrix, and adds the result to a sum.
struct SmallStep<'a> {
    backend: TestBackend<'a>,
    table: Buffer,
    weight: Buffer,
    total: Buffer,
}

impl<'a> SmallStep<'a> {
    fn new(backend: &'a dyn Backend) -> Self {
        let backend = TestBackend { device: backend, dtype: DType::F32 };
        let table = backend.input(WORDS as usize * WIDTH, 1);
        let weight = backend.input(WIDTH * WIDTH, 2);
        let total = backend.numbers(&[0.0; ROWS * WIDTH], DType::F32);
        SmallStep { backend, table, weight, total }
    }

    fn enqueue(&self, tokens: &[u32]) {
        let backend = self.backend.device;
        let ids = self.backend.tokens(tokens);
        let [rows, out] = [(); 2].map(|()| backend.allocate(ROWS * WIDTH, DType::F32, Category::Activations));
        let (tokens, table) = (ids.view(), self.table.view());
        backend.embedding(Embedding { tokens, table, out: rows.view(), rows: ROWS, width: WIDTH, first: 0 });
        backend.linear(Linear {
            x: rows.view(),
            weight: self.weight.view(),
            bias: None,
            gelu: None,
            residual: None,
            out: out.view(),
            rows: ROWS,
            inputs: WIDTH,
            outputs: WIDTH,
            float8: None,
        });
        backend.add(out.view(), self.total.view());
    }

    fn replay_step(&self, step: u32) -> ReplayOutcome {
        let tokens: Vec<u32> = (0..ROWS as u32).map(|i| (7 * i + step) % WORDS).collect();
        self.backend.device.replay_step(&mut |what| match what {
            ReplayRequest::WholeStep => self.enqueue(&tokens),
            ReplayRequest::Tokens(put) => put(&tokens),
        })
    }
}

#[test]
fn a_replayed_step_reads_its_own_tokens() {
    const STEPS: u32 = 12;
    let Some(gpu) = gpu() else { return };
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let run = |backend: &dyn Backend| {
        let small_step = SmallStep::new(backend);
        let (mut replayed, mut fetched) = (0, Vec::new());
        let mut extra_buffer = None;
        for step in 0..STEPS {
            replayed += u32::from(small_step.replay_step(step) == ReplayOutcome::Replayed);
            // Nothing waits, so the host fills tokens while earlier steps run.
            fetched.push(backend.fetch(small_step.total.view()));
            if step == 7 {
                // The free memory has changed, so the step must be captured again.
                extra_buffer = Some(backend.allocate(3, DType::F32, Category::Activations));
            }
        }
        drop(extra_buffer);
        let values: Vec<Vec<f64>> = fetched.into_iter().map(Fetch::wait).collect();
        (replayed, values)
    };
    let ((on_cpu, expected), (on_gpu, found)) = (run(&cpu), run(&gpu));
    // Kernels are loaded in step 0. Steps 1 and 2 are equal, 3 and 4 are captured, and 5, 6 and 7 are replayed. After
    // the extra allocation, steps 8 and 9 are equal, and 10 and 11 are captured.
    assert_eq!((on_cpu, on_gpu), (0, 3));
    for (step, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let distance = expected.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(distance < 1e-3, "step {step}: {distance}");
    }
}

#[test]
fn a_step_that_changes_is_never_replayed() {
    let Some(gpu) = gpu() else { return };
    let backend = TestBackend { device: &gpu, dtype: DType::F32 };
    let buffer = backend.numbers(&[0.0; 100], DType::F32);
    for step in 0..8 {
        let fill = &mut |what: ReplayRequest| {
            assert!(matches!(what, ReplayRequest::WholeStep));
            gpu.fill(f64::from(step), buffer.view());
        };
        assert_eq!(gpu.replay_step(fill), ReplayOutcome::Enqueued);
        assert_eq!(gpu.read_scalar(buffer.view(), 99).to_bits(), f64::from(step).to_bits());
    }
    // A step that reads is not replayed either.
    for _ in 0..8 {
        let repeated = gpu.replay_step(&mut |_| {
            gpu.fill(1.0, buffer.view());
            gpu.read_scalar(buffer.view(), 0);
        });
        assert_eq!(repeated, ReplayOutcome::Enqueued);
    }
}

#[test]
fn a_step_that_tunes_products_is_not_replayed_but_later_ones_are() {
    let Some(gpu) = tuning_gpu() else { return };
    let small_step = SmallStep::new(&gpu);
    let replayed: Vec<bool> =
        (0..12).map(|step| small_step.replay_step(step) == ReplayOutcome::Replayed).collect();
    // Candidates are measured in step 0. Steps 1 and 2 are equal, 3 and 4 are captured.
    assert_eq!(replayed, [vec![false; 5], vec![true; 7]].concat());
}
