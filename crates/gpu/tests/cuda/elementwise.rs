//! Fills, copies, copies of columns, additions, activations, and sums over rows.

use kintsugi_tensor::ops::{ColumnSum, Columns, CopyColumns, Residual, Swiglu, SwigluBackward};
use kintsugi_tensor::{DType, View};

use crate::test_backend::{COMPUTE, agree, any_gpu, gradient, gradient_types};

const LENGTHS: [usize; 5] = [1, 7, 256, 4099, 300_000];

#[test]
fn fill_copy_and_add_convert_between_all_types() {
    let Some(gpu) = any_gpu() else { return };
    for from in COMPUTE {
        for to in COMPUTE {
            let coarser = if from == DType::F32 { to } else { from };
            for len in LENGTHS {
                agree(&gpu, coarser, &format!("{len} elements to {to:?}"), |backend| {
                    let source = backend.numbers(&crate::test_backend::random(len, 1), from);
                    let [filled, copied, added] = [(); 3].map(|()| backend.blank(len, to));
                    backend.device.fill(0.3, filled.view());
                    backend.device.copy(source.view(), copied.view());
                    backend.device.add(source.view(), added.view());
                    vec![filled, copied, added]
                });
            }
        }
    }
}

#[test]
fn unaligned_views_are_processed_element_by_element() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        agree(&gpu, dtype, "from the second element", |backend| {
            let (source, to) = (backend.input(1001, 1), backend.output(1003));
            backend.device.copy(source.slice(1..1001), to.slice(3..1003));
            backend.device.fill(2.0, to.slice(1..2));
            backend.device.gelu(source.slice(1..33), to.slice(5..37));
            vec![to]
        });
    }
}

#[test]
fn columns_are_copied_beside_others() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for (rows, columns, first) in [(70, 128, 64), (33, 6, 5)] {
            agree(&gpu, dtype, &format!("{rows} rows of {columns} columns"), |backend| {
                let [from, to] = [1, 2].map(|seed| backend.input(rows * (first + columns), seed));
                let width = first + columns;
                backend.device.copy_columns(CopyColumns {
                    from: Columns { view: from.view(), width, first },
                    to: Columns { view: to.view(), width, first: 0 },
                    rows,
                    columns,
                });
                vec![to]
            });
        }
    }
}

#[test]
fn gelu() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for len in LENGTHS {
            agree(&gpu, dtype, &format!("GELU of {len}"), |backend| {
                let (source, to) = (backend.input(len, 2), backend.output(len));
                backend.device.gelu(source.view(), to.view());
                let far = backend.numbers(&[-90.0, -9.0, 0.0, 9.0, 90.0], backend.dtype);
                let ends = backend.output(5);
                backend.device.gelu(far.view(), ends.view());
                vec![to, ends]
            });
        }
    }
}

#[test]
fn exact_gelu_and_its_backward() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for len in LENGTHS {
            agree(&gpu, dtype, &format!("exact GELU of {len}"), |backend| {
                let (source, to, d) = (backend.input(len, 2), backend.output(len), backend.input(len, 3));
                backend.device.exact_gelu(source.view(), to.view());
                backend.device.exact_gelu_backward(source.view(), d.view());
                vec![to, d]
            });
        }
    }
}

#[test]
fn swiglu_and_its_backward_also_in_place() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for (rows, width) in [(1, 1), (3, 9), (17, 64), (33, 2816)] {
            agree(&gpu, dtype, &format!("SwiGLU {rows}×{width}"), |backend| {
                let (x, dout) = (backend.input(2 * rows * width, 3), backend.input(rows * width, 4));
                let (out, dx) = (backend.output(rows * width), backend.output(2 * rows * width));
                backend.device.swiglu(Swiglu { x: x.view(), out: out.view(), rows, width });
                for dx in [dx.view(), x.view()] {
                    let (dout, x) = (dout.view(), x.view());
                    backend.device.swiglu_backward(SwigluBackward { dout, x, dx, rows, width });
                }
                vec![out, dx, x]
            });
        }
    }
}

#[test]
fn residual_sums_take_any_addends_and_biases() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for (rows, width) in [(3, 5), (17, 64), (65, 768)] {
            for (addends, biases) in [(1, 0), (0, 1), (2, 1), (4, 4)] {
                let what = format!("{addends} addends and {biases} biases, {rows}×{width}");
                agree(&gpu, dtype, &what, |backend| {
                    let (x, out) = (backend.input(rows * width, 1), backend.output(rows * width));
                    let added: Vec<_> =
                        (0..addends).map(|i| backend.input(rows * width, 10 + i as u64)).collect();
                    let biased: Vec<_> = (0..biases).map(|i| backend.input(width, 20 + i as u64)).collect();
                    let addends: Vec<View> = added.iter().map(View::from).collect();
                    let biases: Vec<View> = biased.iter().map(View::from).collect();
                    for out in [out.view(), x.view()] {
                        let (x, addends, biases) = (x.view(), &addends[..], &biases[..]);
                        backend.device.residual(Residual { x, addends, biases, out, rows, width });
                    }
                    vec![out, x]
                });
            }
        }
    }
}

#[test]
fn column_sums_are_written_or_added() {
    let Some(gpu) = any_gpu() else { return };
    for dtype in COMPUTE {
        for (rows, width) in [(1, 1), (7, 5), (65, 100), (300, 768), (5000, 264)] {
            for to in gradient_types(dtype) {
                agree(&gpu, dtype, &format!("column sum {rows}×{width} to {to:?}"), |backend| {
                    let (x, sums) = (backend.input(rows * width, 5), backend.blank(width, to));
                    let added = backend.blank(width, to);
                    for (out, accumulate) in [(&sums, false), (&added, true)] {
                        let out = gradient(out, accumulate);
                        backend.device.column_sum(ColumnSum { x: x.view(), out, rows, width });
                    }
                    vec![sums, added]
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
            agree(&gpu, dtype, &format!("sum of {len} squares"), |backend| {
                let (x, sum) = (backend.input(len, 6), backend.numbers(&[0.5], DType::F32));
                backend.device.sum_of_squares(x.view(), sum.view());
                let mut values = crate::test_backend::random(len, 7);
                values[len / 2] = f32::INFINITY;
                let (x, infinite) =
                    (backend.numbers(&values, backend.dtype), backend.numbers(&[0.5], DType::F32));
                backend.device.sum_of_squares(x.view(), infinite.view());
                vec![sum, infinite]
            });
        }
    }
}
