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

/// Every call of a product on trial runs another candidate; 60 calls see them all and then the fastest.
#[test]
fn all_candidates_of_a_product_give_its_result() {
    let Some(card) = tuning_card() else { return };
    for dtype in [DType::BF16, DType::F32] {
        for shape in [(300, 88, 136), (256, 256, 1024)] {
            let results: [(&str, &Operation); 3] = [
                ("linear", &|lab| linear(lab, shape, true, true)),
                ("linear without bias", &|lab| linear(lab, shape, false, true)),
                ("ending", &|lab| ending(lab, shape, true)),
            ];
            for (what, body) in results {
                close(&card, dtype, what, 60, body);
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
        for (rows, inputs, outputs) in SHAPES {
            for gradients in gradient_types(dtype) {
                for biased in [false, true] {
                    let what = format!("gradient {rows}×{inputs}×{outputs} in {gradients:?}, bias {biased}");
                    agree(&card, dtype, &what, |lab| {
                        let (x, dy) = (lab.input(rows * inputs, 1), lab.input(rows * outputs, 2));
                        let mut written = Vec::new();
                        for accumulate in [false, true] {
                            let dweight = lab.blank(outputs * inputs, gradients);
                            let dbias = lab.blank(outputs, gradients);
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
                    });
                }
            }
        }
    }
}
