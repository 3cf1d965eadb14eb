//! Attention backward: for every tile of keys, all tiles of queries that attend to it. Five products per tile.
//!
//! `dS = P ∘ (dO·Vᵀ − D)` with `D = Σ dO ∘ O`. Keys are the outer loop, so the gradients of queries are accumulated in
//! scratch. That is done for a strip at a time: as many heads and queries as fit into the scratch, usually all.

use std::ops::Range;

use super::tile::{CausalPart, Product, ROWS, TILE};
use super::{Head, Scratch, first_tile, pack, pack_transposed, padded, softmax_scale};
use crate::cpu::access::{Access, Scatter, scratch_of};
use crate::cpu::element::{Element, Real};
use crate::cpu::lanes;
use crate::cpu::parallel::Threads;
use crate::cpu::soft_cap::SoftCap;
use crate::ops::{AttentionBackward, AttentionSaved, AttentionShape};

/// See [`AttentionBackward`]. A thread computes whole groups of heads, so gradients of keys are summed in a fixed
/// order.
pub fn backward<T: Element>(threads: Threads, scratch: &mut [u8], op: &AttentionBackward) {
    let access = Access::new();
    let shape = op.shape;
    assert!(shape.head_dim <= super::HEAD_DIM, "heads of {} are too wide", shape.head_dim);
    let inputs = Inputs::<T> {
        shape,
        qkv: access.read(op.qkv),
        starts: op.starts.map(|starts| access.tokens(starts)),
        out: access.read(op.out),
        dout: access.read(op.dout),
        saved: match op.saved {
            AttentionSaved::LogSumExp(view) => SavedSoftmax::LogSumExp(access.read(view)),
            AttentionSaved::Probabilities(view) => SavedSoftmax::Probabilities(access.read(view)),
        },
    };
    let dqkv = Scatter::new(access.write::<T>(op.dqkv));
    threads.each_with_scratch(shape.batch * shape.kv_heads, scratch, (), |tasks, (), scratch| {
        let mut tiles = Tiles::new(shape.head_dim, scratch);
        for task in tasks {
            tiles.run(&inputs, &dqkv, task / shape.kv_heads, task % shape.kv_heads);
        }
    });
}

struct Inputs<'a, T: Element> {
    shape: AttentionShape,
    qkv: &'a [T],
    starts: Option<&'a [u32]>,
    out: &'a [T],
    dout: &'a [T],
    saved: SavedSoftmax<'a, T>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// The first key that each query of a sample attends to; `None` if it is always the first token.
    fn starts_of(&self, batch: usize) -> Option<&'a [u32]> {
        let sequence = self.shape.sequence;
        self.starts.map(|starts| &starts[batch * sequence..][..sequence])
    }
}

enum SavedSoftmax<'a, T: Element> {
    LogSumExp(&'a [T::Accumulator]),
    Probabilities(&'a [T]),
}

/// A thread's scratch.
pub(super) struct Tiles<'a, A> {
    dim: usize,
    /// `[queries, dim]`, multiplied by the softmax scale.
    pub queries: &'a mut [A],
    /// `[queries, dim]`.
    pub dout: &'a mut [A],
    /// `[keys, dim]`.
    pub keys: &'a mut [A],
    /// `[dim, keys]`.
    pub keys_transposed: &'a mut [A],
    /// `[dim, keys]`.
    pub values_transposed: &'a mut [A],
    /// `[keys, dim]`.
    pub dkeys: &'a mut [A],
    /// `[keys, dim]`.
    pub dvalues: &'a mut [A],
    /// `[queries, keys]`.
    pub probabilities: &'a mut [A],
    /// `[queries, keys]`.
    pub dscores: &'a mut [A],
    /// `[heads of the strip, queries of the strip, dim]`.
    pub dqueries: &'a mut [A],
}

impl<'a, A: Real> Tiles<'a, A> {
    pub fn new(dim: usize, scratch: &'a mut [u8]) -> Self {
        let mut scratch = Scratch(scratch_of::<A>(scratch));
        let tile = TILE * padded(dim);
        Tiles {
            dim,
            queries: scratch.take(tile),
            dout: scratch.take(tile),
            keys: scratch.take(tile),
            keys_transposed: scratch.take(tile),
            values_transposed: scratch.take(tile),
            dkeys: scratch.take(tile),
            dvalues: scratch.take(tile),
            probabilities: scratch.take(TILE * TILE),
            dscores: scratch.take(TILE * TILE),
            dqueries: scratch.0,
        }
    }

