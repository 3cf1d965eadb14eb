//! Fills, copies, copies of columns, additions, activations, and sums over rows.

use kintsugi_conformance::elementwise::{
    column_sum, copy_columns, exact_gelu, fill_copy_add, gated, gelu, residual, sum_of_squares, unaligned,
};
use kintsugi_conformance::{COMPUTE, gradient_types};
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::GateFunction;

use crate::test_backend::{agree, any_gpu};

const LENGTHS: [usize; 5] = [1, 7, 256, 4099, 300_000];

#[test]
fn fill_copy_and_add_convert_between_all_types() {
    let Some(gpu) = any_gpu() else { return };
    for from in COMPUTE {
        for to in COMPUTE {
            let coarser = if from == DType::F32 { to } else { from };
            for len in LENGTHS {
                agree(&gpu, coarser, &format!("{len} elements to {to:?}"), |backend| {
                    fill_copy_add(backend, len, [from, to])
                });
            }
        }
    }
}

#[test]
fn unaligned_views_are_processed_element_by_element() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        agree(&gpu, dtype, "from the second element", unaligned);
    }
}

#[test]
fn columns_are_copied_beside_others() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for shape in [[70, 128, 64], [33, 6, 5]] {
            agree(&gpu, dtype, &format!("columns {shape:?}"), |backend| copy_columns(backend, shape));
        }
    }
}

#[test]
fn gelu_near_zero_and_far() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for len in LENGTHS {
            agree(&gpu, dtype, &format!("GELU of {len}"), |backend| gelu(backend, len));
        }
    }
}

#[test]
fn exact_gelu_and_its_backward() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for len in LENGTHS {
            agree(&gpu, dtype, &format!("exact GELU of {len}"), |backend| exact_gelu(backend, len));
        }
    }
}

#[test]
fn gated_units_and_their_backward_also_in_place() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        let sizes = [[1, 1], [3, 9], [17, 64], [33, 2816]];
        let units = [GateFunction::Silu, GateFunction::Gelu];
        for (size, gate) in sizes.into_iter().flat_map(|size| units.map(|gate| (size, gate))) {
            agree(&gpu, dtype, &format!("{} {size:?}", gate.unit()), |backend| gated(backend, size, gate));
        }
    }
}

#[test]
fn residual_sums_take_any_addends_and_biases() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for shape in [[3, 5], [17, 64], [65, 768]] {
            for added in [[1, 0], [0, 1], [2, 1], [4, 4]] {
                let what = format!("addends and biases {added:?}, {shape:?}");
                agree(&gpu, dtype, &what, |backend| residual(backend, shape, added));
            }
        }
    }
}

#[test]
fn column_sums_are_written_or_added() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for shape in [[1, 1], [7, 5], [65, 100], [300, 768], [5000, 264]] {
            for to in gradient_types(dtype) {
                agree(&gpu, dtype, &format!("column sum {shape:?} to {to:?}"), |backend| {
                    column_sum(backend, shape, to)
                });
            }
        }
    }
}

#[test]
fn sums_of_squares_add_up_and_show_what_is_not_finite() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for len in LENGTHS {
            agree(&gpu, dtype, &format!("sum of {len} squares"), |backend| sum_of_squares(backend, len));
        }
    }
}
