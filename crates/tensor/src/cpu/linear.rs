//! Linear layers: the three matrix products, with bias and GELU on the finished sums.

use super::access::{Access, Scatter};
use super::activation::{gelu, gelu_derivative};
use super::element::{Element, Real};
use super::elementwise::sum_rows;
use super::gemm::{NoEpilogue, Operand, Output, Product, gemm};
use super::lanes;
use super::parallel::{Rows, Threads};
use crate::ops::{Linear, LinearBackwardInput, LinearBackwardWeight};

/// With so few rows, packing the weights would take longer than using them once: dot products read them as they lie.
const FEW_ROWS: usize = 4;

/// See [`Linear`].
pub fn forward<T: Element>(threads: Threads, scratch: &mut [u8], op: &Linear) {
    if op.rows <= FEW_ROWS {
        return few_rows::<T>(threads, op);
    }
    let access = Access::new();
    let bias = op.bias.map(|bias| access.read::<T>(bias));
    let outputs = op.outputs;
    let kept = op.gelu.map(|kept| Scatter::new(access.write::<T>(kept)));
    let product = Product {
        m: op.rows,
        n: outputs,
        k: op.inputs,
        a: Operand::new(access.read::<T>(op.x), op.inputs),
        b: Operand::new(access.read::<T>(op.weight), op.inputs).transposed(),
        out: Output::new(access.write::<T>(op.out), outputs),
        accumulate: false,
    };
    let residual = op.residual.map(|residual| access.read::<T>(residual));
    if bias.is_none() && kept.is_none() && residual.is_none() {
        return gemm(product, &NoEpilogue, scratch, threads.0);
    }
    let epilogue = |row: usize, first: usize, sums: &mut [T::Accumulator]| {
        if let Some(bias) = bias {
            lanes::map_pairs(sums, &bias[first..], |sum, bias| sum + bias);
        }
        let start = row * outputs + first;
        if let Some(residual) = residual {
            lanes::map_pairs(sums, &residual[start..], |sum, residual| sum + residual);
        }
        if let Some(kept) = &kept {
            // SAFETY: the epilogue is called once for every element of `out`, and `kept` is laid out like it.
            activate(sums, unsafe { kept.part(start..start + sums.len()) });
        }
    };
    gemm(product, &epilogue, scratch, threads.0);
}

/// The same for at most [`FEW_ROWS`], as a generated token has them: threads share the columns.
fn few_rows<T: Element>(threads: Threads, op: &Linear) {
    const AT_ONCE: usize = 16;
    let access = Access::new();
    let (x, weight) = (access.read::<T>(op.x), access.read::<T>(op.weight));
    let bias = op.bias.map(|bias| access.read::<T>(bias));
    let (rows, inputs, outputs) = (op.rows, op.inputs, op.outputs);
    let residual = op.residual.map(|residual| access.read::<T>(residual));
    let kept = op.gelu.map(|kept| Scatter::new(access.write::<T>(kept)));
    let out = Scatter::new(access.write::<T>(op.out));
    threads.each(outputs, rows * inputs, Rows(weight, inputs), |columns, Rows(weight, _)| {
        for (first, weight) in columns.step_by(AT_ONCE).zip(weight.chunks(AT_ONCE * inputs)) {
            let count = weight.len() / inputs;
            let mut sums = [[T::Accumulator::ZERO; AT_ONCE]; FEW_ROWS];
            for (column, weight) in weight.chunks_exact(inputs).enumerate() {
                for (sums, x) in sums.iter_mut().zip(x.chunks_exact(inputs)) {
                    sums[column] = lanes::sum_pairs(x, weight, |x, weight| x.widen() * weight.widen());
                }
            }
            for (row, sums) in sums[..rows].iter_mut().enumerate() {
                let (sums, here) = (&mut sums[..count], row * outputs + first..row * outputs + first + count);
                if let Some(bias) = bias {
                    lanes::map_pairs(sums, &bias[first..], |sum, bias| sum + bias);
                }
                if let Some(residual) = residual {
                    lanes::map_pairs(sums, &residual[here.clone()], |sum, residual| sum + residual);
                }
                if let Some(kept) = &kept {
                    // SAFETY: threads have different columns.
                    activate(sums, unsafe { kept.part(here.clone()) });
                }
                // SAFETY: as above.
                for (to, &sum) in unsafe { out.part(here) }.iter_mut().zip(&*sums) {
                    *to = T::narrow(sum);
                }
            }
        }
    });
}

