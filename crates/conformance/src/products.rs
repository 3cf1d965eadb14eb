//! Linear layers.

use kintsugi_tensor::ops::{Linear, LinearBackwardInput, LinearBackwardWeight};
use kintsugi_tensor::{Buffer, DType};

use crate::test_backend::{TestBackend, gradient};

/// A layer's output and the gradient of its input, with a bias and GELU or without. Shapes are rows, inputs and outputs.
pub fn linear(
    backend: &TestBackend,
    (rows, inputs, outputs): (usize, usize, usize),
    bias: bool,
    gelu: bool,
) -> Vec<Buffer> {
    let (x, weight) = (backend.input(rows * inputs, 1), backend.input(outputs * inputs, 2));
    let (biases, dy) = (backend.input(outputs, 3), backend.input(rows * outputs, 4));
    let [kept, out] = [(); 2].map(|()| backend.output(rows * outputs));
    backend.device.linear(Linear {
        x: x.view(),
        weight: weight.view(),
        bias: bias.then_some(biases.view()),
        gelu: gelu.then_some(kept.view()),
        residual: None,
        out: out.view(),
        rows,
        inputs,
        outputs,
        float8: None,
    });
    let (before, dx) = (backend.input(rows * inputs, 5), backend.output(rows * inputs));
    let dbias = backend.output(inputs);
    backend.device.linear_backward_input(LinearBackwardInput {
        dy: dy.view(),
        weight: weight.view(),
        gelu: gelu.then_some(before.view()),
        dx: dx.view(),
        dbias: bias.then_some(gradient(&dbias, false)),
        rows,
        inputs,
        outputs,
        float8: None,
    });
    vec![kept, out, dx, dbias]
}

/// The last product of a residual branch, added to the residual stream.
pub fn ending(
    backend: &TestBackend,
    (rows, inputs, outputs): (usize, usize, usize),
    bias: bool,
) -> Vec<Buffer> {
    let (x, weight) = (backend.input(rows * inputs, 1), backend.input(outputs * inputs, 2));
    let (biases, stream) = (backend.input(outputs, 3), backend.input(rows * outputs, 4));
    let out = backend.output(rows * outputs);
    backend.device.linear(Linear {
        x: x.view(),
        weight: weight.view(),
        bias: bias.then_some(biases.view()),
        gelu: None,
        residual: Some(stream.view()),
        out: out.view(),
        rows,
        inputs,
        outputs,
        float8: None,
    });
    vec![out]
}

/// Gradients of a layer, overwritten or accumulated, in this order.
pub fn gradients(
    backend: &TestBackend,
    (rows, inputs, outputs): (usize, usize, usize),
    dtype: DType,
    biased: bool,
    order: [bool; 2],
) -> Vec<Buffer> {
    let (x, dy) = (backend.input(rows * inputs, 1), backend.input(rows * outputs, 2));
    let mut written = Vec::new();
    for accumulate in order {
        let (dweight, dbias) = (backend.blank(outputs * inputs, dtype), backend.blank(outputs, dtype));
        backend.device.linear_backward_weight(LinearBackwardWeight {
            dy: dy.view(),
            x: x.view(),
            dweight: gradient(&dweight, accumulate),
            dbias: biased.then_some(gradient(&dbias, accumulate)),
            rows,
            inputs,
            outputs,
            float8: None,
        });
        written.extend([dweight, dbias]);
    }
    written
}

/// Gradients through GELU, with the gradient of the bias before it overwritten or accumulated, in this order.
pub fn past_gelu(
    backend: &TestBackend,
    (rows, inputs, outputs): (usize, usize, usize),
    dtype: DType,
    order: [bool; 2],
) -> Vec<Buffer> {
    let (weight, dy) = (backend.input(outputs * inputs, 1), backend.input(rows * outputs, 2));
    let before = backend.input(rows * inputs, 3);
    let mut written = Vec::new();
    for accumulate in order {
        let (dx, dbias) = (backend.output(rows * inputs), backend.blank(inputs, dtype));
        backend.device.linear_backward_input(LinearBackwardInput {
            dy: dy.view(),
            weight: weight.view(),
            gelu: Some(before.view()),
            dx: dx.view(),
            dbias: Some(gradient(&dbias, accumulate)),
            rows,
            inputs,
            outputs,
            float8: None,
        });
        written.extend([dx, dbias]);
    }
    written
}
