//! Fills, copies, additions, and sums over rows.

use super::access::Access;
use super::element::{Element, Real};
use super::lanes;
use super::parallel::{Rows, Threads};
use crate::View;
use crate::ops::{ColumnSum, CopyColumns, Residual, Squares};

/// Most addends, and most biases, of a residual sum.
const ADDENDS: usize = 4;

/// Columns whose sums stay in registers and the first-level cache during the loop over rows.
const COLUMNS: usize = 64;

/// Sets every element.
pub fn fill<T: Element>(threads: Threads, value: f64, to: View) {
    let access = Access::new();
    let value = T::narrow(T::Accumulator::from_f64(value));
    let to = access.write::<T>(to);
    threads.each(to.len(), 1, to, |_, to| to.fill(value));
}

/// Copies, converting from `S` to `T`.
pub fn copy<S: Element, T: Element>(threads: Threads, from: View, to: View) {
    let access = Access::new();
    let (from, to) = (access.read::<S>(from), access.write::<T>(to));
    threads.each(to.len(), 1, (from, to), |_, (from, to)| {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = T::narrow(convert::<S, T>(from));
        }
    });
}

/// Copies between views of the same type, which may be bytes.
pub fn copy_bytes(threads: Threads, from: View, to: View) {
    let access = Access::new();
    let (from, to) = (access.bytes(from), access.write_bytes(to));
    threads.each(to.len(), 1, (from, to), |_, (from, to)| to.copy_from_slice(from));
}

/// See [`CopyColumns`].
pub fn copy_columns<T: Element>(threads: Threads, op: &CopyColumns) {
    let access = Access::new();
    let (from, to) = (access.read::<T>(op.from.view), access.write::<T>(op.to.view));
    let (read, written) = (op.from.first..op.from.first + op.columns, op.to.first..op.to.first + op.columns);
    let parts = (Rows(from, op.from.width), Rows(to, op.to.width));
    threads.each(op.rows, op.columns, parts, |_, (from, to)| {
        let rows = from.0.chunks_exact(from.1).zip(to.0.chunks_exact_mut(to.1));
        rows.for_each(|(from, to)| to[written.clone()].copy_from_slice(&from[read.clone()]));
    });
}

/// Copies numbers from the host, converting them to `T`.
pub fn upload<T: Element>(threads: Threads, values: &[f32], to: View) {
    let access = Access::new();
    let to = access.write::<T>(to);
    threads.each(to.len(), 1, (values, to), |_, (values, to)| {
        for (to, &value) in to.iter_mut().zip(values) {
            *to = T::narrow(T::Accumulator::from_f64(value.into()));
        }
    });
}

/// `to += from`, converting from `S` to `T`.
pub fn add<S: Element, T: Element>(threads: Threads, from: View, to: View) {
    let access = Access::new();
    let (from, to) = (access.read::<S>(from), access.write::<T>(to));
    threads.each(to.len(), 1, (from, to), |_, (from, to)| {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = T::narrow(to.widen() + convert::<S, T>(from));
        }
    });
}

/// `x *= factor`.
pub fn scale<T: Element>(threads: Threads, factor: f64, x: View) {
    let access = Access::new();
    let (x, factor) = (access.write::<T>(x), T::Accumulator::from_f64(factor));
    threads.each(x.len(), 1, x, |_, x| {
        for x in x {
            *x = T::narrow(x.widen() * factor);
        }
    });
}

/// Converts to the accumulator of another type. If the accumulators are the same, this costs nothing.
#[inline]
fn convert<S: Element, T: Element>(x: S) -> T::Accumulator {
    T::Accumulator::from_f64(x.widen().to_f64())
}

/// One part of [`SumsOfSquares`](crate::ops::SumsOfSquares), summed in f64.
pub fn sum_of_squares<T: Element>(threads: Threads, part: &Squares, total: Option<View>) {
    let access = Access::new();
    let from = access.read::<T>(part.from);
    let sum = threads.sum(from.len(), |range| {
        lanes::sum(&from[range], |x| {
            let x = x.widen().to_f64();
            x * x
        })
    });
    for to in part.own.into_iter().chain(total.filter(|_| part.counts)) {
        access.write::<T::Accumulator>(to)[0] += T::Accumulator::from_f64(sum);
    }
}

/// See [`Residual`].
pub fn residual<T: Element>(threads: Threads, op: &Residual) {
    assert!(
        op.addends.len() <= ADDENDS && op.biases.len() <= ADDENDS,
        "a residual branch with too many ends"
    );
    let access = Access::new();
    let width = op.width;
    let (x, out) = access.in_place::<T>(op.x, op.out);
    let (mut addends, mut biases): ([&[T]; ADDENDS], [&[T]; ADDENDS]) = Default::default();
    for (slice, &view) in addends.iter_mut().zip(op.addends) {
        *slice = access.read::<T>(view);
    }
    for (slice, &view) in biases.iter_mut().zip(op.biases) {
        *slice = access.read::<T>(view);
    }
    let (addends, biases) = (&addends[..op.addends.len()], &biases[..op.biases.len()]);
    threads.each(op.rows, width, (x.map(|x| Rows(x, width)), Rows(out, width)), |rows, (x, out)| {
        for (i, row) in rows.enumerate() {
            let out = &mut out.0[i * width..][..width];
            if let Some(x) = &x {
                out.copy_from_slice(&x.0[i * width..][..width]);
            }
            add_all(out, &addends.iter().map(|addend| &addend[row * width..][..width]), biases);
        }
    });
}

