//! Linear layers: the three matrix products, with bias and GELU on the finished sums.

use super::access::{Access, Scatter};
use super::activation::{gelu, gelu_derivative};
use super::element::Element;
use super::elementwise::sum_rows;
use super::gemm::{NoEpilogue, Operand, Output, Product, gemm};
use super::lanes;
use super::parallel::Threads;
use crate::ops::{Linear, LinearBackwardInput, LinearBackwardWeight};

/// See [`Linear`].
pub fn forward<T: Element>(threads: Threads, scratch: &mut [u8], op: &Linear) {
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
    use crate::cpu::testing::{Lab, added, assert_gradient, dot, fresh, random};
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
        let out = lab.blank(ROWS * OUTPUTS, DType::F64);
        lab.backend.linear(Linear {
            x: x_buffer.view(),
            weight: weight_buffer.view(),
            bias: Some(bias_buffer.view()),
            gelu: None,
            residual: Some(residual.view()),
            out: out.view(),
            rows: ROWS,
            inputs: INPUTS,
            outputs: OUTPUTS,
        });
        for (i, out) in lab.values(out.view()).into_iter().enumerate() {
            let (row, column) = (i / OUTPUTS, i % OUTPUTS);
            let product = dot(&x[row * INPUTS..][..INPUTS], &weight[column * INPUTS..][..INPUTS]);
            assert!((out - product - bias[column] - stream[i]).abs() < 1e-13);
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
            rows: ROWS,
            inputs: OUTPUTS,
            outputs: 4,
        });
        lab.backend.linear_backward_input(LinearBackwardInput {
            dy: dhidden.view(),
            weight: weight_buffer.view(),
            gelu: None,
            dx: dx.view(),
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