/// Keeps the sums, rounded, and makes them GELU of what was kept, which is what the backward will see.
fn activate<T: Element>(sums: &mut [T::Accumulator], kept: &mut [T]) {
    const AT_ONCE: usize = 16;
    let (sum_chunks, sum_rest) = sums.as_chunks_mut::<AT_ONCE>();
    let (kept_chunks, kept_rest) = kept.as_chunks_mut::<AT_ONCE>();
    for (sums, kept) in sum_chunks.iter_mut().zip(kept_chunks) {
        let rounded = sums.map(T::narrow);
        *sums = rounded.map(|x| gelu(x.widen()));
        *kept = rounded;
    }
    for (sum, kept) in sum_rest.iter_mut().zip(kept_rest) {
        *kept = T::narrow(*sum);
        *sum = gelu(kept.widen());
    }
}

/// See [`LinearBackwardInput`].
pub fn backward_input<T: Element>(threads: Threads, scratch: &mut [u8], op: &LinearBackwardInput) {
    let access = Access::new();
    let product = Product {
        m: op.rows,
        n: op.inputs,
        k: op.outputs,
        a: Operand::new(access.read::<T>(op.dy), op.outputs),
        b: Operand::new(access.read::<T>(op.weight), op.inputs),
        out: Output::new(access.write::<T>(op.dx), op.inputs),
        accumulate: false,
    };
    let inputs = op.inputs;
    let Some(kept) = op.gelu.map(|kept| access.read::<T>(kept)) else {
        return gemm(product, &NoEpilogue, scratch, threads.0);
    };
    let epilogue = |row: usize, first: usize, sums: &mut [T::Accumulator]| {
        lanes::map_pairs(sums, &kept[row * inputs + first..], |sum, kept| sum * gelu_derivative(kept));
    };
    gemm(product, &epilogue, scratch, threads.0);
}

