//! LayerNorm and RMSNorm. The backward goes by columns for the weights, then by rows for the input.

use super::access::Access;
use super::element::{Element, Real};
use super::elementwise::{store, sum_rows};
use super::lanes;
use super::parallel::{Rows, Threads};
use crate::View;
use crate::ops::{Gradient, Norm, NormBackward};

const COLUMNS: usize = 64;

/// See [`Norm`].
pub fn forward<T: Element>(threads: Threads, op: &Norm) {
    let access = Access::new();
    let (x, weight) = (access.read::<T>(op.x), access.read::<T>(op.weight));
    let bias = op.bias.map(|bias| access.read::<T>(bias));
    let (out, statistics) = (access.write::<T>(op.out), access.write::<T::Accumulator>(op.statistics));
    let width = op.width;
    let epsilon = T::Accumulator::from_f64(op.epsilon);
    threads.each(
        op.rows,
        width,
        (Rows(x, width), Rows(out, width), Rows(statistics, 2)),
        |_, (x, out, kept)| {
            let rows = x.0.chunks_exact(width).zip(out.0.chunks_exact_mut(width));
            for ((x, out), kept) in rows.zip(kept.0.as_chunks_mut::<2>().0) {
                *kept = statistics_of(x, bias.is_some(), epsilon);
                normalise(x, *kept, weight, bias, out);
            }
        },
    );
}

/// Mean (0 for RMSNorm) and 1/σ of one row.
fn statistics_of<T: Element>(x: &[T], centred: bool, epsilon: T::Accumulator) -> [T::Accumulator; 2] {
    let width = T::Accumulator::from_f64(x.len() as f64);
    let mean = if centred { lanes::sum(x, T::widen) / width } else { T::Accumulator::ZERO };
    let variance = lanes::sum(x, |x| (x.widen() - mean) * (x.widen() - mean)) / width;
    [mean, T::Accumulator::ONE / (variance + epsilon).sqrt()]
}

/// `(x − mean) · rstd · weight + bias`.
pub fn normalise<T: Element>(
    x: &[T],
    [mean, rstd]: [T::Accumulator; 2],
    weight: &[T],
    bias: Option<&[T]>,
    out: &mut [T],
) {
    let normal = |x: T| (x.widen() - mean) * rstd;
    match bias {
        Some(bias) => {
            for (((out, &x), weight), bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
                *out = T::narrow(normal(x).mul_add(weight.widen(), bias.widen()));
            }
        }
        None => {
            for ((out, &x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = T::narrow(normal(x) * weight.widen());
            }
        }
    }
}

/// See [`NormBackward`].
pub fn backward<T, G>(threads: Threads, op: &NormBackward)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    weights::<T, G>(threads, op);
    input::<T>(threads, op);
}

/// `dweight (+)= Σ_rows dy ∘ x̂`, `dbias (+)= Σ_rows dy`, `residual_sum (+)= Σ_rows residual`.
fn weights<T, G>(threads: Threads, op: &NormBackward)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    if let Some(dweight) = op.dweight {
        weight_gradient::<T, G>(threads, op.dy, op.x, op.statistics, dweight, op.width);
    }
    let access = Access::new();
    let (dy, width) = (access.read::<T>(op.dy), op.width);
    let residual = op.residual.map(|residual| access.read::<T>(residual));
    for (rows, sum) in [(Some(dy), op.dbias), (residual, op.residual_sum)] {
        let (Some(rows), Some(Gradient { view, accumulate })) = (rows, sum) else { continue };
        threads.each(width, op.rows, access.write::<G>(view), |columns, out| {
            sum_rows(&rows.chunks_exact(width).map(|row| &row[columns.clone()]), out, accumulate);
        });
    }
}

/// `dweight (+)= Σ_rows dy ∘ x̂`.
pub fn weight_gradient<T, G>(
    threads: Threads,
    dy: View,
    x: View,
    statistics: View,
    dweight: Gradient,
    width: usize,
) where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    let access = Access::new();
    let (dy, x) = (access.read::<T>(dy), access.read::<T>(x));
    let (statistics, _) = access.read::<T::Accumulator>(statistics).as_chunks::<2>();
    let (accumulate, dweight) = (dweight.accumulate, access.write::<G>(dweight.view));
    threads.each(width, statistics.len(), dweight, |columns, dweight| {
        for (block, out) in dweight.chunks_mut(COLUMNS).enumerate() {
            let first = columns.start + block * COLUMNS;
            let mut sums = [T::Accumulator::ZERO; COLUMNS];
            for (row, &[mean, rstd]) in statistics.iter().enumerate() {
                let start = row * width + first;
                let (dy, x) = (&dy[start..start + out.len()], &x[start..start + out.len()]);
                for ((sum, dy), x) in sums.iter_mut().zip(dy).zip(x) {
                    *sum = dy.widen().mul_add((x.widen() - mean) * rstd, *sum);
                }
            }
            store(&sums, out, accumulate);
        }
    });
}

