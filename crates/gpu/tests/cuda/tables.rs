//! Token and position tables.

use kintsugi_conformance::tables::{Case, embedding, positions, skewed, spread};
use kintsugi_conformance::{COMPUTE, gradient_types};
use kintsugi_tensor::DType;

use crate::test_backend::{agree, any_gpu};

const CASES: [Case; 4] = [
    Case { rows: 1, width: 1, vocabulary: 3, first: 0, tokens: |_| 2 },
    Case { rows: 300, width: 5, vocabulary: 700, first: 100, tokens: spread },
    Case { rows: 700, width: 264, vocabulary: 1024, first: 0, tokens: spread },
    Case { rows: 3000, width: 64, vocabulary: 40, first: 3, tokens: skewed },
];

#[test]
fn embedding_and_its_backward() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for case in CASES {
            let Case { rows, width, vocabulary, .. } = case;
            for gradients in gradient_types(dtype) {
                // The CPU rounds a 16-bit gradient at every row, so long sums are compared in f32 only.
                if gradients != DType::F32 && rows > 1000 {
                    continue;
                }
                let what = format!("embedding {rows}×{width} of {vocabulary}, gradients {gradients:?}");
                agree(&gpu, dtype, &what, |backend| embedding(backend, case, gradients));
            }
        }
    }
}

#[test]
fn positions_and_their_backward() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for shape in [[1, 1, 1, 0], [40, 9, 16, 5], [300, 768, 100, 0]] {
            for gradients in gradient_types(dtype) {
                agree(&gpu, dtype, &format!("positions {shape:?}"), |backend| {
                    positions(backend, shape, gradients)
                });
            }
        }
    }
}
