//! RMSNorm of rows whose columns are divided among ranks.

use super::access::Access;
use super::element::{Element, Real};
use super::lanes;
use super::norm::{normalise, weight_gradient};
use super::parallel::{Rows, Threads};
use crate::ops::{RowDots, SplitNorm, SplitNormBackward};

/// See [`RowDots`].
pub fn row_dots<T: Element>(threads: Threads, op: &RowDots) {
    let access = Access::new();
    let (x, y) = (access.read::<T>(op.x), access.read::<T>(op.y));
    let weight = op.weight.map(|weight| access.read::<T>(weight));
    let (out, width) = (access.write::<T::Accumulator>(op.out), op.width);
    threads.each(op.rows, width, (Rows(x, width), Rows(y, width), out), |_, (x, y, out)| {
        for ((out, x), y) in out.iter_mut().zip(x.0.chunks_exact(width)).zip(y.0.chunks_exact(width)) {
            *out = match weight {
                None => lanes::sum_pairs(x, y, |x, y| x.widen() * y.widen()),
                Some(weight) => {
                    lanes::sum_triples(x, y, weight, |x, y, weight| x.widen() * weight.widen() * y.widen())
                }
            };
        }
    });
}

/// See [`SplitNorm`].
pub fn forward<T: Element>(threads: Threads, op: &SplitNorm) {
    let access = Access::new();
    let (x, weight) = (access.read::<T>(op.x), access.read::<T>(op.weight));
    let squares = access.read::<T::Accumulator>(op.squares);
    let (out, statistics) = (access.write::<T>(op.out), access.write::<T::Accumulator>(op.statistics));
    let (width, epsilon) = (op.width, T::Accumulator::from_f64(op.epsilon));
    let whole = T::Accumulator::from_f64(op.whole as f64);
    let parts = (Rows(x, width), squares, Rows(out, width), Rows(statistics, 2));
    threads.each(op.rows, width, parts, |_, (x, squares, out, statistics)| {
        let rows = x.0.chunks_exact(width).zip(squares).zip(out.0.chunks_exact_mut(width));
        for (((x, &squares), out), statistics) in rows.zip(statistics.0.as_chunks_mut::<2>().0) {
            *statistics = [T::Accumulator::ZERO, T::Accumulator::ONE / (squares / whole + epsilon).sqrt()];
            normalise(x, *statistics, weight, None, out);
        }
    });
}

