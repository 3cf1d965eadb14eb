//! Linear layers.

use kintsugi_gpu::GpuBackend;
use kintsugi_tensor::ops::{Linear, LinearBackwardInput, LinearBackwardWeight};
use kintsugi_tensor::{Buffer, DType};

use crate::test_backend::{
    COMPUTE, TestBackend, agree, any_gpu, close, gpu, gradient, gradient_types, tuning_gpu,
};

/// Rows, inputs, outputs: sizes that suit every library, and odd ones.
const SMALL_SHAPES: [(usize, usize, usize); 2] = [(7, 5, 3), (30, 88, 136)];
const SHAPES: [(usize, usize, usize); 5] =
    [(1, 64, 64), (7, 5, 3), (300, 88, 136), (128, 768, 256), (256, 256, 1024)];

fn linear(
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
fn ending(backend: &TestBackend, (rows, inputs, outputs): (usize, usize, usize), bias: bool) -> Vec<Buffer> {
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
fn gradients(
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
fn past_gelu(
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

/// An operation that is run on both backends.
type Operation<'a> = dyn Fn(&TestBackend) -> Vec<Buffer> + 'a;

#[test]
fn products_add_the_residual_stream() {
    let Some(gpu) = gpu() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES {
            for bias in [false, true] {
                agree(&gpu, dtype, &format!("ending {shape:?}, bias {bias}"), |backend| {
                    ending(backend, shape, bias)
                });
            }
        }
    }
}

/// The first repeatable call tries all candidates, and the result must not show it, least of all in accumulated sums.
/// In fp32 the last shape is large enough for candidates to run back to back.
#[test]
fn tuned_products_give_the_same_result() {
    let Some(gpu) = tuning_gpu() else { return };
    for dtype in [DType::BF16, DType::F32] {
        for shape in [(300, 88, 136), (256, 256, 1024), (2048, 1024, 1024)] {
            let results: [(&str, &Operation); 6] = [
                ("linear", &|backend| linear(backend, shape, true, true)),
                ("ending", &|backend| ending(backend, shape, true)),
                ("added gradient", &|backend| gradients(backend, shape, DType::F32, true, [true, false])),
                ("gradient", &|backend| gradients(backend, shape, DType::F32, true, [false, true])),
                ("added gradient past GELU", &|backend| past_gelu(backend, shape, dtype, [true, false])),
                ("gradient past GELU", &|backend| past_gelu(backend, shape, dtype, [false, true])),
            ];
            for (what, body) in results {
                close(&gpu, dtype, what, 2, body);
            }
        }
    }
}

#[test]
fn linear_layers_with_bias_and_gelu() {
    if let Some(gpu) = gpu() {
        linear_layers(&gpu, &SHAPES);
    }
}

#[test]
fn small_products_with_and_without_epilogues() {
    if let Some(gpu) = any_gpu() {
        linear_layers(&gpu, &SMALL_SHAPES);
        layer_gradients(&gpu, &SMALL_SHAPES);
    }
}

fn linear_layers(gpu: &GpuBackend, shapes: &[(usize, usize, usize)]) {
    for dtype in COMPUTE {
        for &shape in shapes {
            for (bias, gelu) in [(false, false), (true, false), (false, true), (true, true)] {
                let what = format!("linear {shape:?}, bias {bias}, GELU {gelu}");
                agree(gpu, dtype, &what, |backend| linear(backend, shape, bias, gelu));
            }
        }
    }
}

#[test]
fn gradients_of_linear_layers_are_written_or_added() {
    if let Some(gpu) = gpu() {
        layer_gradients(&gpu, &SHAPES);
    }
}

fn layer_gradients(gpu: &GpuBackend, shapes: &[(usize, usize, usize)]) {
    for dtype in COMPUTE {
        for &shape in shapes {
            for kept in gradient_types(dtype) {
                for biased in [false, true] {
                    let what = format!("gradient {shape:?} in {kept:?}, bias {biased}");
                    agree(gpu, dtype, &what, |backend| {
                        gradients(backend, shape, kept, biased, [false, true])
                    });
                }
            }
        }
    }
}
