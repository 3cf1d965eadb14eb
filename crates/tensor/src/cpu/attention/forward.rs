//! Attention forward: queries against keys tile by tile, with a running maximum and sum for every query.
//!
//! Scores are stored transposed, `[keys, queries]`, so that every step of the softmax vectorises over queries.

use super::tile::{CausalPart, LANES, Product, TILE};
use super::{Head, Scratch, first_tile, pack, pack_transposed, padded, softmax_scale};
use crate::cpu::access::{Access, Scatter, scratch_of};
use crate::cpu::element::{Element, Real};
use crate::cpu::lanes;
use crate::cpu::parallel::{Rows, Threads};
use crate::cpu::soft_cap::SoftCap;
use crate::ops::{Attention, AttentionSaved};

/// See [`Attention`].
pub fn forward<T: Element>(threads: Threads, scratch: &mut [u8], op: &Attention) {
    let access = Access::new();
    let shape = op.shape;
    assert!(shape.head_dim <= super::HEAD_DIM, "heads of {} are too wide", shape.head_dim);
    let qkv = access.read::<T>(op.qkv);
    let starts = op.starts.map(|starts| access.tokens(starts));
    let out = Scatter::new(access.write::<T>(op.out));
    let (sums, probabilities) = match op.saved {
        AttentionSaved::LogSumExp(view) => (Some(access.write::<T::Accumulator>(view)), None),
        AttentionSaved::Probabilities(view) => (None, Some(access.write::<T>(view))),
    };
    let sequence = shape.sequence;
    let parts = (sums.map(|s| Rows(s, sequence)), probabilities.map(|p| Rows(p, sequence * sequence)));
    threads.each_with_scratch(
        shape.batch * shape.heads,
        scratch,
        parts,
        |tasks, (sums, probabilities), scratch| {
            let mut tiles = Tiles::<T::Accumulator>::new(shape.head_dim, scratch);
            let (mut sums, mut probabilities) = (sums.map(|s| s.0), probabilities.map(|p| p.0));
            for (i, task) in tasks.enumerate() {
                let (batch, head) = (task / shape.heads, task % shape.heads);
                let kv = head / (shape.heads / shape.kv_heads);
                let heads = Heads {
                    query: Head::of_qkv(shape, batch, head),
                    key: Head::of_qkv(shape, batch, shape.heads + kv),
                    value: Head::of_qkv(shape, batch, shape.heads + shape.kv_heads + kv),
                    scale: softmax_scale(shape),
                    soft_cap: SoftCap::of(shape.scores.soft_cap),
                    starts: starts.map(|starts| &starts[batch * sequence..][..sequence]),
                };
                for first in (0..sequence).step_by(TILE) {
                    let queries = (first, (sequence - first).min(TILE));
                    tiles.run(qkv, &heads, queries);
                    tiles.write(&out, Head::of_out(shape, batch, head), queries);
                    if let Some(sums) = &mut sums {
                        sums[i * sequence + first..][..queries.1]
                            .copy_from_slice(&tiles.log_sum[..queries.1]);
                    }
                    if let Some(probabilities) = &mut probabilities {
                        let rows =
                            &mut probabilities[(i * sequence + first) * sequence..][..queries.1 * sequence];
                        tiles.write_probabilities(qkv, &heads, queries, rows);
                    }
                }
            }
        },
    );
}

/// The heads of one task.
struct Heads<'a, A> {
    query: Head,
    key: Head,
    value: Head,
    scale: A,
    soft_cap: Option<SoftCap<A>>,
    /// The first key that each query attends to; `None` if it is always the first token.
    starts: Option<&'a [u32]>,
}

impl<A> Heads<'_, A> {
    /// The first keys of the tiles that a tile of queries attends to.
    fn key_tiles(&self, queries: (usize, usize)) -> impl Iterator<Item = usize> {
        (first_tile(self.starts, queries.0)..=queries.0).step_by(TILE)
    }
}

