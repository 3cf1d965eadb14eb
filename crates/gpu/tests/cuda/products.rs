//! Linear layers.

use kintsugi_conformance::products::{ending, gradients, linear, past_gelu};
use kintsugi_conformance::{COMPUTE, TestBackend, gradient_types};
use kintsugi_gpu::GpuBackend;
use kintsugi_tensor::{Buffer, DType};

use crate::test_backend::{agree, any_gpu, close, gpu, tuning_gpu};

/// Rows, inputs, outputs: sizes that suit every library, and odd ones.
const SMALL_SHAPES: [(usize, usize, usize); 2] = [(7, 5, 3), (30, 88, 136)];
const SHAPES: [(usize, usize, usize); 5] =
    [(1, 64, 64), (7, 5, 3), (300, 88, 136), (128, 768, 256), (256, 256, 1024)];

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
