//! Cross-entropy, with the vocabulary in one part and in several.

use kintsugi_tensor::ops::{CrossEntropy, LossStatistics};
use kintsugi_tensor::{Backend, Buffer, DType};

use crate::test_backend::{COMPUTE, TestBackend, agree, any_gpu};

/// Rows, and a vocabulary that is padded to `parts · columns`.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    vocabulary: usize,
    columns: usize,
    parts: usize,
}

const CASES: [Case; 9] = [
    Case { rows: 1, vocabulary: 3, columns: 3, parts: 1 },
    Case { rows: 5, vocabulary: 99, columns: 101, parts: 1 },
    Case { rows: 70, vocabulary: 5000, columns: 5056, parts: 1 },
    Case { rows: 9, vocabulary: 1000, columns: 512, parts: 2 },
    // Rows that fit into shared memory: every thread has packs, few have, none has.
    Case { rows: 5, vocabulary: 50_257, columns: 50_304, parts: 1 },
    Case { rows: 3, vocabulary: 50_304, columns: 50_304, parts: 1 },
    Case { rows: 7, vocabulary: 5, columns: 64, parts: 1 },
    // A row that does not fit in f32.
    Case { rows: 2, vocabulary: 69_999, columns: 70_000, parts: 1 },
    // The last part is only padding.
    Case { rows: 3, vocabulary: 64, columns: 32, parts: 3 },
];

/// Statistics of all parts, the loss, and the gradients of all parts.
fn cross_entropy(backend: &TestBackend, case: Case, wanted: bool) -> Vec<Buffer> {
    let Case { rows, vocabulary, columns, parts } = case;
    let targets: Vec<u32> = (0..rows).map(|row| (row * 37 % vocabulary) as u32).collect();
    let (targets, statistics) = (backend.tokens(&targets), backend.sums(parts * rows * 3));
    let valid = |part: usize| vocabulary.saturating_sub(part * columns).min(columns);
    let logits: Vec<Buffer> = (0..parts).map(|part| backend.input(rows * columns, part as u64 + 1)).collect();
    for (part, logits) in logits.iter().enumerate().filter(|_| parts > 1) {
        backend.device.loss_statistics(LossStatistics {
            logits: logits.view(),
            targets: targets.view(),
            first: part * columns,
            valid: valid(part),
            statistics: statistics.slice(part * rows * 3..(part + 1) * rows * 3),
            rows,
            columns,
        });
    }
    let (scale, mut written) = (backend.numbers(&[64.0], DType::F32), Vec::new());
    for (part, logits) in logits.into_iter().enumerate() {
        let loss = backend.numbers(&[0.25], DType::F32);
        backend.device.cross_entropy(CrossEntropy {
            logits: logits.view(),
            targets: targets.view(),
            first: part * columns,
            valid: valid(part),
            statistics: statistics.view(),
            parts,
            loss: loss.view(),
            scale: wanted.then_some(scale.view()),
            factor: 1.0 / rows as f64,
            z_loss: 0.0625,
            rows,
            columns,
        });
        written.extend([loss, logits]);
    }
    written.push(statistics);
    written
}

#[test]
fn loss_and_gradient_of_a_vocabulary_in_parts() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for case in CASES {
            for wanted in [false, true] {
                let what = format!("{case:?}, gradient wanted: {wanted}");
                agree(&gpu, dtype, &what, |backend| cross_entropy(backend, case, wanted));
            }
        }
    }
}

#[test]
fn a_logit_that_is_not_finite_shows_in_the_loss() {
    let Some(gpu) = any_gpu() else { return };
    for bad in [f32::NAN, f32::INFINITY] {
        let backend = TestBackend { device: &gpu, dtype: DType::F32 };
        let mut values = crate::test_backend::random(64, 1);
        values[20] = bad;
        let (logits, targets) = (backend.numbers(&values, DType::F32), backend.tokens(&[1]));
        let (statistics, loss) = (backend.sums(3), backend.numbers(&[0.0], DType::F32));
        let (rows, columns, first, valid) = (1, 64, 0, 64);
        let (logits, targets, statistics) = (logits.view(), targets.view(), statistics.view());
        gpu.cross_entropy(CrossEntropy {
            logits,
            targets,
            first,
            valid,
            statistics,
            parts: 1,
            loss: loss.view(),
            scale: None,
            factor: 1.0,
            z_loss: 0.0,
            rows,
            columns,
        });
        assert!(!gpu.read_scalar(loss.view(), 0).is_finite(), "a logit of {bad}");
    }
}