/// `dx = residual + rstd · (g − mean(g) − x̂ · mean(g ∘ x̂))` with `g = dy ∘ weight`.
fn input<T: Element>(threads: Threads, op: &NormBackward) {
    let access = Access::new();
    let (dy, dx) = access.in_place::<T>(op.dy, op.dx);
    let (x, weight) = (access.read::<T>(op.x), access.read::<T>(op.weight));
    let statistics = access.read::<T::Accumulator>(op.statistics);
    let residual = op.residual.map(|residual| access.read::<T>(residual));
    let (width, centred) = (op.width, op.centred);
    let rows = |slice| Rows(slice, width);
    let parts = (dy.map(rows), Rows(dx, width), rows(x), Rows(statistics, 2), residual.map(rows));
    threads.each(op.rows, width, parts, |rows, (dy, dx, x, statistics, residual)| {
        for (row, &statistics) in (0..rows.len()).zip(statistics.0.as_chunks::<2>().0) {
            let row = row * width..(row + 1) * width;
            let dx = &mut dx.0[row.clone()];
            if let Some(dy) = &dy {
                dx.copy_from_slice(&dy.0[row.clone()]);
            }
            let residual = residual.as_ref().map(|residual| &residual.0[row.clone()]);
            input_row(dx, &x.0[row.clone()], weight, statistics, centred, residual);
        }
    });
}

