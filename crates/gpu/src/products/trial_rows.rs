//! Smaller versions of products with many rows, on which candidates are tried. The order of the candidates is the same there,
//! and a trial takes less time.

use kintsugi_tensor::View;
use kintsugi_tensor::ops::{Linear, LinearBackwardInput, LinearBackwardWeight};

/// Rows of a trial. Even a narrow product of as many rows has several tiles for every multiprocessor of a GPU.
const ROWS: usize = 32_768;

/// Products that have rows.
pub trait TrialRows: Sized {
    /// The product of the first [`ROWS`] rows; `None` if there are not more. It reads and writes a part of the memory of the
    /// whole product.
    fn trial(&self) -> Option<Self>;
}

/// The first [`ROWS`] of some rows.
fn first(view: View, rows: usize) -> View {
    view.slice(0..view.len() / rows * ROWS)
}

impl TrialRows for Linear<'_> {
    fn trial(&self) -> Option<Self> {
        let first = |view| first(view, self.rows);
        (self.rows > ROWS).then(|| Linear {
            x: first(self.x),
            gelu: self.gelu.map(first),
            residual: self.residual.map(first),
            out: first(self.out),
            rows: ROWS,
            ..*self
        })
    }
}

impl TrialRows for LinearBackwardInput<'_> {
    fn trial(&self) -> Option<Self> {
        let first = |view| first(view, self.rows);
        (self.rows > ROWS).then(|| LinearBackwardInput {
            dy: first(self.dy),
            gelu: self.gelu.map(first),
            dx: first(self.dx),
            rows: ROWS,
            ..*self
        })
    }
}

impl TrialRows for LinearBackwardWeight<'_> {
    fn trial(&self) -> Option<Self> {
        let first = |view| first(view, self.rows);
        (self.rows > ROWS).then(|| LinearBackwardWeight {
            dy: first(self.dy),
            x: first(self.x),
            dbias: None,
            rows: ROWS,
            ..*self
        })
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use kintsugi_tensor::cpu::CpuBackend;
    use kintsugi_tensor::cpu::memory::Heap;
    use kintsugi_tensor::ops::{Check, Gradient};
    use kintsugi_tensor::{Backend, Category, DType};

    #[test]
    fn many_rows_are_tried_on_the_first_ones() {
        let backend = CpuBackend::new(Rc::new(Heap::default()), 1);
        let (inputs, outputs) = (3, 2);
        for rows in [ROWS, ROWS + 5] {
            let buffer = |len| backend.allocate(len, DType::F32, Category::Activations);
            let (x, out, pre_activation) =
                (buffer(rows * inputs), buffer(rows * outputs), buffer(rows * outputs));
            let (weight, dweight) = (buffer(inputs * outputs), buffer(inputs * outputs));
            let (x, weight, out, gelu) = (x.view(), weight.view(), out.view(), Some(pre_activation.view()));
            let forward = Linear {
                x,
                weight,
                bias: None,
                gelu,
                residual: None,
                out,
                rows,
                inputs,
                outputs,
                float8: None,
            };
            let backward = LinearBackwardInput {
                dy: out,
                weight,
                gelu: None,
                dx: x,
                dbias: None,
                rows,
                inputs,
                outputs,
                float8: None,
            };
            let dweight = Gradient { view: dweight.view(), accumulate: false };
            let gradient = LinearBackwardWeight {
                dy: out,
                x,
                dweight,
                dbias: None,
                rows,
                inputs,
                outputs,
                float8: None,
            };
            let sizes = [
                forward.trial().map(|op| (op.check(), op.rows).1),
                backward.trial().map(|op| (op.check(), op.rows).1),
                gradient.trial().map(|op| (op.check(), op.rows).1),
            ];
            assert_eq!(sizes, [(rows > ROWS).then_some(ROWS); 3], "{rows} rows");
        }
    }
}