    /// The strips of one key head of one sample, if every head of a strip needs the room of two tiles beside its rows.
    pub fn strips(
        &self,
        shape: AttentionShape,
        batch: usize,
        kv: usize,
    ) -> impl Iterator<Item = Strip> + use<A> {
        let group = shape.heads / shape.kv_heads;
        let room = self.dqueries.len() / (TILE * padded(self.dim));
        let heads_at_once = group.min(room / 3);
        let rows_at_once = (room / heads_at_once - 2) * TILE;
        (0..group).step_by(heads_at_once).flat_map(move |first_head| {
            let heads = kv * group + first_head..kv * group + group.min(first_head + heads_at_once);
            (0..shape.sequence).step_by(rows_at_once).map(move |first| Strip {
                batch,
                kv,
                heads: heads.clone(),
                rows: first..shape.sequence.min(first + rows_at_once),
            })
        })
    }

    /// One key head of one sample, with all its query heads.
    fn run<T>(&mut self, inputs: &Inputs<T>, dqkv: &Scatter<T>, batch: usize, kv: usize)
    where
        T: Element<Accumulator = A>,
    {
        let shape = inputs.shape;
        let group = shape.heads / shape.kv_heads;
        let room = self.dqueries.len() / (TILE * padded(self.dim));
        let heads_at_once = group.min(room);
        let rows_at_once = room / heads_at_once * TILE;
        for first_head in (0..group).step_by(heads_at_once) {
            let heads = kv * group + first_head..kv * group + group.min(first_head + heads_at_once);
            for first in (0..shape.sequence).step_by(rows_at_once) {
                let rows = first..shape.sequence.min(first + rows_at_once);
                self.strip(inputs, dqkv, &Strip { batch, kv, heads: heads.clone(), rows }, first_head == 0);
            }
        }
    }

    /// All visible keys against the queries of a strip.
    fn strip<T>(&mut self, inputs: &Inputs<T>, dqkv: &Scatter<T>, strip: &Strip, first_heads: bool)
    where
        T: Element<Accumulator = A>,
    {
        let shape = inputs.shape;
        let Strip { batch, kv, heads, rows } = strip;
        let key_head = Head::of_qkv(shape, *batch, shape.heads + kv);
        let value_head = Head::of_qkv(shape, *batch, shape.heads + shape.kv_heads + kv);
        let head_len = rows.len().next_multiple_of(TILE) * padded(self.dim);
        self.dqueries[..heads.len() * head_len].fill(A::ZERO);
        let starts = inputs.starts_of(*batch);
        for first in (first_tile(starts, rows.start)..rows.end).step_by(TILE) {
            let keys = (first, (shape.sequence - first).min(TILE));
            pack(inputs.qkv, key_head, keys, A::ONE, self.keys);
            pack_transposed(inputs.qkv, key_head, keys, A::ONE, self.keys_transposed);
            pack_transposed(inputs.qkv, value_head, keys, A::ONE, self.values_transposed);
            self.dkeys.fill(A::ZERO);
            self.dvalues.fill(A::ZERO);
            for (i, head) in heads.clone().enumerate() {
                for query in (rows.start.max(first)..rows.end).step_by(TILE) {
                    // All later queries start at this key or later.
                    if first_tile(starts, query) > first {
                        break;
                    }
                    let at = i * head_len + (query - rows.start) * padded(self.dim);
                    self.tile(inputs, (*batch, head), query, keys, at);
                }
            }
            let accumulate = !(first_heads && first >= rows.start);
            write(self.dkeys, dqkv, key_head, keys, A::ONE, accumulate);
            write(self.dvalues, dqkv, value_head, keys, A::ONE, accumulate);
        }
        for (i, head) in heads.clone().enumerate() {
            let to = Head::of_qkv(shape, *batch, head);
            write(
                &self.dqueries[i * head_len..],
                dqkv,
                to,
                (rows.start, rows.len()),
                softmax_scale(shape),
                false,
            );
        }
    }

