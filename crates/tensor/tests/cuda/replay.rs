//! Steps that the card repeats by heart.

use std::rc::Rc;

use kintsugi_tensor::cpu::CpuBackend;
use kintsugi_tensor::cpu::memory::Heap;
use kintsugi_tensor::ops::{Embedding, Linear};
use kintsugi_tensor::{Backend, Buffer, Category, DType, Fetch, ReplayOutcome, ReplayRequest};

use crate::lab::{Lab, card, tuning_card};

const ROWS: usize = 8;
const WIDTH: usize = 16;
const WORDS: u32 = 50;

/// What a step of token ids adds to a sum: a row of a table for each, through a matrix.
struct Toy<'a> {
    lab: Lab<'a>,
    table: Buffer,
    weight: Buffer,
    total: Buffer,
}

impl<'a> Toy<'a> {
    fn new(backend: &'a dyn Backend) -> Self {
        let lab = Lab { backend, dtype: DType::F32 };
        let table = lab.input(WORDS as usize * WIDTH, 1);
        let weight = lab.input(WIDTH * WIDTH, 2);
        let total = lab.numbers(&[0.0; ROWS * WIDTH], DType::F32);
        Toy { lab, table, weight, total }
    }

    fn enqueue(&self, tokens: &[u32]) {
        let backend = self.lab.backend;
        let ids = self.lab.tokens(tokens);
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
        });
        backend.add(out.view(), self.total.view());
    }

    fn replay_step(&self, step: u32) -> ReplayOutcome {
        let tokens: Vec<u32> = (0..ROWS as u32).map(|i| (7 * i + step) % WORDS).collect();
        self.lab.backend.replay_step(&mut |what| match what {
            ReplayRequest::WholeStep => self.enqueue(&tokens),
            ReplayRequest::Tokens(put) => put(&tokens),
        })
    }
}

#[test]
fn a_replayed_step_reads_its_own_tokens() {
    const STEPS: u32 = 12;
    let Some(card) = card() else { return };
    let cpu = CpuBackend::new(Rc::new(Heap::default()), 1);
    let run = |backend: &dyn Backend| {
        let toy = Toy::new(backend);
        let (mut replayed, mut fetched) = (0, Vec::new());
        let mut bystander = None;
        for step in 0..STEPS {
            replayed += u32::from(toy.replay_step(step) == ReplayOutcome::Replayed);
            // Nobody waits, so that the host fills tokens while earlier steps run.
            fetched.push(backend.fetch(toy.total.view()));
            if step == 7 {
                // Memory is not as it was, so the step must be captured anew.
                bystander = Some(backend.allocate(3, DType::F32, Category::Activations));
            }
        }
        drop(bystander);
        let values: Vec<Vec<f64>> = fetched.into_iter().map(Fetch::wait).collect();
        (replayed, values)
    };
    let ((on_cpu, expected), (on_card, found)) = (run(&cpu), run(&card));
    // Kernels are loaded in step 0; 1 and 2 are the same; 3 and 4 are captured; 5, 6 and 7 are replayed. With the
    // bystander 8 and 9 are the same, and 10 and 11 are captured.
    assert_eq!((on_cpu, on_card), (0, 3));
    for (step, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let distance = expected.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(distance < 1e-3, "step {step}: {distance}");
    }
}

#[test]
fn a_step_that_changes_is_never_replayed() {
    let Some(card) = card() else { return };
    let lab = Lab { backend: &card, dtype: DType::F32 };
    let buffer = lab.numbers(&[0.0; 100], DType::F32);
    for step in 0..8 {
        let fill = &mut |what: ReplayRequest| {
            assert!(matches!(what, ReplayRequest::WholeStep));
            card.fill(f64::from(step), buffer.view());
        };
        assert_eq!(card.replay_step(fill), ReplayOutcome::Enqueued);
        assert_eq!(card.read_scalar(buffer.view(), 99).to_bits(), f64::from(step).to_bits());
    }
    // Neither is one that reads.
    for _ in 0..8 {
        let repeated = card.replay_step(&mut |_| {
            card.fill(1.0, buffer.view());
            card.read_scalar(buffer.view(), 0);
        });
        assert_eq!(repeated, ReplayOutcome::Enqueued);
    }
}

#[test]
fn a_step_that_tries_products_is_not_replayed_and_those_after_it_are() {
    let Some(card) = tuning_card() else { return };
    let toy = Toy::new(&card);
    let replayed: Vec<bool> = (0..12).map(|step| toy.replay_step(step) == ReplayOutcome::Replayed).collect();
    // Candidates are tried in step 0; 1 and 2 are the same; 3 and 4 are captured.
    assert_eq!(replayed, [vec![false; 5], vec![true; 7]].concat());
}
