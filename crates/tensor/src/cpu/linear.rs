//! Linear layers: the three matrix products, with bias and GELU as epilogue.

use super::access::{Access, Scatter};
use super::activation::{gelu, gelu_derivative};
use super::element::{Element, Real};
use super::elementwise::sum_rows;
use super::gemm::{Operand, Output, Product, gemm};
use super::lanes;
use super::parallel::{Rows, Threads};
use crate::ops::{Linear, LinearBackwardInput, LinearBackwardWeight};

/// With so few rows, packing the weights takes longer than the product. Dot products read them in place instead.
const FEW_ROWS: usize = 4;

/// See [`Linear`].
pub fn forward<T: Element>(threads: Threads, scratch: &mut [u8], op: &Linear) {
    if op.rows <= FEW_ROWS {
        return few_rows::<T>(threads, op);
    }
    forward_of::<T, T, T>(threads, scratch, op, None);
}

/// The same for factors of any types. The sums are multiplied by `scale` before anything else.
pub fn forward_of<X, W, T>(threads: Threads, scratch: &mut [u8], op: &Linear, scale: Option<T::Accumulator>)
where
    X: Element<Accumulator = T::Accumulator>,
    W: Element<Accumulator = T::Accumulator>,
    T: Element,
{
    let access = Access::new();
    let bias = op.bias.map(|bias| access.read::<T>(bias));
    let outputs = op.outputs;
    let pre_activation = op.gelu.map(|pre_activation| Scatter::new(access.write::<T>(pre_activation)));
    let product = Product {
        m: op.rows,
        n: outputs,
        k: op.inputs,
        a: Operand::new(access.read::<X>(op.x), op.inputs),
        b: Operand::new(access.read::<W>(op.weight), op.inputs).transposed(),
        out: Output::new(access.write::<T>(op.out), outputs),
        accumulate: false,
    };
    let residual = op.residual.map(|residual| access.read::<T>(residual));
    if bias.is_none() && pre_activation.is_none() && residual.is_none() && scale.is_none() {
        return gemm(product, None, scratch, threads.0);
    }
    let epilogue = |row: usize, first: usize, sums: &mut [T::Accumulator]| {
        multiply(sums, scale);
        if let Some(bias) = bias {
            lanes::map_pairs(sums, &bias[first..], |sum, bias| sum + bias);
        }
        let start = row * outputs + first;
        if let Some(residual) = residual {
            lanes::map_pairs(sums, &residual[start..], |sum, residual| sum + residual);
        }
        if let Some(pre_activation) = &pre_activation {
            // SAFETY: the epilogue is called once per element of `out`, and `pre_activation` has the same layout.
            activate(sums, unsafe { pre_activation.part(start..start + sums.len()) });
        }
    };
    gemm(product, Some(&epilogue), scratch, threads.0);
}

fn multiply<A: Real>(sums: &mut [A], scale: Option<A>) {
    if let Some(scale) = scale {
        for sum in sums {
            *sum = *sum * scale;
        }
    }
}

/// [`forward`] for at most [`FEW_ROWS`] rows, as in token-by-token generation. Threads share the columns.
fn few_rows<T: Element>(threads: Threads, op: &Linear) {
    const AT_ONCE: usize = 16;
    let access = Access::new();
    let (x, weight) = (access.read::<T>(op.x), access.read::<T>(op.weight));
    let bias = op.bias.map(|bias| access.read::<T>(bias));
    let (rows, inputs, outputs) = (op.rows, op.inputs, op.outputs);
    let residual = op.residual.map(|residual| access.read::<T>(residual));
    let pre_activation = op.gelu.map(|pre_activation| Scatter::new(access.write::<T>(pre_activation)));
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
                if let Some(pre_activation) = &pre_activation {
                    // SAFETY: threads have different columns.
                    activate(sums, unsafe { pre_activation.part(here.clone()) });
                }
                // SAFETY: as above.
                for (to, &sum) in unsafe { out.part(here) }.iter_mut().zip(&*sums) {
                    *to = T::narrow(sum);
                }
            }
        }
    });
}

