//! Token and position tables.

use kintsugi_tensor::ops::{Embedding, EmbeddingBackward, Positions, PositionsBackward};
use kintsugi_tensor::{Buffer, DType};

use crate::test_backend::{TestBackend, gradient};

/// A part of a vocabulary, and tokens inside and outside of it.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Tokens.
    pub rows: usize,
    /// Numbers of a vector.
    pub width: usize,
    /// Rows of the part.
    pub vocabulary: usize,
    /// The token of the first row.
    pub first: usize,
    /// The token at each place.
    pub tokens: fn(u32) -> u32,
}

/// Tokens that are all rare.
pub fn spread(i: u32) -> u32 {
    i.wrapping_mul(2_654_435_761) >> 12 & 1023
}

/// A few very frequent tokens among others.
pub fn skewed(i: u32) -> u32 {
    if i.is_multiple_of(3) { 7 } else { spread(i) % 50 }
}

/// Vectors of tokens, and the gradient of the table, written and added.
pub fn embedding(backend: &TestBackend, case: Case, gradients: DType) -> Vec<Buffer> {
    let Case { rows, width, vocabulary, first, tokens } = case;
    let tokens = backend.tokens(&(0..rows as u32).map(tokens).collect::<Vec<_>>());
    let (table, dout) = (backend.input(vocabulary * width, 1), backend.input(rows * width, 2));
    let out = backend.output(rows * width);
    let (tokens, dout) = (tokens.view(), dout.view());
    let (table, written) = (table.view(), out.view());
    backend.device.embedding(Embedding { tokens, table, first, out: written, rows, width });
    let [fresh, added] = [(); 2].map(|()| backend.blank(vocabulary * width, gradients));
    for (dtable, accumulate) in [(&fresh, false), (&added, true)] {
        let dtable = gradient(dtable, accumulate);
        backend.device.embedding_backward(EmbeddingBackward { tokens, dout, first, dtable, rows, width });
    }
    vec![out, fresh, added]
}

/// Adds vectors of positions, and the gradient of the table, written and added. Shapes are rows, width, the length of a sample and
/// the first row's place.
pub fn positions(
    backend: &TestBackend,
    [rows, width, sequence, first_row]: [usize; 4],
    gradients: DType,
) -> Vec<Buffer> {
    let positions = sequence + 3;
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
        backend.device.positions_backward(PositionsBackward { dx, dtable, first_row, sequence, rows, width });
    }
    vec![x, fresh, added]
}