/// Adds rows and biases to `out`, rounding once.
fn add_all<'a, T: Element>(
    out: &mut [T],
    rows: &(impl Iterator<Item = &'a [T]> + Clone),
    biases: &[&'a [T]],
) {
    for first in (0..out.len()).step_by(COLUMNS) {
        let out = &mut out[first..];
        let len = out.len().min(COLUMNS);
        let mut sums = [T::Accumulator::ZERO; COLUMNS];
        for (sum, out) in sums.iter_mut().zip(&out[..len]) {
            *sum = out.widen();
        }
        for row in rows.clone().chain(biases.iter().copied()) {
            for (sum, &x) in sums.iter_mut().zip(&row[first..][..len]) {
                *sum += x.widen();
            }
        }
        for (out, &sum) in out.iter_mut().zip(&sums[..len]) {
            *out = T::narrow(sum);
        }
    }
}

/// See [`ColumnSum`].
pub fn column_sum<T, G>(threads: Threads, op: &ColumnSum)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    let access = Access::new();
    let (x, out) = (access.read::<T>(op.x), access.write::<G>(op.out.view));
    let (width, accumulate) = (op.width, op.out.accumulate);
    threads.each(width, op.rows, out, |columns, out| {
        sum_rows(&x.chunks_exact(width).map(|row| &row[columns.clone()]), out, accumulate);
    });
}

/// `out (+)= Σ rows`, in the order of the rows, rounded once.
pub fn sum_rows<'a, T, G>(rows: &(impl Iterator<Item = &'a [T]> + Clone), out: &mut [G], accumulate: bool)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    for (block, out) in out.chunks_mut(COLUMNS).enumerate() {
        let first = block * COLUMNS;
        let mut sums = [T::Accumulator::ZERO; COLUMNS];
        for row in rows.clone() {
            for (sum, &x) in sums.iter_mut().zip(&row[first..][..out.len()]) {
                *sum += x.widen();
            }
        }
        store(&sums, out, accumulate);
    }
}

/// `out (+)= sums`.
#[inline]
pub fn store<G: Element>(sums: &[G::Accumulator], out: &mut [G], accumulate: bool) {
    for (out, &sum) in out.iter_mut().zip(sums) {
        *out = G::narrow(if accumulate { out.widen() + sum } else { sum });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{TestBackend, added, assert_close, fresh, random};
    use crate::{Backend, DType};

    const TYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

    #[test]
    fn copies_and_additions_convert_between_all_types() {
        let backend = TestBackend::new(1);
        for (from, to) in TYPES.iter().flat_map(|from| TYPES.iter().map(move |to| (*from, *to))) {
            let (source, target) = (backend.buffer(&[1.5, -0.25, 3.0], from), backend.blank(3, to));
            backend.cpu.copy(source.view(), target.view());
            assert_eq!(backend.values(target.view()), [1.5, -0.25, 3.0]);
            backend.cpu.add(source.slice(0..2), target.slice(1..3));
            assert_eq!(backend.values(target.view()), [1.5, 1.25, 2.75]);
        }
    }

    #[test]
    fn conversions_round_to_nearest_even() {
        let backend = TestBackend::new(1);
        let target = backend.blank(3, DType::BF16);
        let values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.1 / 256.0];
        backend.cpu.copy(backend.buffer(&values, DType::F32).view(), target.view());
        assert_eq!(backend.values(target.view()), [1.0, 1.0 + 4.0 / 256.0, 1.0 + 2.0 / 256.0]);
    }

    #[test]
    fn squares_are_added_up_and_overflow_shows() {
        let backend = TestBackend::new(1);
        let sum = backend.buffer(&[10.0], DType::F32);
        backend.cpu.sum_of_squares(backend.buffer(&[3.0, -4.0], DType::F16).view(), sum.view());
        assert_eq!(backend.values(sum.view()), [35.0]);
        for bad in [f64::INFINITY, f64::NAN] {
            let values: Vec<f64> = (0..100).map(|i| if i == 77 { bad } else { 1.0 }).collect();
            let sum = backend.buffer(&[0.0], DType::F32);
            backend.cpu.sum_of_squares(backend.buffer(&values, DType::BF16).view(), sum.view());
            assert!(!backend.values(sum.view())[0].is_finite());
        }
    }

    #[test]
    fn a_residual_sum_may_be_in_place() {
        let backend = TestBackend::new(1);
        let (rows, width) = (3, 70);
        let values: Vec<_> =
            (0..4).map(|seed| random(if seed < 3 { rows * width } else { width }, seed)).collect();
        let [x, a, b, bias] = [0, 1, 2, 3].map(|i| backend.buffer(&values[i], DType::F64));
        let expected: Vec<f64> = (0..rows * width)
            .map(|i| values[0][i] + values[1][i] + values[2][i] + 2.0 * values[3][i % width])
            .collect();
        let out = backend.blank(rows * width, DType::F64);
        for out in [out.view(), x.view()] {
            let (addends, biases) = (&[a.view(), b.view()], &[bias.view(), bias.view()]);
            backend.cpu.residual(Residual { x: x.view(), addends, biases, out, rows, width });
            assert_close(&backend.values(out), &expected, 1e-15);
        }
    }

    #[test]
    fn columns_are_summed_into_either_gradient_type() {
        let backend = TestBackend::new(1);
        let x = backend.buffer(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], DType::BF16);
        for dtype in [DType::BF16, DType::F32] {
            let out = backend.blank(3, dtype);
            backend.cpu.column_sum(ColumnSum { x: x.view(), out: fresh(&out), rows: 2, width: 3 });
            assert_eq!(backend.values(out.view()), [5.0, 7.0, 9.0]);
            backend.cpu.column_sum(ColumnSum { x: x.view(), out: added(&out), rows: 2, width: 3 });
            assert_eq!(backend.values(out.view()), [10.0, 14.0, 18.0]);
        }
    }
}