/// A thread's scratch: one tile of queries and its accumulators.
pub(super) struct Tiles<'a, A> {
    dim: usize,
    /// `[dim, queries]`.
    queries: &'a mut [A],
    /// `[keys, dim]`.
    keys: &'a mut [A],
    /// `[keys, dim]`.
    pub values: &'a mut [A],
    /// `[keys, queries]`.
    pub scores: &'a mut [A],
    /// `[queries, dim]`.
    out: &'a mut [A],
    /// `[queries]`: running maximum, running sum, and the factor by which the sums shrink when the maximum grows.
    maximum: &'a mut [A],
    sum: &'a mut [A],
    shrink: &'a mut [A],
    /// `[queries]`: the log-sum-exp, saved for the backward.
    pub log_sum: &'a mut [A],
}

impl<'a, A: Real> Tiles<'a, A> {
    pub fn new(dim: usize, scratch: &'a mut [u8]) -> Self {
        let mut scratch = Scratch(scratch_of::<A>(scratch));
        let tile = TILE * padded(dim);
        Tiles {
            dim,
            queries: scratch.take(tile),
            keys: scratch.take(tile),
            values: scratch.take(tile),
            scores: scratch.take(TILE * TILE),
            out: scratch.take(tile),
            maximum: scratch.take(TILE),
            sum: scratch.take(TILE),
            shrink: scratch.take(TILE),
            log_sum: scratch.take(TILE),
        }
    }

    /// `out` and `log_sum` of one tile of queries `(first, count)`.
    fn run<T: Element<Accumulator = A>>(&mut self, qkv: &[T], heads: &Heads<A>, queries: (usize, usize)) {
        self.begin(qkv, heads.query, queries, heads.scale);
        for first in heads.key_tiles(queries) {
            let diagonal = first == queries.0;
            let count = if diagonal { queries.1 } else { TILE };
            self.score(qkv, heads, queries, (first, count));
            self.soften(count);
            pack(qkv, heads.value, (first, count), A::ONE, self.values);
            self.add_values(queries.1, count, diagonal);
        }
        self.finish();
    }

    /// Packs a tile of queries `(first, count)` of a head, times `scale`, and clears its sums.
    pub fn begin<T>(&mut self, from: &[T], head: Head, queries: (usize, usize), scale: A)
    where
        T: Element<Accumulator = A>,
    {
        pack_transposed(from, head, queries, scale, self.queries);
        self.out.fill(A::ZERO);
        self.maximum.fill(A::NEG_INFINITY);
        self.sum.fill(A::ZERO);
    }

    /// Computes `log_sum` after all keys.
    pub fn finish(&mut self) {
        for i in 0..TILE {
            self.log_sum[i] = self.maximum[i] + self.sum[i].ln();
        }
    }

    /// The output of a query before its division by the sum.
    pub fn row(&self, query: usize) -> &[A] {
        &self.out[query * padded(self.dim)..][..self.dim]
    }

    /// One over the sum of a query; zero if it has seen no key.
    pub fn inverse(&self, query: usize) -> A {
        let sum = self.sum[query];
        if sum == A::ZERO { A::ZERO } else { A::ONE / sum }
    }

    /// Scores of a tile of keys; −∞ for masked pairs.
    fn score<T>(&mut self, qkv: &[T], heads: &Heads<A>, queries: (usize, usize), keys: (usize, usize))
    where
        T: Element<Accumulator = A>,
    {
        self.products(qkv, heads.key, keys, heads.soft_cap);
        if keys.0 == queries.0 {
            for (key, row) in self.scores.chunks_exact_mut(TILE).take(keys.1).enumerate() {
                row[..key].fill(A::NEG_INFINITY);
            }
        }
        if let Some(starts) = heads.starts {
            hide_earlier(self.scores, &starts[queries.0..][..queries.1], keys);
        }
    }

    /// Scores of a tile of keys `(first, count)` of a head, without a mask.
    pub fn products<T>(&mut self, from: &[T], head: Head, keys: (usize, usize), soft_cap: Option<SoftCap<A>>)
    where
        T: Element<Accumulator = A>,
    {
        pack(from, head, keys, A::ONE, self.keys);
        let product = Product {
            rows: keys.1,
            columns: TILE,
            inner: self.dim,
            left: (self.keys, padded(self.dim)),
            right: (self.queries, TILE),
            part: CausalPart::Whole,
            accumulate: false,
        };
        product.run((self.scores, TILE));
        if let Some(soft_cap) = soft_cap {
            for score in &mut self.scores[..keys.1 * TILE] {
                *score = soft_cap.bound(*score);
            }
        }
    }