/// Stores the sums, rounded, as the pre-activation. Then replaces them by GELU of the rounded values, which are the
/// ones that the backward reads.
fn activate<T: Element>(sums: &mut [T::Accumulator], pre_activation: &mut [T]) {
    const AT_ONCE: usize = 16;
    let (sum_chunks, sum_rest) = sums.as_chunks_mut::<AT_ONCE>();
    let (kept_chunks, kept_rest) = pre_activation.as_chunks_mut::<AT_ONCE>();
    for (sums, pre_activation) in sum_chunks.iter_mut().zip(kept_chunks) {
        let rounded = sums.map(T::narrow);
        *sums = rounded.map(|x| gelu(x.widen()));
        *pre_activation = rounded;
    }
    for (sum, pre_activation) in sum_rest.iter_mut().zip(kept_rest) {
        *pre_activation = T::narrow(*sum);
        *sum = gelu(pre_activation.widen());
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
    let Some(pre_activation) = op.gelu.map(|pre_activation| access.read::<T>(pre_activation)) else {
        return gemm(product, None, scratch, threads.0);
    };
    let epilogue = |row: usize, first: usize, sums: &mut [T::Accumulator]| {
        lanes::map_pairs(sums, &pre_activation[row * inputs + first..], |sum, pre_activation| {
            sum * gelu_derivative(pre_activation)
        });
    };
    gemm(product, Some(&epilogue), scratch, threads.0);
}

/// [`backward_input`] for factors in 8 bits: the weight is transposed.
pub fn backward_input_of<D, W, T>(threads: Threads, scratch: &mut [u8], op: &LinearBackwardInput, scale: f32)
where
    D: Element<Accumulator = f32>,
    W: Element<Accumulator = f32>,
    T: Element<Accumulator = f32>,
{
    let access = Access::new();
    let inputs = op.inputs;
    let product = Product {
        m: op.rows,
        n: inputs,
        k: op.outputs,
        a: Operand::new(access.read::<D>(op.dy), op.outputs),
        b: Operand::new(access.read::<W>(op.weight), op.outputs).transposed(),
        out: Output::new(access.write::<T>(op.dx), inputs),
        accumulate: false,
    };
    let pre_activation = op.gelu.map(|pre_activation| access.read::<T>(pre_activation));
    let epilogue = |row: usize, first: usize, sums: &mut [f32]| {
        multiply(sums, Some(scale));
        if let Some(pre_activation) = pre_activation {
            lanes::map_pairs(sums, &pre_activation[row * inputs + first..], |sum, pre_activation| {
                sum * gelu_derivative(pre_activation)
            });
        }
    };
    gemm(product, Some(&epilogue), scratch, threads.0);
}

/// [`backward_weight`] for factors in 8 bits, which are transposed.
pub fn backward_weight_of<D, X, G>(
    threads: Threads,
    scratch: &mut [u8],
    op: &LinearBackwardWeight,
    scale: f32,
) where
    D: Element<Accumulator = f32>,
    X: Element<Accumulator = f32>,
    G: Element<Accumulator = f32>,
{
    let access = Access::new();
    let out = access.write::<G>(op.dweight.view);
    if op.dweight.accumulate {
        // What is there is multiplied by the scale with the sums. A power of two rounds nothing.
        threads.each(out.len(), 1, &mut *out, |_, out| {
            for x in out {
                *x = G::narrow(x.widen() / scale);
            }
        });
    }
    let product = Product {
        m: op.outputs,
        n: op.inputs,
        k: op.rows,
        a: Operand::new(access.read::<D>(op.dy), op.rows),
        b: Operand::new(access.read::<X>(op.x), op.rows).transposed(),
        out: Output::new(out, op.inputs),
        accumulate: op.dweight.accumulate,
    };
    let epilogue = |_: usize, _: usize, sums: &mut [f32]| multiply(sums, Some(scale));
    gemm(product, Some(&epilogue), scratch, threads.0);
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
    gemm(product, None, scratch, threads.0);
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
    use crate::cpu::testing::{TestBackend, added, assert_close, assert_gradient, dot, fresh, random};
    use crate::{Backend, DType};

    const ROWS: usize = 5;
    const INPUTS: usize = 7;
    const OUTPUTS: usize = 6;

    /// `out` and the pre-activation of a layer that ends in GELU.
    fn layer(backend: &TestBackend, x: &[f64], weight: &[f64], bias: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let [x, weight, bias] = [x, weight, bias].map(|values| backend.buffer(values, DType::F64));
        let [pre_activation, out] = [(); 2].map(|()| backend.blank(ROWS * OUTPUTS, DType::F64));
        backend.cpu.linear(Linear {
            x: x.view(),
            weight: weight.view(),
            bias: Some(bias.view()),
            gelu: Some(pre_activation.view()),
            residual: None,
            out: out.view(),
            rows: ROWS,
            inputs: INPUTS,
            outputs: OUTPUTS,
            float8: None,
        });
        (backend.values(out.view()), backend.values(pre_activation.view()))
    }

    #[test]
    fn forward_saves_the_pre_activation() {
        let backend = TestBackend::new(1);
        let (x, weight, bias) = (random(ROWS * INPUTS, 1), random(OUTPUTS * INPUTS, 2), random(OUTPUTS, 3));
        let (out, pre_activation) = layer(&backend, &x, &weight, &bias);
        for i in 0..ROWS * OUTPUTS {
            let (row, column) = (i / OUTPUTS, i % OUTPUTS);
            let product = dot(&x[row * INPUTS..][..INPUTS], &weight[column * INPUTS..][..INPUTS]);
            assert!((pre_activation[i] - product - bias[column]).abs() < 1e-13);
            assert!((out[i] - gelu(pre_activation[i])).abs() < 1e-13);
        }
    }

    #[test]
    fn a_product_adds_the_residual_stream() {
        let backend = TestBackend::new(1);
        let (x, weight, bias) = (random(ROWS * INPUTS, 1), random(OUTPUTS * INPUTS, 2), random(OUTPUTS, 3));
        let stream = random(ROWS * OUTPUTS, 4);
        let [x_buffer, weight_buffer, bias_buffer, residual] =
            [&x, &weight, &bias, &stream].map(|values| backend.buffer(values, DType::F64));
        for rows in [FEW_ROWS, ROWS] {
            let out = backend.blank(rows * OUTPUTS, DType::F64);
            backend.cpu.linear(Linear {
                x: x_buffer.slice(0..rows * INPUTS),
                weight: weight_buffer.view(),
                bias: Some(bias_buffer.view()),
                gelu: None,
                residual: Some(residual.slice(0..rows * OUTPUTS)),
                out: out.view(),
                rows,
                inputs: INPUTS,
                outputs: OUTPUTS,
                float8: None,
            });
            for (i, out) in backend.values(out.view()).into_iter().enumerate() {
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
            let run = |backend: &TestBackend, rows: usize| {
                let [x, weight, bias] = [(6 * inputs, 1), (outputs * inputs, 2), (outputs, 3)]
                    .map(|(len, seed)| backend.buffer(&random(len, seed), dtype));
                let [pre_activation, out] = [(); 2].map(|()| backend.blank(rows * outputs, dtype));
                backend.cpu.linear(Linear {
                    x: x.slice(0..rows * inputs),
                    weight: weight.view(),
                    bias: Some(bias.view()),
                    gelu: Some(pre_activation.view()),
                    residual: None,
                    out: out.view(),
                    rows,
                    inputs,
                    outputs,
                    float8: None,
                });
                [backend.values(pre_activation.view()), backend.values(out.view())].concat()
            };
            let tolerance = if matches!(dtype, DType::F64 | DType::F32) { 1e-5 } else { 1e-2 };
            let many = run(&TestBackend::new(1), 6);
            for rows in 1..=FEW_ROWS {
                let few = TestBackend::same_for_all_threads(|backend| run(backend, rows));
                let first = [&many[..rows * outputs], &many[6 * outputs..][..rows * outputs]].concat();
                assert_close(&few, &first, tolerance);
            }
        }
    }

    #[test]
    fn backward_is_the_derivative_of_two_layers() {
        let backend = TestBackend::new(1);
        let (x, weight, bias) = (random(ROWS * INPUTS, 1), random(OUTPUTS * INPUTS, 2), random(OUTPUTS, 3));
        let (next, dy) = (random(4 * OUTPUTS, 4), random(ROWS * 4, 5));
        let scalar = |x: &[f64], weight: &[f64], bias: &[f64]| {
            let (hidden, _) = layer(&backend, x, weight, bias);
            let out =
                (0..ROWS * 4).map(|i| dot(&hidden[i / 4 * OUTPUTS..][..OUTPUTS], &next[i % 4 * OUTPUTS..]));
            dot(&out.collect::<Vec<_>>(), &dy)
        };
        let (_, pre_activation) = layer(&backend, &x, &weight, &bias);
        let [dy, next, pre_activation, x_buffer, weight_buffer] =
            [&dy, &next, &pre_activation, &x, &weight].map(|values| backend.buffer(values, DType::F64));
        let (dhidden, dx) =
            (backend.blank(ROWS * OUTPUTS, DType::F64), backend.blank(ROWS * INPUTS, DType::F64));
        backend.cpu.linear_backward_input(LinearBackwardInput {
            dy: dy.view(),
            weight: next.view(),
            gelu: Some(pre_activation.view()),
            dx: dhidden.view(),
            dbias: None,
            rows: ROWS,
            inputs: OUTPUTS,
            outputs: 4,
            float8: None,
        });
        backend.cpu.linear_backward_input(LinearBackwardInput {
            dy: dhidden.view(),
            weight: weight_buffer.view(),
            gelu: None,
            dx: dx.view(),
            dbias: None,
            rows: ROWS,
            inputs: INPUTS,
            outputs: OUTPUTS,
            float8: None,
        });
        let (dweight, dbias) =
            (backend.buffer(&[1.0; OUTPUTS * INPUTS], DType::F64), backend.blank(OUTPUTS, DType::F64));
        backend.cpu.linear_backward_weight(LinearBackwardWeight {
            dy: dhidden.view(),
            x: x_buffer.view(),
            dweight: added(&dweight),
            dbias: Some(fresh(&dbias)),
            rows: ROWS,
            inputs: INPUTS,
            outputs: OUTPUTS,
            float8: None,
        });
        assert_gradient(&x, &backend.values(dx.view()), |x| scalar(x, &weight, &bias));
        let dweight: Vec<f64> = backend.values(dweight.view()).iter().map(|dweight| dweight - 1.0).collect();
        assert_gradient(&weight, &dweight, |weight| scalar(&x, weight, &bias));
        assert_gradient(&bias, &backend.values(dbias.view()), |bias| scalar(&x, &weight, bias));
    }
}
