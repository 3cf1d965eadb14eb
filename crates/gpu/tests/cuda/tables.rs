//! Token and position tables.

use kintsugi_tensor::DType;
use kintsugi_tensor::ops::{Embedding, EmbeddingBackward, Positions, PositionsBackward};

use crate::test_backend::{COMPUTE, agree, any_gpu, gradient, gradient_types};

/// A part of a vocabulary, and tokens inside and outside of it.
struct Case {
    rows: usize,
    width: usize,
    vocabulary: usize,
    first: usize,
    tokens: fn(u32) -> u32,
}

/// Tokens that are all rare.
fn spread(i: u32) -> u32 {
    i.wrapping_mul(2_654_435_761) >> 12 & 1023
}

/// A few very frequent tokens among others.
fn skewed(i: u32) -> u32 {
    if i.is_multiple_of(3) { 7 } else { spread(i) % 50 }
}

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
        for Case { rows, width, vocabulary, first, tokens } in CASES {
            for gradients in gradient_types(dtype) {
                // The CPU rounds a 16-bit gradient at every row, so long sums are compared in f32 only.
                if gradients != DType::F32 && rows > 1000 {
                    continue;
                }
                let what = format!("embedding {rows}×{width} of {vocabulary}, gradients {gradients:?}");
                agree(&gpu, dtype, &what, |backend| {
                    let tokens = backend.tokens(&(0..rows as u32).map(tokens).collect::<Vec<_>>());
                    let (table, dout) =
                        (backend.input(vocabulary * width, 1), backend.input(rows * width, 2));
                    let out = backend.output(rows * width);
                    let (tokens, dout) = (tokens.view(), dout.view());
                    let (table, written) = (table.view(), out.view());
                    backend.device.embedding(Embedding { tokens, table, first, out: written, rows, width });
                    let [fresh, added] = [(); 2].map(|()| backend.blank(vocabulary * width, gradients));
                    for (dtable, accumulate) in [(&fresh, false), (&added, true)] {
                        let dtable = gradient(dtable, accumulate);
                        backend.device.embedding_backward(EmbeddingBackward {
                            tokens,
                            dout,
                            first,
                            dtable,
                            rows,
                            width,
                        });
                    }
                    vec![out, fresh, added]
                });
            }
        }
    }
}

#[test]
fn positions_and_their_backward() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for (rows, width, sequence, first_row) in [(1, 1, 1, 0), (40, 9, 16, 5), (300, 768, 100, 0)] {
            let positions = sequence + 3;
            for gradients in gradient_types(dtype) {
                agree(&gpu, dtype, &format!("positions {rows}×{width} of {sequence}"), |backend| {
                    let (x, table) = (backend.input(rows * width, 1), backend.input(positions * width, 2));
                    let dx = backend.input(rows * width, 3);
                    backend.device.positions(Positions {
                        x: x.view(),
                        table: table.view(),
                        first_row,
                        sequence,
                        rows,
                        width,
                    });
                    let [fresh, added] = [(); 2].map(|()| backend.blank(positions * width, gradients));
                    for (dtable, accumulate) in [(&fresh, false), (&added, true)] {
                        let (dx, dtable) = (dx.view(), gradient(dtable, accumulate));
                        backend.device.positions_backward(PositionsBackward {
                            dx,
                            dtable,
                            first_row,
                            sequence,
                            rows,
                            width,
                        });
                    }
                    vec![x, fresh, added]
                });
            }
        }
    }
}