/// See [`LinearBackwardWeight`].
pub fn backward_weight<T, G>(threads: Threads, scratch: &mut [u8], op: &LinearBackwardWeight)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    let access = Access::new();
    let dy = access.read::<T>(op.dy);
    let product = Product {
        m: op.outputs,
        n: op.inputs,
        k: op.rows,
        a: Operand::new(dy, op.outputs).transposed(),
        b: Operand::new(access.read::<T>(op.x), op.inputs),
        out: Output::new(access.write::<G>(op.dweight.view), op.inputs),
        accumulate: op.dweight.accumulate,
    };
    gemm(product, &NoEpilogue, scratch, threads.0);
    if let Some(dbias) = op.dbias {
        let (outputs, accumulate) = (op.outputs, dbias.accumulate);
        threads.each(outputs, op.rows, access.write::<G>(dbias.view), |columns, out| {
            sum_rows(&dy.chunks_exact(outputs).map(|row| &row[columns.clone()]), out, accumulate);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{Lab, added, assert_close, assert_gradient, dot, fresh, random};
    use crate::{Backend, DType};

    const ROWS: usize = 5;
    const INPUTS: usize = 7;
    const OUTPUTS: usize = 6;

    /// `out` and the pre-activation of a layer that ends in GELU.
    fn layer(lab: &Lab, x: &[f64], weight: &[f64], bias: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let [x, weight, bias] = [x, weight, bias].map(|values| lab.buffer(values, DType::F64));
        let [kept, out] = [(); 2].map(|()| lab.blank(ROWS * OUTPUTS, DType::F64));
        lab.backend.linear(Linear {
            x: x.view(),
            weight: weight.view(),
            bias: Some(bias.view()),
            gelu: Some(kept.view()),
            residual: None,
            out: out.view(),
            rows: ROWS,
            inputs: INPUTS,
            outputs: OUTPUTS,
        });
        (lab.values(out.view()), lab.values(kept.view()))
    }

    #[test]
    fn forward_keeps_the_value_before_gelu() {
        let lab = Lab::new(1);
        let (x, weight, bias) = (random(ROWS * INPUTS, 1), random(OUTPUTS * INPUTS, 2), random(OUTPUTS, 3));
        let (out, kept) = layer(&lab, &x, &weight, &bias);
        for i in 0..ROWS * OUTPUTS {
            let (row, column) = (i / OUTPUTS, i % OUTPUTS);
            let product = dot(&x[row * INPUTS..][..INPUTS], &weight[column * INPUTS..][..INPUTS]);
            assert!((kept[i] - product - bias[column]).abs() < 1e-13);
            assert!((out[i] - gelu(kept[i])).abs() < 1e-13);
        }
    }

    #[test]
    fn a_branch_ends_in_the_stream() {
        let lab = Lab::new(1);
        let (x, weight, bias) = (random(ROWS * INPUTS, 1), random(OUTPUTS * INPUTS, 2), random(OUTPUTS, 3));
        let stream = random(ROWS * OUTPUTS, 4);
        let [x_buffer, weight_buffer, bias_buffer, residual] =
            [&x, &weight, &bias, &stream].map(|values| lab.buffer(values, DType::F64));
        for rows in [FEW_ROWS, ROWS] {
            let out = lab.blank(rows * OUTPUTS, DType::F64);
            lab.backend.linear(Linear {
                x: x_buffer.slice(0..rows * INPUTS),
                weight: weight_buffer.view(),
                bias: Some(bias_buffer.view()),
                gelu: None,
                residual: Some(residual.slice(0..rows * OUTPUTS)),
                out: out.view(),
                rows,
                inputs: INPUTS,
                outputs: OUTPUTS,
            });
            for (i, out) in lab.values(out.view()).into_iter().enumerate() {
                let (row, column) = (i / OUTPUTS, i % OUTPUTS);
                let product = dot(&x[row * INPUTS..][..INPUTS], &weight[column * INPUTS..][..INPUTS]);
                assert!((out - product - bias[column] - stream[i]).abs() < 1e-13);
            }
        }
    }

    #[test]
    fn few_rows_are_the_first_of_many() {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let (inputs, outputs) = (70, 150);
            let run = |lab: &Lab, rows: usize| {
                let [x, weight, bias] = [(6 * inputs, 1), (outputs * inputs, 2), (outputs, 3)]
                    .map(|(len, seed)| lab.buffer(&random(len, seed), dtype));
                let [kept, out] = [(); 2].map(|()| lab.blank(rows * outputs, dtype));
                lab.backend.linear(Linear {
                    x: x.slice(0..rows * inputs),
                    weight: weight.view(),
                    bias: Some(bias.view()),
                    gelu: Some(kept.view()),
                    residual: None,
                    out: out.view(),
                    rows,
                    inputs,
                    outputs,
                });
                [lab.values(kept.view()), lab.values(out.view())].concat()
            };
            let tolerance = if matches!(dtype, DType::F64 | DType::F32) { 1e-5 } else { 1e-2 };
            let many = run(&Lab::new(1), 6);
            for rows in 1..=FEW_ROWS {
                let few = Lab::same_for_all_threads(|lab| run(lab, rows));
                let first = [&many[..rows * outputs], &many[6 * outputs..][..rows * outputs]].concat();
                assert_close(&few, &first, tolerance);
            }
        }
    }

    #[test]
    fn backward_is_the_derivative_of_two_layers() {
        let lab = Lab::new(1);
        let (x, weight, bias) = (random(ROWS * INPUTS, 1), random(OUTPUTS * INPUTS, 2), random(OUTPUTS, 3));
        let (next, dy) = (random(4 * OUTPUTS, 4), random(ROWS * 4, 5));
        let scalar = |x: &[f64], weight: &[f64], bias: &[f64]| {
            let (hidden, _) = layer(&lab, x, weight, bias);
            let out =
                (0..ROWS * 4).map(|i| dot(&hidden[i / 4 * OUTPUTS..][..OUTPUTS], &next[i % 4 * OUTPUTS..]));
            dot(&out.collect::<Vec<_>>(), &dy)
        };
        let (_, kept) = layer(&lab, &x, &weight, &bias);
        let [dy, next, kept, x_buffer, weight_buffer] =
            [&dy, &next, &kept, &x, &weight].map(|values| lab.buffer(values, DType::F64));
        let (dhidden, dx) = (lab.blank(ROWS * OUTPUTS, DType::F64), lab.blank(ROWS * INPUTS, DType::F64));
        lab.backend.linear_backward_input(LinearBackwardInput {
            dy: dy.view(),
            weight: next.view(),
            gelu: Some(kept.view()),
            dx: dhidden.view(),
            dbias: None,
            rows: ROWS,
            inputs: OUTPUTS,
            outputs: 4,
        });
        lab.backend.linear_backward_input(LinearBackwardInput {
            dy: dhidden.view(),
            weight: weight_buffer.view(),
            gelu: None,
            dx: dx.view(),
            dbias: None,
            rows: ROWS,
            inputs: INPUTS,
            outputs: OUTPUTS,
        });
        let (dweight, dbias) =
            (lab.buffer(&[1.0; OUTPUTS * INPUTS], DType::F64), lab.blank(OUTPUTS, DType::F64));
        lab.backend.linear_backward_weight(LinearBackwardWeight {
            dy: dhidden.view(),
            x: x_buffer.view(),
            dweight: added(&dweight),
            dbias: Some(fresh(&dbias)),
            rows: ROWS,
            inputs: INPUTS,
            outputs: OUTPUTS,
        });
        assert_gradient(&x, &lab.values(dx.view()), |x| scalar(x, &weight, &bias));
        let dweight: Vec<f64> = lab.values(dweight.view()).iter().map(|dweight| dweight - 1.0).collect();
        assert_gradient(&weight, &dweight, |weight| scalar(&x, weight, &bias));
        assert_gradient(&bias, &lab.values(dbias.view()), |bias| scalar(&x, &weight, bias));
    }
}
