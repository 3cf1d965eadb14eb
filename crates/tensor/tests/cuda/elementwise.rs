//! Fills, copies, additions, activations, and sums over rows.

use kintsugi_tensor::ops::{ColumnSum, Residual, Swiglu, SwigluBackward};
use kintsugi_tensor::{DType, View};

use crate::lab::{COMPUTE, agree, card, gradient, gradient_types};

const LENGTHS: [usize; 5] = [1, 7, 256, 4099, 300_000];

#[test]
fn fill_copy_and_add_convert_between_all_types() {
    let Some(card) = card() else { return };
    for from in COMPUTE {
        for to in COMPUTE {
            let coarser = if from == DType::F32 { to } else { from };
            for len in LENGTHS {
                agree(&card, coarser, &format!("{len} elements to {to:?}"), |lab| {
                    let source = lab.numbers(&crate::lab::random(len, 1), from);
                    let [filled, copied, added] = [(); 3].map(|()| lab.blank(len, to));
                    lab.backend.fill(0.3, filled.view());
                    lab.backend.copy(source.view(), copied.view());
                    lab.backend.add(source.view(), added.view());
                    vec![filled, copied, added]
                });
            }
        }
    }
}

#[test]
fn views_that_are_not_aligned_are_taken_singly() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        agree(&card, dtype, "from the second element", |lab| {
            let (source, to) = (lab.input(1001, 1), lab.output(1003));
            lab.backend.copy(source.slice(1..1001), to.slice(3..1003));
            lab.backend.fill(2.0, to.slice(1..2));
            lab.backend.gelu(source.slice(1..33), to.slice(5..37));
            vec![to]
        });
    }
}

#[test]
fn gelu() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for len in LENGTHS {
            agree(&card, dtype, &format!("GELU of {len}"), |lab| {
                let (source, to) = (lab.input(len, 2), lab.output(len));
                lab.backend.gelu(source.view(), to.view());
                let far = lab.numbers(&[-90.0, -9.0, 0.0, 9.0, 90.0], lab.dtype);
                let ends = lab.output(5);
                lab.backend.gelu(far.view(), ends.view());
                vec![to, ends]
            });
        }
    }
}

#[test]
fn exact_gelu_and_its_backward() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for len in LENGTHS {
            agree(&card, dtype, &format!("exact GELU of {len}"), |lab| {
                let (source, to, d) = (lab.input(len, 2), lab.output(len), lab.input(len, 3));
                lab.backend.exact_gelu(source.view(), to.view());
                lab.backend.exact_gelu_backward(source.view(), d.view());
                vec![to, d]
            });
        }
    }
}

#[test]
fn swiglu_and_its_backward_also_in_place() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for (rows, width) in [(1, 1), (3, 9), (17, 64), (33, 2816)] {
            agree(&card, dtype, &format!("SwiGLU {rows}×{width}"), |lab| {
                let (x, dout) = (lab.input(2 * rows * width, 3), lab.input(rows * width, 4));
                let (out, dx) = (lab.output(rows * width), lab.output(2 * rows * width));
                lab.backend.swiglu(Swiglu { x: x.view(), out: out.view(), rows, width });
                for dx in [dx.view(), x.view()] {
                    let (dout, x) = (dout.view(), x.view());
                    lab.backend.swiglu_backward(SwigluBackward { dout, x, dx, rows, width });
                }
                vec![out, dx, x]
            });
        }
    }
}

#[test]
fn residual_branches_end_with_any_addends_and_biases() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for (rows, width) in [(3, 5), (17, 64), (65, 768)] {
            for (addends, biases) in [(1, 0), (0, 1), (2, 1), (4, 4)] {
                let what = format!("{addends} addends and {biases} biases, {rows}×{width}");
                agree(&card, dtype, &what, |lab| {
                    let (x, out) = (lab.input(rows * width, 1), lab.output(rows * width));
                    let added: Vec<_> =
                        (0..addends).map(|i| lab.input(rows * width, 10 + i as u64)).collect();
                    let biased: Vec<_> = (0..biases).map(|i| lab.input(width, 20 + i as u64)).collect();
                    let addends: Vec<View> = added.iter().map(View::from).collect();
                    let biases: Vec<View> = biased.iter().map(View::from).collect();
                    for out in [out.view(), x.view()] {
                        let (x, addends, biases) = (x.view(), &addends[..], &biases[..]);
                        lab.backend.residual(Residual { x, addends, biases, out, rows, width });
                    }
                    vec![out, x]
                });
            }
        }
    }
}

#[test]
fn column_sums_are_written_or_added() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for (rows, width) in [(1, 1), (7, 5), (65, 100), (300, 768), (5000, 264)] {
            for to in gradient_types(dtype) {
                agree(&card, dtype, &format!("column sum {rows}×{width} to {to:?}"), |lab| {
                    let (x, sums) = (lab.input(rows * width, 5), lab.blank(width, to));
                    let added = lab.blank(width, to);
                    for (out, accumulate) in [(&sums, false), (&added, true)] {
                        let out = gradient(out, accumulate);
                        lab.backend.column_sum(ColumnSum { x: x.view(), out, rows, width });
                    }
                    vec![sums, added]
                });
            }
        }
    }
}

#[test]
fn sums_of_squares_add_up_and_show_what_is_not_finite() {
    let Some(card) = card() else { return };
    for dtype in COMPUTE {
        for len in LENGTHS {
            agree(&card, dtype, &format!("sum of {len} squares"), |lab| {
                let (x, sum) = (lab.input(len, 6), lab.numbers(&[0.5], DType::F32));
                lab.backend.sum_of_squares(x.view(), sum.view());
                let mut values = crate::lab::random(len, 7);
                values[len / 2] = f32::INFINITY;
                let (x, infinite) = (lab.numbers(&values, lab.dtype), lab.numbers(&[0.5], DType::F32));
                lab.backend.sum_of_squares(x.view(), infinite.view());
                vec![sum, infinite]
            });
        }
    }
}
