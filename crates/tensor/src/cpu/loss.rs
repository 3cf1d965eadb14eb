//! Cross-entropy over a vocabulary that may be split among ranks: each part's statistics, then loss and gradient.

use super::access::Access;
use super::element::{Element, Real};
use super::lanes;
use super::parallel::{Rows, Threads};
use super::soft_cap::SoftCap;
use crate::ops::{CrossEntropy, LossStatistics};

/// See [`LossStatistics`].
pub fn statistics<T: Element>(threads: Threads, op: &LossStatistics) {
    let access = Access::new();
    let (logits, targets) = (access.read::<T>(op.logits), access.tokens(op.targets));
    let statistics = access.write::<T::Accumulator>(op.statistics);
    let LossStatistics { first, valid, rows, columns, .. } = *op;
    let soft_cap = SoftCap::of(op.soft_cap);
    let parts = (Rows(logits, columns), targets, Rows(statistics, 3));
    threads.each(rows, columns, parts, |_, (logits, targets, statistics)| {
        let rows = logits.0.chunks_exact(columns).zip(targets);
        for ((logits, &target), statistics) in rows.zip(statistics.0.as_chunks_mut::<3>().0) {
            let logits = &logits[..valid];
            let bound = |x: T::Accumulator| soft_cap.map_or(x, |soft_cap| soft_cap.bound(x));
            let (maximum, lowest) = (lanes::max(logits), T::Accumulator::NEG_INFINITY);
            let maximum = if maximum == lowest { lowest } else { bound(maximum) };
            let sum = match soft_cap {
                None => lanes::sum(logits, |x| (x.widen() - maximum).exp()),
                Some(soft_cap) => lanes::sum(logits, |x| (soft_cap.bound(x.widen()) - maximum).exp()),
            };
            let target = column(target, first, valid).map_or(lowest, |column| bound(logits[column].widen()));
            *statistics = [maximum, sum, target];
        }
    });
}

/// See [`CrossEntropy`].
pub fn cross_entropy<T: Element>(threads: Threads, op: &CrossEntropy) {
    if let Some(own) = op.own_statistics() {
        statistics::<T>(threads, &own);
    }
    let access = Access::new();
    let statistics = access.read::<T::Accumulator>(op.statistics);
    let loss = access.write::<T::Accumulator>(op.loss);
    let CrossEntropy { first, valid, rows, columns, parts, z_loss, .. } = *op;
    let sum = threads.sum(rows, |range| {
        let loss_of = |row| {
            let (maximum, sum, target) = combine(statistics, row, rows, parts);
            (sum.ln() + maximum - target).to_f64()
        };
        range.map(loss_of).sum()
    });
    loss[0] += T::Accumulator::from_f64(sum);
    let Some(scale) = op.scale else { return };
    let factor = T::Accumulator::from_f64(op.factor) * access.read::<T::Accumulator>(scale)[0];
    let soft_cap = SoftCap::of(op.soft_cap);
    let twice_z = T::Accumulator::from_f64(2.0 * z_loss);
    let (logits, targets) = (access.write::<T>(op.logits), access.tokens(op.targets));
    threads.each(rows, columns, (Rows(logits, columns), targets), |range, (logits, targets)| {
        for ((row, logits), &target) in range.zip(logits.0.chunks_exact_mut(columns)).zip(targets) {
            let (maximum, sum, _) = combine(statistics, row, rows, parts);
            let (logits, padding) = logits.split_at_mut(valid);
            let column = column(target, first, valid);
            let more = T::Accumulator::ONE + twice_z * (sum.ln() + maximum);
            gradient_row(logits, column, (maximum, sum), more, factor, soft_cap);
            padding.fill(T::default());
        }
    });
}

