//! Token and position tables, forward and backward.

use std::ops::Range;

use super::access::{Access, indices_of};
use super::element::Element;
use super::elementwise::sum_rows;
use super::parallel::{Rows, Threads};
use crate::ops::{Embedding, EmbeddingBackward, Positions, PositionsBackward};

/// See [`Embedding`].
pub fn forward<T: Element>(threads: Threads, op: &Embedding) {
    let access = Access::new();
    let (tokens, table) = (access.tokens(op.tokens), access.read::<T>(op.table));
    let (out, width, first) = (access.write::<T>(op.out), op.width, op.first);
    let vocabulary = table.len() / width;
    threads.each(op.rows, width, (tokens, Rows(out, width)), |_, (tokens, out)| {
        for (&token, out) in tokens.iter().zip(out.0.chunks_exact_mut(width)) {
            match (token as usize).checked_sub(first) {
                Some(row) if row < vocabulary => out.copy_from_slice(&table[row * width..][..width]),
                _ => out.fill(T::default()),
            }
        }
    });
}

/// See [`EmbeddingBackward`]. Each thread owns some rows of the table and reads all tokens in order.
pub fn backward<T, G>(threads: Threads, scratch: &mut [u8], op: &EmbeddingBackward)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    let access = Access::new();
    let (tokens, dout) = (access.tokens(op.tokens), access.read::<T>(op.dout));
    let (dtable, width) = (access.write::<G>(op.dtable.view), op.width);
    let (vocabulary, first, accumulate) = (dtable.len() / width, op.first, op.dtable.accumulate);
    threads.each_with_scratch(vocabulary, scratch, Rows(dtable, width), |owned, Rows(dtable, _), scratch| {
        if !accumulate {
            dtable.fill(G::default());
        }
        let owned = first + owned.start..first + owned.end;
        if G::DTYPE == T::Accumulator::DTYPE {
            add_as_they_come(tokens, dout, owned, dtable, width);
        } else {
            add_by_token(tokens, dout, owned, dtable, width, indices_of(scratch));
        }
    });
}

/// Adds the rows of owned tokens to a table in the accumulator type.
fn add_as_they_come<T, G>(tokens: &[u32], dout: &[T], owned: Range<usize>, dtable: &mut [G], width: usize)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    for (&token, dout) in tokens.iter().zip(dout.chunks_exact(width)) {
        let row = (token as usize).checked_sub(owned.start);
        if let Some(row) = row.filter(|&row| row < owned.len()) {
            add_row(dout, &mut dtable[row * width..][..width]);
        }
    }
}

/// The same for a table of a 16-bit type. If the rows of a frequent token were added one by one, later ones would be
/// lost to rounding. So the rows are sorted by token and summed before they are rounded: once per token if the scratch
/// holds the indices of all rows.
fn add_by_token<T, G>(
    tokens: &[u32],
    dout: &[T],
    owned: Range<usize>,
    dtable: &mut [G],
    width: usize,
    places: &mut [u32],
) where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    // Chunks are cut by all tokens, not by owned ones, so that every number of threads rounds the same sums.
    for (tokens, dout) in tokens.chunks(places.len()).zip(dout.chunks(places.len() * width)) {
        let token = |place: &u32| tokens[*place as usize];
        let mut found = 0;
        for place in (0..tokens.len() as u32).filter(|place| owned.contains(&(token(place) as usize))) {
            places[found] = place;
            found += 1;
        }
        let places = &mut places[..found];
        places.sort_unstable_by_key(|place| (token(place), *place));
        for same in places.chunk_by(|one, other| token(one) == token(other)) {
            let row = token(&same[0]) as usize - owned.start;
            let rows = same.iter().map(|&place| &dout[place as usize * width..][..width]);
            sum_rows(&rows, &mut dtable[row * width..][..width], true);
        }
    }
}

/// See [`Positions`].
pub fn positions<T: Element>(threads: Threads, op: &Positions) {
    let access = Access::new();
    let (table, x, width) = (access.read::<T>(op.table), access.write::<T>(op.x), op.width);
    let (first_row, sequence) = (op.first_row, op.sequence);
    threads.each(op.rows, width, Rows(x, width), |rows, x| {
        for (row, x) in rows.zip(x.0.chunks_exact_mut(width)) {
            let position = (first_row + row) % sequence;
            add_row(&table[position * width..][..width], x);
        }
    });
}

/// See [`PositionsBackward`].
pub fn positions_backward<T, G>(threads: Threads, op: &PositionsBackward)
where
    T: Element,
    G: Element<Accumulator = T::Accumulator>,
{
    let access = Access::new();
    let (dx, dtable, width) = (access.read::<T>(op.dx), access.write::<G>(op.dtable.view), op.width);
    let PositionsBackward { first_row, sequence, rows, .. } = *op;
    let (positions, accumulate) = (dtable.len() / width, op.dtable.accumulate);
    threads.each(positions, width, Rows(dtable, width), |owned, dtable| {
        for (position, out) in owned.zip(dtable.0.chunks_exact_mut(width)) {
            // The first row at this position. Beyond the sequence there is none.
            let first = (position + sequence - first_row % sequence) % sequence;
            let first = if position < sequence { first } else { rows };
            let here = (first..rows).step_by(sequence).map(|row| &dx[row * width..][..width]);
            sum_rows(&here, out, accumulate);
        }
    });
}

