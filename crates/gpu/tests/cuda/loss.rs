//! Cross-entropy, with the vocabulary in one part and in several.

use kintsugi_conformance::loss::{Case, cross_entropy};
use kintsugi_conformance::{COMPUTE, TestBackend, random};
use kintsugi_tensor::ops::CrossEntropy;
use kintsugi_tensor::{Backend, DType};

use crate::test_backend::{agree, any_gpu};

const CASES: [Case; 11] = [
    Case { rows: 1, vocabulary: 3, columns: 3, parts: 1, soft_cap: None },
    Case { rows: 5, vocabulary: 99, columns: 101, parts: 1, soft_cap: None },
    Case { rows: 70, vocabulary: 5000, columns: 5056, parts: 1, soft_cap: None },
    Case { rows: 9, vocabulary: 1000, columns: 512, parts: 2, soft_cap: None },
    // Rows that fit into shared memory: every thread has packs, few have, none has.
    Case { rows: 5, vocabulary: 50_257, columns: 50_304, parts: 1, soft_cap: None },
    Case { rows: 3, vocabulary: 50_304, columns: 50_304, parts: 1, soft_cap: None },
    Case { rows: 7, vocabulary: 5, columns: 64, parts: 1, soft_cap: None },
    // A row that does not fit in f32.
    Case { rows: 2, vocabulary: 69_999, columns: 70_000, parts: 1, soft_cap: None },
    // The last part is only padding.
    Case { rows: 3, vocabulary: 64, columns: 32, parts: 3, soft_cap: None },
    Case { rows: 5, vocabulary: 99, columns: 104, parts: 1, soft_cap: Some(1.5) },
    Case { rows: 3, vocabulary: 64, columns: 32, parts: 3, soft_cap: Some(1.5) },
];

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
        let mut values = random(64, 1);
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
            soft_cap: None,
            rows,
            columns,
        });
        assert!(!gpu.read_scalar(loss.view(), 0).is_finite(), "a logit of {bad}");
    }
}