/// `(softmax · more − one_hot) · factor`, in place; times the slope of the soft cap, if there is one.
fn gradient_row<T: Element>(
    logits: &mut [T],
    target: Option<usize>,
    (maximum, sum): (T::Accumulator, T::Accumulator),
    more: T::Accumulator,
    factor: T::Accumulator,
    soft_cap: Option<SoftCap<T::Accumulator>>,
) {
    let bounded = |x: T::Accumulator| {
        let Some(soft_cap) = soft_cap else { return (x, T::Accumulator::ONE) };
        let bounded = soft_cap.bound(x);
        (bounded, soft_cap.slope(bounded))
    };
    // The gradient at the target is rounded once, from its own logit, not by a subtraction after rounding.
    let at_target = target.map(|column| {
        let (logit, slope) = bounded(logits[column].widen());
        let probability = (logit - maximum).exp() / sum;
        (column, T::narrow((probability * more - T::Accumulator::ONE) * factor * slope))
    });
    let scale = factor * more / sum;
    if soft_cap.is_some() {
        for x in &mut *logits {
            let (logit, slope) = bounded(x.widen());
            *x = T::narrow((logit - maximum).exp() * scale * slope);
        }
    } else {
        for x in &mut *logits {
            *x = T::narrow((x.widen() - maximum).exp() * scale);
        }
    }
    if let Some((column, gradient)) = at_target {
        logits[column] = gradient;
    }
}

/// The column of a token in this rank's part of the vocabulary.
fn column(token: u32, first: usize, valid: usize) -> Option<usize> {
    (token as usize).checked_sub(first).filter(|&column| column < valid)
}