    /// One tile of queries from `first` on against the packed keys. `at` is the offset of its gradient.
    fn tile<T>(
        &mut self,
        inputs: &Inputs<T>,
        (batch, head): (usize, usize),
        first: usize,
        keys: (usize, usize),
        at: usize,
    ) where
        T: Element<Accumulator = A>,
    {
        let shape = inputs.shape;
        let queries = (first, (shape.sequence - first).min(TILE));
        let (width, diagonal) = (padded(self.dim), first == keys.0);
        let part = |part| if diagonal { part } else { CausalPart::Whole };
        let out_head = Head::of_out(shape, batch, head);
        pack(inputs.qkv, Head::of_qkv(shape, batch, head), queries, softmax_scale(shape), self.queries);
        pack(inputs.dout, out_head, queries, A::ONE, self.dout);
        let row = (batch * shape.heads + head) * shape.sequence + first;

        let scores = |left, right| Product {
            rows: queries.1,
            columns: keys.1,
            inner: self.dim,
            left: (left, width),
            right: (right, TILE),
            part: part(CausalPart::LowerResult),
            accumulate: false,
        };
        scores(&*self.dout, &*self.values_transposed).run((self.dscores, TILE));
        let dot_of = |i: usize| {
            let vector = out_head.vector(first + i);
            lanes::sum_pairs(&inputs.dout[vector.clone()], &inputs.out[vector], |a, b| a.widen() * b.widen())
        };
        let soft_cap = SoftCap::of(shape.scores.soft_cap);
        if soft_cap.is_some() || matches!(inputs.saved, SavedSoftmax::LogSumExp(_)) {
            scores(&*self.queries, &*self.keys_transposed).run((self.probabilities, TILE));
        }
        if let Some(soft_cap) = soft_cap {
            // The gradient of a bounded score, but for its probability.
            for i in 0..queries.1 {
                let (dot, row) = (dot_of(i), i * TILE..(i + 1) * TILE);
                for (dscore, score) in self.dscores[row.clone()].iter_mut().zip(&mut self.probabilities[row])
                {
                    *score = soft_cap.bound(*score);
                    *dscore = (*dscore - dot) * soft_cap.slope(*score);
                }
            }
        }
        match inputs.saved {
            SavedSoftmax::LogSumExp(sums) => {
                soften(self.probabilities, &sums[row..][..queries.1], keys.1);
                if let Some(starts) = inputs.starts_of(batch) {
                    hide_earlier(self.probabilities, &starts[first..], keys);
                }
            }
            SavedSoftmax::Probabilities(saved) => {
                let saved = &saved[row * shape.sequence..][..queries.1 * shape.sequence];
                load(self.probabilities, saved, shape.sequence, keys);
            }
        }
        for (i, row) in self.dscores.chunks_exact_mut(TILE).take(queries.1).enumerate() {
            let dot = if soft_cap.is_some() { A::ZERO } else { dot_of(i) };
            let probabilities = &mut self.probabilities[i * TILE..][..TILE];
            if diagonal {
                // The products on the diagonal read up to a multiple of `ROWS` beyond it.
                probabilities[i + 1..(i + 1).next_multiple_of(ROWS)].fill(A::ZERO);
            }
            for (dscore, &probability) in row.iter_mut().zip(&*probabilities) {
                *dscore = probability * (*dscore - dot);
            }
        }

        let by_key = |left, right| Product {
            rows: keys.1,
            columns: width,
            inner: queries.1,
            left: (left, TILE),
            right: (right, width),
            part: part(CausalPart::UpperLeft),
            accumulate: true,
        };
        by_key(&*self.probabilities, &*self.dout).run_transposed((self.dvalues, width));
        by_key(&*self.dscores, &*self.queries).run_transposed((self.dkeys, width));
        let by_query = Product {
            rows: queries.1,
            columns: width,
            inner: keys.1,
            left: (&*self.dscores, TILE),
            right: (&*self.keys, width),
            part: part(CausalPart::LowerLeft),
            accumulate: true,
        };
        by_query.run((&mut self.dqueries[at..], width));
    }
}

/// A range of query heads of one key head, and a range of their rows.
pub(super) struct Strip {
    pub batch: usize,
    pub kv: usize,
    pub heads: Range<usize>,
    pub rows: Range<usize>,
}

/// Probabilities from scores, `[queries, keys]`, and the log-sum-exp of each row.
fn soften<A: Real>(scores: &mut [A], log_sums: &[A], keys: usize) {
    for (row, &log_sum) in scores.chunks_exact_mut(TILE).zip(log_sums) {
        for score in &mut row[..keys] {
            *score = (*score - log_sum).exp();
        }
    }
}

/// Zeroes the probabilities of keys before the first one that the query attends to. `starts` has the first key of each
/// query.
fn hide_earlier<A: Real>(probabilities: &mut [A], starts: &[u32], (first, count): (usize, usize)) {
    for (row, &start) in probabilities.chunks_exact_mut(TILE).zip(starts) {
        row[..(start as usize).saturating_sub(first).min(count)].fill(A::ZERO);
    }
}

/// Probabilities from those that the forward saved, `[queries, sequence]`.
fn load<T: Element>(tile: &mut [T::Accumulator], saved: &[T], sequence: usize, keys: (usize, usize)) {
    for (to, from) in tile.chunks_exact_mut(TILE).zip(saved.chunks_exact(sequence)) {
        for (to, from) in to.iter_mut().zip(&from[keys.0..][..keys.1]) {
            *to = from.widen();
        }
    }
}

/// Rounds rows of `tile`, times `factor`, into vectors `first..first + count` of a head.
pub(super) fn write<T: Element>(
    tile: &[T::Accumulator],
    to: &Scatter<T>,
    head: Head,
    (first, count): (usize, usize),
    factor: T::Accumulator,
    accumulate: bool,
) {
    for (i, row) in tile.chunks_exact(padded(head.dim)).take(count).enumerate() {
        // SAFETY: each task has its own key head of its own sample with all its query heads, on one thread.
        let to = unsafe { to.part(head.vector(first + i)) };
        for (to, &from) in to.iter_mut().zip(row) {
            let from = from * factor;
            *to = T::narrow(if accumulate { to.widen() + from } else { from });
        }
    }
}