    /// Replaces the scores by exponentials, and updates maximum and sum.
    pub fn soften(&mut self, keys: usize) {
        let scores = &mut self.scores.as_chunks_mut::<TILE>().0[..keys];
        let before: [A; TILE] = *self.maximum.first_chunk().expect("a whole tile");
        let mut maximum = before;
        for row in &*scores {
            for (maximum, &score) in maximum.iter_mut().zip(row) {
                *maximum = score.max(*maximum);
            }
        }
        // A query without visible keys so far has maximum −∞. Its exponentials must be 0, not exp(−∞ + ∞).
        let shift = maximum.map(|maximum| if maximum == A::NEG_INFINITY { A::ZERO } else { maximum });
        let mut sum = [A::ZERO; TILE];
        for row in scores {
            for ((score, &shift), sum) in row.iter_mut().zip(&shift).zip(&mut sum) {
                *score = (*score - shift).exp();
                *sum += *score;
            }
        }
        for i in 0..TILE {
            self.shrink[i] = (before[i] - shift[i]).exp();
            self.sum[i] = self.sum[i].mul_add(self.shrink[i], sum[i]);
        }
        self.maximum.copy_from_slice(&maximum);
    }

    /// `out = out · shrink + scoresᵀ · values`.
    pub fn add_values(&mut self, queries: usize, keys: usize, diagonal: bool) {
        let width = padded(self.dim);
        for (row, &shrink) in self.out.chunks_exact_mut(width).zip(&*self.shrink) {
            for out in row {
                *out = *out * shrink;
            }
        }
        let product = Product {
            rows: queries,
            columns: width,
            inner: keys,
            left: (self.scores, TILE),
            right: (self.values, width),
            part: if diagonal { CausalPart::LowerLeft } else { CausalPart::Whole },
            accumulate: true,
        };
        product.run_transposed((self.out, width));
    }

    fn write<T: Element<Accumulator = A>>(&self, out: &Scatter<T>, head: Head, queries: (usize, usize)) {
        for (i, row) in self.out.chunks_exact(padded(self.dim)).take(queries.1).enumerate() {
            let inverse = A::ONE / self.sum[i];
            // SAFETY: each task has its own head of its own sample, and runs on one thread.
            let to = unsafe { out.part(head.vector(queries.0 + i)) };
            for (to, &from) in to.iter_mut().zip(row) {
                *to = T::narrow(from * inverse);
            }
        }
    }

    /// Loops over the keys again, now that the sums are known. `rows` is `[queries, sequence]`.
    fn write_probabilities<T>(&mut self, qkv: &[T], heads: &Heads<A>, queries: (usize, usize), rows: &mut [T])
    where
        T: Element<Accumulator = A>,
    {
        rows.fill(T::default());
        let sequence = rows.len() / queries.1;
        for first in heads.key_tiles(queries) {
            let count = if first == queries.0 { queries.1 } else { TILE };
            self.score(qkv, heads, queries, (first, count));
            for row in &mut self.scores.as_chunks_mut::<TILE>().0[..count] {
                lanes::map_pairs(row, self.log_sum, |score, log_sum| (score - log_sum).exp());
            }
            for (i, row) in rows.chunks_exact_mut(sequence).enumerate() {
                for (to, scores) in row[first..first + count].iter_mut().zip(self.scores.chunks_exact(TILE)) {
                    *to = T::narrow(scores[i]);
                }
            }
        }
    }
}

/// Sets scores to −∞ for keys before the first one that the query attends to. `starts` has the first key of each query.
fn hide_earlier<A: Real>(scores: &mut [A], starts: &[u32], (first, count): (usize, usize)) {
    let sees_all = |start: &u32| *start as usize <= first;
    if starts.last().is_none_or(sees_all) {
        return;
    }
    for (key, row) in scores.chunks_exact_mut(TILE).take(count).enumerate() {
        let seeing = starts.partition_point(|&start| start as usize <= first + key);
        row[seeing..starts.len()].fill(A::NEG_INFINITY);
    }
}

const _: () = assert!(TILE.is_multiple_of(LANES), "scores need no padding");
