//! Linear layers.

use kintsugi_tensor::ops::{Linear, LinearBackwardInput, LinearBackwardWeight};
use kintsugi_tensor::{Buffer, DType};

use crate::lab::{COMPUTE, Lab, agree, card, close, gradient, gradient_types, tuning_card};

/// Rows, inputs, outputs: some that every library likes, some that none does.
const SHAPES: [(usize, usize, usize); 5] =
    [(1, 64, 64), (7, 5, 3), (300, 88, 136), (128, 768, 256), (256, 256, 1024)];

fn linear(lab: &Lab, (rows, inputs, outputs): (usize, usize, usize), bias: bool, gelu: bool) -> Vec<Buffer> {
    let (x, weight) = (lab.input(rows * inputs, 1), lab.input(outputs * inputs, 2));
    let (biases, dy) = (lab.input(outputs, 3), lab.input(rows * outputs, 4));
    let [kept, out] = [(); 2].map(|()| lab.output(rows * outputs));
    lab.backend.linear(Linear {
        x: x.view(),
        weight: weight.view(),
        bias: bias.then_some(biases.view()),
        gelu: gelu.then_some(kept.view()),
        residual: None,
        out: out.view(),
        rows,
        inputs,
        outputs,
    });
    let (before, dx) = (lab.input(rows * inputs, 5), lab.output(rows * inputs));
    let dbias = lab.output(inputs);
    lab.backend.linear_backward_input(LinearBackwardInput {
        dy: dy.view(),
        weight: weight.view(),
        gelu: gelu.then_some(before.view()),
        dx: dx.view(),
        dbias: bias.then_some(gradient(&dbias, false)),
        rows,
        inputs,
        outputs,
    });
    vec![kept, out, dx, dbias]
}

/// The last product of a branch, which ends in the stream.
fn ending(lab: &Lab, (rows, inputs, outputs): (usize, usize, usize), bias: bool) -> Vec<Buffer> {
    let (x, weight) = (lab.input(rows * inputs, 1), lab.input(outputs * inputs, 2));
    let (biases, stream) = (lab.input(outputs, 3), lab.input(rows * outputs, 4));
    let out = lab.output(rows * outputs);
    lab.backend.linear(Linear {
        x: x.view(),
        weight: weight.view(),
        bias: bias.then_some(biases.view()),
        gelu: None,
        residual: Some(stream.view()),
        out: out.view(),
        rows,
        inputs,
        outputs,
    });
    vec![out]
}

/// Gradients of a layer, written or added to what is there, in this order.
fn gradients(
    lab: &Lab,
    (rows, inputs, outputs): (usize, usize, usize),
    dtype: DType,
    biased: bool,
    order: [bool; 2],
) -> Vec<Buffer> {
    let (x, dy) = (lab.input(rows * inputs, 1), lab.input(rows * outputs, 2));
    let mut written = Vec::new();
    for accumulate in order {
        let (dweight, dbias) = (lab.blank(outputs * inputs, dtype), lab.blank(outputs, dtype));
        lab.backend.linear_backward_weight(LinearBackwardWeight {
            dy: dy.view(),
            x: x.view(),
            dweight: gradient(&dweight, accumulate),
            dbias: biased.then_some(gradient(&dbias, accumulate)),
            rows,
            inputs,
            outputs,
        });
        written.extend([dweight, dbias]);
    }
    written
}

/// Gradients past GELU, with that of the bias before it written or added to what is there, in this order.
fn past_gelu(
    lab: &Lab,
    (rows, inputs, outputs): (usize, usize, usize),
    dtype: DType,
    order: [bool; 2],
) -> Vec<Buffer> {
    let (weight, dy) = (lab.input(outputs * inputs, 1), lab.input(rows * outputs, 2));
    let before = lab.input(rows * inputs, 3);
    let mut written = Vec::new();
    for accumulate in order {
        let (dx, dbias) = (lab.output(rows * inputs), lab.blank(inputs, dtype));
        lab.backend.linear_backward_input(LinearBackwardInput {
            dy: dy.view(),
            weight: weight.view(),
            gelu: Some(before.view()),
            dx: dx.view(),
            dbias: Some(gradient(&dbias, accumulate)),
            rows,
            inputs,
            outputs,
        });
        written.extend([dx, dbias]);
    }
    written
}

/// What is run on both backends.
type Operation<'a> = dyn Fn(&Lab) -> Vec<Buffer> + 'a;

#[test]
fn branches_end_in_the_stream() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES {
            for bias in [false, true] {
                agree(&card, dtype, &format!("ending {shape:?}, bias {bias}"), |lab| {
                    ending(lab, shape, bias)
                });
            }
        }
    }
}

/// The first call that can be repeated tries all candidates; nothing of that is seen, least of all in sums. In fp32 the
/// last shape is large enough for candidates to run back to back.
#[test]
fn products_that_are_tried_out_give_their_result() {
    let Some(card) = tuning_card() else { return };
    for dtype in [DType::BF16, DType::F32] {
        for shape in [(300, 88, 136), (256, 256, 1024), (2048, 1024, 1024)] {
            let results: [(&str, &Operation); 6] = [
                ("linear", &|lab| linear(lab, shape, true, true)),
                ("ending", &|lab| ending(lab, shape, true)),
                ("added gradient", &|lab| gradients(lab, shape, DType::F32, true, [true, false])),
                ("gradient", &|lab| gradients(lab, shape, DType::F32, true, [false, true])),
                ("added gradient past GELU", &|lab| past_gelu(lab, shape, dtype, [true, false])),
                ("gradient past GELU", &|lab| past_gelu(lab, shape, dtype, [false, true])),
            ];
            for (what, body) in results {
                close(&card, dtype, what, 2, body);
            }
        }
    }
}

#[test]
fn linear_layers_with_bias_and_gelu() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES {
            for (bias, gelu) in [(false, false), (true, false), (false, true), (true, true)] {
                let what = format!("linear {shape:?}, bias {bias}, GELU {gelu}");
                agree(&card, dtype, &what, |lab| linear(lab, shape, bias, gelu));
            }
        }
    }
}

#[test]
fn gradients_of_linear_layers_are_written_or_added() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for shape in SHAPES {
            for kept in gradient_types(dtype) {
                for biased in [false, true] {
                    let what = format!("gradient {shape:?} in {kept:?}, bias {biased}");
                    agree(&card, dtype, &what, |lab| gradients(lab, shape, kept, biased, [false, true]));
                }
            }
        }
    }
}