/// A row's maximum, `Σ exp(x − maximum)` and target logit over all parts, combined in the order of the parts.
fn combine<A: Real>(statistics: &[A], row: usize, rows: usize, parts: usize) -> (A, A, A) {
    let part = |part: usize| &statistics[(part * rows + row) * 3..][..3];
    let maximum = (0..parts).fold(A::NEG_INFINITY, |maximum, p| part(p)[0].max(maximum));
    let target = (0..parts).fold(A::NEG_INFINITY, |target, p| part(p)[2].max(target));
    let mut sum = A::ZERO;
    for p in 0..parts {
        // A part with only padding has the maximum −∞ and the sum 0.
        let shrink = if part(p)[0] > A::NEG_INFINITY { (part(p)[0] - maximum).exp() } else { A::ONE };
        sum += part(p)[1] * shrink;
    }
    (maximum, sum, target)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{TestBackend, assert_gradient, random};
    use crate::{Backend, DType};

    const ROWS: usize = 3;
    /// Real tokens. Each part has `COLUMNS` columns, and the remaining ones are padding.
    const VOCABULARY: usize = 10;
    const TARGETS: [u32; ROWS] = [0, 9, 4];

    /// Loss and gradient with the vocabulary in `parts`, joined to the whole vocabulary. Padding holds large numbers.
    fn run(backend: &TestBackend, logits: &[f64], parts: usize, columns: usize) -> (f64, Vec<f64>) {
        run_with(backend, logits, (0.0, None), parts, columns)
    }

    /// The same, with a coefficient of the z-loss and a soft cap.
    fn run_with(
        backend: &TestBackend,
        logits: &[f64],
        (z_loss, soft_cap): (f64, Option<f64>),
        parts: usize,
        columns: usize,
    ) -> (f64, Vec<f64>) {
        let targets = backend.tokens(&TARGETS);
        let valid = |part: usize| VOCABULARY.saturating_sub(part * columns).min(columns);
        let logits: Vec<_> = (0..parts)
            .map(|part| {
                let value = |i: usize| {
                    let (row, column) = (i / columns, i % columns);
                    if column < valid(part) {
                        logits[row * VOCABULARY + part * columns + column]
                    } else {
                        1e3
                    }
                };
                backend.buffer(&(0..ROWS * columns).map(value).collect::<Vec<_>>(), DType::F64)
            })
            .collect();
        let statistics = backend.blank(parts * ROWS * 3, DType::F64);
        for (part, logits) in logits.iter().enumerate().filter(|_| parts > 1) {
            backend.cpu.loss_statistics(LossStatistics {
                logits: logits.view(),
                targets: targets.view(),
                first: part * columns,
                valid: valid(part),
                statistics: statistics.slice(part * ROWS * 3..(part + 1) * ROWS * 3),
                soft_cap,
                rows: ROWS,
                columns,
            });
        }
        let (scale, mut gradient) = (backend.buffer(&[8.0], DType::F64), vec![0.0; ROWS * VOCABULARY]);
        let mut losses = Vec::new();
        for (part, logits) in logits.iter().enumerate() {
            let loss = backend.buffer(&[100.0], DType::F64);
            backend.cpu.cross_entropy(CrossEntropy {
                logits: logits.view(),
                targets: targets.view(),
                first: part * columns,
                valid: valid(part),
                statistics: statistics.view(),
                parts,
                loss: loss.view(),
                scale: Some(scale.view()),
                factor: 0.5,
                z_loss,
                soft_cap,
                rows: ROWS,
                columns,
            });
            losses.push(backend.values(loss.view())[0] - 100.0);
            for (i, value) in backend.values(logits.view()).into_iter().enumerate() {
                let (row, column) = (i / columns, i % columns);
                if column < valid(part) {
                    gradient[row * VOCABULARY + part * columns + column] = value / 4.0;
                } else {
                    assert!(value == 0.0, "padding has no gradient");
                }
            }
        }
        assert!(losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()), "every part knows the loss");
        (losses[0], gradient)
    }

    #[test]
    fn parts_and_padding_change_neither_loss_nor_gradient() {
        let backend = TestBackend::new(1);
        let logits: Vec<f64> = random(ROWS * VOCABULARY, 1).iter().map(|x| 20.0 * x).collect();
        let expected: f64 = (0..ROWS)
            .map(|row| {
                let row_logits = &logits[row * VOCABULARY..][..VOCABULARY];
                row_logits.iter().map(|x| x.exp()).sum::<f64>().ln() - row_logits[TARGETS[row] as usize]
            })
            .sum();
        // One part, one with padding, three, and three of which the last is only padding.
        for (parts, columns) in [(1, 10), (1, 13), (3, 4), (3, 5)] {
            let (loss, gradient) = run(&backend, &logits, parts, columns);
            assert!((loss - expected).abs() < 1e-12, "{loss} against {expected}");
            assert_gradient(&logits, &gradient, |logits| run(&backend, logits, parts, columns).0);
        }
    }

    #[test]
    fn a_soft_cap_bounds_logits_and_their_gradient() {
        let backend = TestBackend::new(1);
        let logits: Vec<f64> = random(ROWS * VOCABULARY, 1).iter().map(|x| 5.0 * x).collect();
        let capped: Vec<f64> = logits.iter().map(|x| 3.0 * (x / 3.0).tanh()).collect();
        for (parts, columns) in [(1, 10), (1, 13), (3, 4), (3, 5)] {
            let capping = |logits: &[f64]| run_with(&backend, logits, (0.0, Some(3.0)), parts, columns);
            let (loss, gradient) = capping(&logits);
            assert!((loss - run(&backend, &capped, parts, columns).0).abs() < 1e-12);
            assert_gradient(&logits, &gradient, |logits| capping(logits).0);
        }
    }

    #[test]
    fn the_gradient_of_the_z_loss_is_added_and_the_loss_stays() {
        let backend = TestBackend::new(1);
        let logits: Vec<f64> = random(ROWS * VOCABULARY, 1).iter().map(|x| 5.0 * x).collect();
        let z_term = |logits: &[f64]| -> f64 {
            let log_sum = |row: &[f64]| row.iter().map(|x| x.exp()).sum::<f64>().ln();
            logits.chunks(VOCABULARY).map(|row| 0.25 * log_sum(row).powi(2)).sum()
        };
        for (parts, columns) in [(1, 10), (3, 4)] {
            let (loss, gradient) = run_with(&backend, &logits, (0.25, None), parts, columns);
            let without = |logits: &[f64]| run(&backend, logits, parts, columns).0;
            assert!((loss - without(&logits)).abs() < 1e-12);
            assert_gradient(&logits, &gradient, |logits| without(logits) + z_term(logits));
        }
    }

    #[test]
    fn numbers_that_are_not_finite_reach_the_loss() {
        let backend = TestBackend::new(1);
        for bad in [f64::NAN, f64::INFINITY] {
            let mut logits = random(ROWS * VOCABULARY, 1);
            logits[VOCABULARY + 2] = bad;
            assert!(!run(&backend, &logits, 3, 4).0.is_finite());
        }
    }
}
