//! Fills, copies, copies of columns, additions, activations, and sums over rows.

use kintsugi_tensor::ops::{ColumnSum, Columns, CopyColumns, GateFunction, Gated, GatedBackward, Residual};
use kintsugi_tensor::{Buffer, DType, View};

use crate::test_backend::{TestBackend, gradient, random};

/// A fill, a copy and an addition from one type to another.
pub fn fill_copy_add(backend: &TestBackend, len: usize, [from, to]: [DType; 2]) -> Vec<Buffer> {
    let source = backend.numbers(&random(len, 1), from);
    let [filled, copied, added] = [(); 3].map(|()| backend.blank(len, to));
    backend.device.fill(0.3, filled.view());
    backend.device.copy(source.view(), copied.view());
    backend.device.add(source.view(), added.view());
    vec![filled, copied, added]
}

/// Views that begin at odd elements.
pub fn unaligned(backend: &TestBackend) -> Vec<Buffer> {
    let (source, to) = (backend.input(1001, 1), backend.output(1003));
    backend.device.copy(source.slice(1..1001), to.slice(3..1003));
    backend.device.fill(2.0, to.slice(1..2));
    backend.device.gelu(source.slice(1..33), to.slice(5..37));
    vec![to]
}

/// Columns of a wider matrix, to the front of another. Shapes are rows, columns, and the first column.
pub fn copy_columns(backend: &TestBackend, [rows, columns, first]: [usize; 3]) -> Vec<Buffer> {
    let [from, to] = [1, 2].map(|seed| backend.input(rows * (first + columns), seed));
    let width = first + columns;
    backend.device.copy_columns(CopyColumns {
        from: Columns { view: from.view(), width, first },
        to: Columns { view: to.view(), width, first: 0 },
        rows,
        columns,
    });
    vec![to]
}

/// GELU in its tanh form, also far from zero.
pub fn gelu(backend: &TestBackend, len: usize) -> Vec<Buffer> {
    let (source, to) = (backend.input(len, 2), backend.output(len));
    backend.device.gelu(source.view(), to.view());
    let far = backend.numbers(&[-90.0, -9.0, 0.0, 9.0, 90.0], backend.dtype);
    let ends = backend.output(5);
    backend.device.gelu(far.view(), ends.view());
    vec![to, ends]
}

/// GELU by the error function, and its backward.
pub fn exact_gelu(backend: &TestBackend, len: usize) -> Vec<Buffer> {
    let (source, to, d) = (backend.input(len, 2), backend.output(len), backend.input(len, 3));
    backend.device.exact_gelu(source.view(), to.view());
    backend.device.exact_gelu_backward(source.view(), d.view());
    vec![to, d]
}

/// A gated unit, and its backward, also in place.
pub fn gated(backend: &TestBackend, [rows, width]: [usize; 2], gate: GateFunction) -> Vec<Buffer> {
    let (x, dout) = (backend.input(2 * rows * width, 3), backend.input(rows * width, 4));
    let (out, dx) = (backend.output(rows * width), backend.output(2 * rows * width));
    backend.device.gated(Gated { x: x.view(), out: out.view(), gate, rows, width });
    for dx in [dx.view(), x.view()] {
        let (dout, x) = (dout.view(), x.view());
        backend.device.gated_backward(GatedBackward { dout, x, dx, gate, rows, width });
    }
    vec![out, dx, x]
}

/// A residual sum of so many addends and biases, also in place.
pub fn residual(
    backend: &TestBackend,
    [rows, width]: [usize; 2],
    [addends, biases]: [usize; 2],
) -> Vec<Buffer> {
    let (x, out) = (backend.input(rows * width, 1), backend.output(rows * width));
    let added: Vec<_> = (0..addends).map(|i| backend.input(rows * width, 10 + i as u64)).collect();
    let biased: Vec<_> = (0..biases).map(|i| backend.input(width, 20 + i as u64)).collect();
    let addends: Vec<View> = added.iter().map(View::from).collect();
    let biases: Vec<View> = biased.iter().map(View::from).collect();
    for out in [out.view(), x.view()] {
        let (x, addends, biases) = (x.view(), &addends[..], &biases[..]);
        backend.device.residual(Residual { x, addends, biases, out, rows, width });
    }
    vec![out, x]
}

/// Sums over rows, written and added to sums of type `to`.
pub fn column_sum(backend: &TestBackend, [rows, width]: [usize; 2], to: DType) -> Vec<Buffer> {
    let (x, sums) = (backend.input(rows * width, 5), backend.blank(width, to));
    let added = backend.blank(width, to);
    for (out, accumulate) in [(&sums, false), (&added, true)] {
        let out = gradient(out, accumulate);
        backend.device.column_sum(ColumnSum { x: x.view(), out, rows, width });
    }
    vec![sums, added]
}

/// Sums of squares, of which one is not finite.
pub fn sum_of_squares(backend: &TestBackend, len: usize) -> Vec<Buffer> {
    let (x, sum) = (backend.input(len, 6), backend.numbers(&[0.5], DType::F32));
    backend.device.sum_of_squares(x.view(), sum.view());
    let mut values = random(len, 7);
    values[len / 2] = f32::INFINITY;
    let (x, infinite) = (backend.numbers(&values, backend.dtype), backend.numbers(&[0.5], DType::F32));
    backend.device.sum_of_squares(x.view(), infinite.view());
    vec![sum, infinite]
}