/// See [`SplitNormBackward`].
pub fn backward<T, G>(threads: Threads, op: &SplitNormBackward)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    if let Some(dweight) = op.dweight {
        weight_gradient::<T, G>(threads, op.dy, op.x, op.statistics, dweight, op.width);
    }
    let access = Access::new();
    let (dy, dx) = access.in_place::<T>(op.dy, op.dx);
    let (x, weight) = (access.read::<T>(op.x), access.read::<T>(op.weight));
    let (statistics, dots) =
        (access.read::<T::Accumulator>(op.statistics), access.read::<T::Accumulator>(op.dots));
    let (width, whole) = (op.width, T::Accumulator::from_f64(op.whole as f64));
    let rows = |slice| Rows(slice, width);
    let parts = (dy.map(rows), Rows(dx, width), rows(x), Rows(statistics, 2), dots);
    threads.each(op.rows, width, parts, |rows, (dy, dx, x, statistics, dots)| {
        for (row, (&[_, rstd], &dot)) in (0..rows.len()).zip(statistics.0.as_chunks::<2>().0.iter().zip(dots))
        {
            let row = row * width..(row + 1) * width;
            let dx = &mut dx.0[row.clone()];
            if let Some(dy) = &dy {
                dx.copy_from_slice(&dy.0[row.clone()]);
            }
            let along = rstd * rstd * dot / whole;
            for ((dx, x), weight) in dx.iter_mut().zip(&x.0[row]).zip(weight) {
                *dx = T::narrow(rstd * (dx.widen() * weight.widen() - x.widen() * along));
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use crate::cpu::testing::{TestBackend, added, assert_close, random};
    use crate::ops::{Norm, NormBackward, RowDots, SplitNorm, SplitNormBackward};
    use crate::{Backend, Buffer, DType};

    const ROWS: usize = 3;
    const WIDTH: usize = 24;

    /// Columns `first..first + count` of every row.
    fn columns(matrix: &[f64], first: usize, count: usize) -> Vec<f64> {
        matrix.chunks(WIDTH).flat_map(|row| row[first..first + count].to_vec()).collect()
    }

    #[test]
    fn parts_of_rows_are_normalised_as_whole_rows() {
        let backend = TestBackend::new(1);
        let [x, dy] = [1, 2].map(|seed| random(ROWS * WIDTH, seed));
        let weight = random(WIDTH, 3);
        let [x_all, dy_all, weight_all] = [&x, &dy, &weight].map(|values| backend.buffer(values, DType::F64));
        let blank = |len| backend.blank(len, DType::F64);
        let (out, statistics, dx) = (blank(ROWS * WIDTH), blank(2 * ROWS), blank(ROWS * WIDTH));
        let dweight = backend.buffer(&[1.0; WIDTH], DType::F64);
        let (epsilon, rows) = (0.1, ROWS);
        backend.cpu.norm(Norm {
            x: x_all.view(),
            weight: weight_all.view(),
            bias: None,
            out: out.view(),
            statistics: statistics.view(),
            epsilon,
            rows,
            width: WIDTH,
        });
        backend.cpu.norm_backward(NormBackward {
            dy: dy_all.view(),
            x: x_all.view(),
            statistics: statistics.view(),
            weight: weight_all.view(),
            residual: None,
            residual_sum: None,
            dx: dx.view(),
            centred: false,
            dweight: Some(added(&dweight)),
            dbias: None,
            rows,
            width: WIDTH,
        });
        let [out, dx, dweight] = [&out, &dx, &dweight].map(|buffer| backend.values(buffer.view()));

        let parts = [(0, 7), (7, 17)];
        let part =
            |matrix: &[f64], (first, count)| backend.buffer(&columns(matrix, first, count), DType::F64);
        let dots = |left: &[f64], right: &[f64], weighted: bool| -> Buffer {
            let each = parts.map(|(first, width)| {
                let [left, right] = [left, right].map(|matrix| part(matrix, (first, width)));
                let weight = backend.buffer(&weight[first..first + width], DType::F64);
                let out = blank(ROWS);
                backend.cpu.row_dots(RowDots {
                    x: left.view(),
                    y: right.view(),
                    weight: weighted.then_some(weight.view()),
                    out: out.view(),
                    rows,
                    width,
                });
                backend.values(out.view())
            });
            let sums: Vec<f64> = each[0].iter().zip(&each[1]).map(|(a, b)| a + b).collect();
            backend.buffer(&sums, DType::F64)
        };
        let (squares, dots) = (dots(&x, &x, false), dots(&dy, &x, true));
        for (first, width) in parts {
            let [x, dy] = [&x, &dy].map(|matrix| part(matrix, (first, width)));
            let weight = backend.buffer(&weight[first..first + width], DType::F64);
            let (own, statistics) = (blank(ROWS * width), blank(2 * ROWS));
            backend.cpu.split_norm(SplitNorm {
                x: x.view(),
                weight: weight.view(),
                squares: squares.view(),
                out: own.view(),
                statistics: statistics.view(),
                epsilon,
                rows,
                width,
                whole: WIDTH,
            });
            assert_close(&backend.values(own.view()), &columns(&out, first, width), 1e-13);
            let own = backend.buffer(&vec![1.0; width], DType::F64);
            backend.cpu.split_norm_backward(SplitNormBackward {
                dy: dy.view(),
                x: x.view(),
                statistics: statistics.view(),
                weight: weight.view(),
                dots: dots.view(),
                dx: dy.view(),
                dweight: Some(added(&own)),
                rows,
                width,
                whole: WIDTH,
            });
            assert_close(&backend.values(dy.view()), &columns(&dx, first, width), 1e-13);
            assert_close(&backend.values(own.view()), &dweight[first..first + width], 1e-13);
        }
    }
}