/// One row. On entry `dx` holds `dy`.
fn input_row<T: Element>(
    dx: &mut [T],
    x: &[T],
    weight: &[T],
    [mean, rstd]: [T::Accumulator; 2],
    centred: bool,
    residual: Option<&[T]>,
) {
    let zero = T::Accumulator::ZERO;
    let width = T::Accumulator::from_f64(x.len() as f64);
    let g = |dy: T, weight: T| dy.widen() * weight.widen();
    let mean_g = if centred { lanes::sum_pairs(dx, weight, g) / width } else { zero };
    let along =
        lanes::sum_triples(dx, weight, x, |dy, weight, x| g(dy, weight) * ((x.widen() - mean) * rstd))
            / width;
    let gradient = |dy: T, x: T, weight: T| {
        let normal = (x.widen() - mean) * rstd;
        rstd * (g(dy, weight) - mean_g - normal * along)
    };
    match residual {
        Some(residual) => {
            for (((dx, &x), &weight), &residual) in dx.iter_mut().zip(x).zip(weight).zip(residual) {
                *dx = T::narrow(residual.widen() + gradient(*dx, x, weight));
            }
        }
        None => {
            for ((dx, &x), &weight) in dx.iter_mut().zip(x).zip(weight) {
                *dx = T::narrow(gradient(*dx, x, weight));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{TestBackend, added, assert_close, assert_gradient, dot, fresh, random};
    use crate::{Backend, Buffer, DType};

    const ROWS: usize = 3;
    const WIDTH: usize = 21;

    struct Case {
        backend: TestBackend,
        layer: bool,
        dy: Vec<f64>,
        inputs: [Vec<f64>; 3],
    }

    impl Case {
        fn new(layer: bool) -> Self {
            let inputs = [random(ROWS * WIDTH, 1), random(WIDTH, 2), random(WIDTH, 3)];
            Case { backend: TestBackend::new(1), layer, dy: random(ROWS * WIDTH, 4), inputs }
        }

        fn run(&self, x: &Buffer, weight: &[f64], bias: &[f64]) -> (Vec<f64>, Buffer) {
            let [weight, bias] = [weight, bias].map(|values| self.backend.buffer(values, DType::F64));
            let [out, statistics] = [ROWS * WIDTH, 2 * ROWS].map(|len| self.backend.blank(len, DType::F64));
            self.backend.cpu.norm(Norm {
                x: x.view(),
                weight: weight.view(),
                bias: self.layer.then_some(bias.view()),
                out: out.view(),
                statistics: statistics.view(),
                epsilon: 0.1,
                rows: ROWS,
                width: WIDTH,
            });
            (self.backend.values(out.view()), statistics)
        }

        /// The scalar that is differentiated.
        fn scalar(&self, x: &[f64], weight: &[f64], bias: &[f64]) -> f64 {
            dot(&self.run(&self.backend.buffer(x, DType::F64), weight, bias).0, &self.dy)
        }
    }

    #[test]
    fn forward_is_the_definition() {
        for layer in [true, false] {
            let case = Case::new(layer);
            let [x, weight, bias] = &case.inputs;
            let expected: Vec<f64> = (0..ROWS * WIDTH)
                .map(|i| {
                    let row = &x[i / WIDTH * WIDTH..][..WIDTH];
                    let mean = if layer { row.iter().sum::<f64>() / WIDTH as f64 } else { 0.0 };
                    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / WIDTH as f64;
                    let bias = if layer { bias[i % WIDTH] } else { 0.0 };
                    (x[i] - mean) / (variance + 0.1).sqrt() * weight[i % WIDTH] + bias
                })
                .collect();
            assert_close(&case.run(&case.backend.buffer(x, DType::F64), weight, bias).0, &expected, 1e-13);
        }
    }

    #[test]
    fn the_gradient_of_the_input_is_the_same_with_frozen_weights() {
        for layer in [true, false] {
            let case = Case::new(layer);
            let backend = &case.backend;
            let [x, weight, bias] = &case.inputs;
            let x_buffer = backend.buffer(x, DType::F64);
            let (_, statistics) = case.run(&x_buffer, weight, bias);
            let (dy, weight) = (backend.buffer(&case.dy, DType::F64), backend.buffer(weight, DType::F64));
            let [dweight, dbias] = [(); 2].map(|()| backend.blank(WIDTH, DType::F64));
            let input_gradient = |trained: bool| {
                let dx = backend.blank(ROWS * WIDTH, DType::F64);
                backend.cpu.norm_backward(NormBackward {
                    dy: dy.view(),
                    x: x_buffer.view(),
                    statistics: statistics.view(),
                    weight: weight.view(),
                    residual: None,
                    residual_sum: None,
                    dx: dx.view(),
                    centred: layer,
                    dweight: trained.then_some(fresh(&dweight)),
                    dbias: (trained && layer).then_some(fresh(&dbias)),
                    rows: ROWS,
                    width: WIDTH,
                });
                backend.values(dx.view())
            };
            assert_eq!(input_gradient(false), input_gradient(true));
        }
    }

    #[test]
    fn backward_is_the_derivative_also_in_place() {
        for (layer, in_place) in [(true, false), (true, true), (false, false), (false, true)] {
            let case = Case::new(layer);
            let backend = &case.backend;
            let [x, weight, bias] = &case.inputs;
            let x_buffer = backend.buffer(x, DType::F64);
            let (_, statistics) = case.run(&x_buffer, weight, bias);
            let (dy, residual) = (backend.buffer(&case.dy, DType::F64), random(ROWS * WIDTH, 5));
            let dx = if in_place { None } else { Some(backend.blank(ROWS * WIDTH, DType::F64)) };
            let dx = dx.as_ref().unwrap_or(&dy);
            let (dweight, dbias) =
                (backend.blank(WIDTH, DType::F64), backend.buffer(&[1.0; WIDTH], DType::F64));
            let sum = backend.buffer(&[2.0; WIDTH], DType::F64);
            backend.cpu.norm_backward(NormBackward {
                dy: dy.view(),
                x: x_buffer.view(),
                statistics: statistics.view(),
                weight: backend.buffer(weight, DType::F64).view(),
                residual: in_place.then_some(backend.buffer(&residual, DType::F64).view()),
                residual_sum: in_place.then_some(added(&sum)),
                dx: dx.view(),
                centred: layer,
                dweight: Some(fresh(&dweight)),
                dbias: layer.then_some(added(&dbias)),
                rows: ROWS,
                width: WIDTH,
            });
            let mut dx = backend.values(dx.view());
            if in_place {
                dx.iter_mut().zip(&residual).for_each(|(dx, residual)| *dx -= residual);
                let column = |i: usize| 2.0 + residual.chunks_exact(WIDTH).map(|row| row[i]).sum::<f64>();
                assert_close(&backend.values(sum.view()), &(0..WIDTH).map(column).collect::<Vec<_>>(), 1e-13);
            }
            assert_gradient(x, &dx, |x| case.scalar(x, weight, bias));
            assert_gradient(weight, &backend.values(dweight.view()), |weight| case.scalar(x, weight, bias));
            let dbias: Vec<f64> = backend.values(dbias.view()).iter().map(|dbias| dbias - 1.0).collect();
            assert_gradient(bias, &dbias, |bias| case.scalar(x, weight, bias));
        }
    }
}