/// `to += from`.
fn add_row<S, T>(from: &[S], to: &mut [T])
where
    S: Element,
    T: Element<Accumulator = S::Accumulator>,
{
    for (to, from) in to.iter_mut().zip(from) {
        *to = T::narrow(to.widen() + from.widen());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::SCRATCH_BYTES;
    use crate::cpu::testing::{TestBackend, added, assert_close, assert_gradient, dot, fresh, random};
    use crate::{Backend, DType};

    #[test]
    fn parts_of_the_table_add_up_to_the_whole() {
        let (backend, rows, width) = (TestBackend::new(1), 4, 3);
        let tokens = backend.tokens(&[5, 0, 3, 5]);
        let (table, dout) = (random(6 * width, 1), random(rows * width, 2));
        let scalar = |table: &[f64]| {
            let mut sum = vec![0.0; rows * width];
            for first in [0, 2] {
                let part = if first == 0 { &table[..2 * width] } else { &table[2 * width..] };
                let (part, out) = (backend.buffer(part, DType::F64), backend.blank(rows * width, DType::F64));
                let (tokens, table, out) = (tokens.view(), part.view(), out.view());
                backend.cpu.embedding(Embedding { tokens, table, first, out, rows, width });
                sum.iter_mut().zip(backend.values(out)).for_each(|(sum, out)| *sum += out);
            }
            dot(&sum, &dout)
        };
        let dout_buffer = backend.buffer(&dout, DType::F64);
        let dtable = backend.buffer(&vec![1.0; 6 * width], DType::F64);
        for (first, range) in [(0, 0..2 * width), (2, 2 * width..6 * width)] {
            for accumulate in [false, true] {
                let dtable = crate::ops::Gradient { view: dtable.slice(range.clone()), accumulate };
                let (tokens, dout) = (tokens.view(), dout_buffer.view());
                backend.cpu.embedding_backward(EmbeddingBackward {
                    tokens,
                    dout,
                    first,
                    dtable,
                    rows,
                    width,
                });
            }
        }
        let half: Vec<f64> = backend.values(dtable.view()).iter().map(|twice| twice / 2.0).collect();
        assert_gradient(&table, &half, scalar);
    }

    #[test]
    fn a_frequent_token_is_rounded_once() {
        // More rows than the scratch has room for indices.
        let (rows, width, vocabulary) = (SCRATCH_BYTES / 4 + 1000, 3, 5);
        let tokens: Vec<u32> = (0..rows as u32).map(|i| if i % 7 == 0 { 1 + i / 7 % 6 } else { 3 }).collect();
        let dout: Vec<f64> = random(rows * width, 4).iter().map(|x| 1.0 + x / 4.0).collect();
        let gradient = |backend: &TestBackend, dtype| {
            let (tokens, dout_rounded) = (backend.tokens(&tokens), backend.buffer(&dout, DType::BF16));
            let dout = backend.buffer(&backend.values(dout_rounded.view()), dtype);
            let dtable = backend.buffer(&vec![100.0; vocabulary * width], dtype);
            for accumulate in [false, true] {
                let dtable = crate::ops::Gradient { view: dtable.view(), accumulate };
                let (tokens, dout, first) = (tokens.view(), dout.view(), 2);
                backend.cpu.embedding_backward(EmbeddingBackward {
                    tokens,
                    dout,
                    first,
                    dtable,
                    rows,
                    width,
                });
            }
            backend.values(dtable.view())
        };
        let exact = gradient(&TestBackend::new(1), DType::F64);
        let rounded = TestBackend::same_for_all_threads(|backend| gradient(backend, DType::BF16));
        // Four roundings to eight bits.
        assert_close(&rounded, &exact, 4.0 / 256.0);
    }

    #[test]
    fn positions_start_anywhere_and_repeat() {
        let (backend, rows, width, sequence, first_row) = (TestBackend::new(1), 5, 3, 4, 6);
        let (x, table, dx) = (random(rows * width, 1), random(5 * width, 2), random(rows * width, 3));
        let forward = |table: &[f64]| {
            let (x, table) = (backend.buffer(&x, DType::F64), backend.buffer(table, DType::F64));
            backend.cpu.positions(Positions {
                x: x.view(),
                table: table.view(),
                first_row,
                sequence,
                rows,
                width,
            });
            backend.values(x.view())
        };
        let expected: Vec<f64> =
            (0..rows * width).map(|i| x[i] + table[(6 + i / width) % 4 * width + i % width]).collect();
        assert_close(&forward(&table), &expected, 1e-15);

        let (dx_buffer, dtable) = (backend.buffer(&dx, DType::F64), backend.blank(5 * width, DType::F64));
        let backward = |dtable| {
            let dx = dx_buffer.view();
            backend.cpu.positions_backward(PositionsBackward {
                dx,
                dtable,
                first_row,
                sequence,
                rows,
                width,
            });
        };
        backward(fresh(&dtable));
        let once = backend.values(dtable.view());
        assert_gradient(&table, &once, |table| dot(&forward(table), &dx));
        backward(added(&dtable));
        assert_close(
            &backend.values(dtable.view()),
            &once.iter().map(|once| 2.0 * once).collect::<Vec<_>>(),
            1e-15,
        );
    }
}
