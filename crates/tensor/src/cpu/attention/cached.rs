//! Attention of new tokens over a key-value cache: one query at a time, with a running maximum and sum.
//!
//! A generated token is a single query, for which tiles do not help. Reading the cache takes most of the time, and
//! every query reads only the keys up to its position.

use std::ops::Range;

use super::{HEAD_DIM, Head, softmax_scale};
use crate::cpu::access::Access;
use crate::cpu::element::{Element, Real};
use crate::cpu::lanes;
use crate::cpu::parallel::{Rows, Threads};
use crate::cpu::soft_cap::SoftCap;
use crate::ops::{AttentionShape, CachedAttention};

/// Keys whose scores are computed together.
const KEYS: usize = 64;

/// See [`CachedAttention`].
pub fn cached<T: Element>(threads: Threads, op: &CachedAttention) {
    let access = Access::new();
    let (shape, capacity) = (op.shape, op.capacity);
    let AttentionShape { sequence, heads, kv_heads, head_dim: dim, .. } = shape;
    assert!(dim <= HEAD_DIM, "heads of {dim} are too wide");
    let (qkv, positions) = (access.read::<T>(op.qkv), access.tokens(op.positions));
    let (keys, values) = (access.write::<T>(op.keys), access.write::<T>(op.values));
    let out = access.write::<T>(op.out);
    append(qkv, positions, keys, values, (shape, capacity));
    let (keys, values) = (&*keys, &*values);
    threads.each(shape.rows() * heads, capacity * dim, Rows(out, dim), |queries, out| {
        for (query, out) in queries.zip(out.0.chunks_exact_mut(dim)) {
            let (row, head) = (query / heads, query % heads);
            let (sample, kv) = (row / sequence, head / (heads / kv_heads));
            let end = positions[row] as usize + 1;
            let seen = shape.scores.window.map_or(0, |window| end.saturating_sub(window))..end;
            let cache = cached_head(shape, capacity, sample, kv);
            let vector = &qkv[Head::of_qkv(shape, sample, head).vector(row % sequence)];
            attend(vector, &keys[cache.clone()], &values[cache], seen, shape, out);
        }
    });
}

/// Writes the new tokens' keys and values into the cache.
fn append<T: Element>(
    qkv: &[T],
    positions: &[u32],
    keys: &mut [T],
    values: &mut [T],
    (shape, capacity): (AttentionShape, usize),
) {
    let dim = shape.head_dim;
    for (row, &position) in positions.iter().enumerate() {
        let (sample, token, position) = (row / shape.sequence, row % shape.sequence, position as usize);
        assert!(position < capacity, "position {position} in a cache of {capacity}");
        for kv in 0..shape.kv_heads {
            let to = cached_head(shape, capacity, sample, kv).start + position * dim;
            let from = |head| Head::of_qkv(shape, sample, shape.heads + head).vector(token);
            keys[to..to + dim].copy_from_slice(&qkv[from(kv)]);
            values[to..to + dim].copy_from_slice(&qkv[from(shape.kv_heads + kv)]);
        }
    }
}

/// The range of one head of a sample in the cache.
fn cached_head(shape: AttentionShape, capacity: usize, sample: usize, kv: usize) -> Range<usize> {
    let len = capacity * shape.head_dim;
    let start = (sample * shape.kv_heads + kv) * len;
    start..start + len
}

/// `out = softmax(scores(query·keysᵀ)) · values` over the keys `seen`.
fn attend<T: Element>(
    query: &[T],
    keys: &[T],
    values: &[T],
    seen: Range<usize>,
    shape: AttentionShape,
    out: &mut [T],
) {
    let dim = query.len();
    let scale: T::Accumulator = softmax_scale(shape);
    let soft_cap = SoftCap::of(shape.scores.soft_cap);
    let vector = |token: usize| token * dim..(token + 1) * dim;
    let (mut scores, mut sums) = ([T::Accumulator::ZERO; KEYS], [T::Accumulator::ZERO; HEAD_DIM]);
    let sums = &mut sums[..dim];
    let (mut maximum, mut total) = (T::Accumulator::NEG_INFINITY, T::Accumulator::ZERO);
    for first in seen.clone().step_by(KEYS) {
        let scores = &mut scores[..KEYS.min(seen.end - first)];
        for (score, token) in scores.iter_mut().zip(first..) {
            *score = scale * lanes::sum_pairs(query, &keys[vector(token)], |q, k| q.widen() * k.widen());
        }
        if let Some(soft_cap) = soft_cap {
            for score in &mut *scores {
                *score = soft_cap.bound(*score);
            }
        }
        let highest = lanes::max(scores).max(maximum);
        let shrink = (maximum - highest).exp();
        maximum = highest;
        total = total * shrink;
        for sum in sums.iter_mut() {
            *sum = *sum * shrink;
        }
        for (&score, token) in scores.iter().zip(first..) {
            let weight = (score - maximum).exp();
            total += weight;
            lanes::map_pairs(sums, &values[vector(token)], |sum, value| weight.mul_add(value, sum));
        }
    }
    for (out, &sum) in out.iter_mut().zip(&*sums) {
        *out = T::narrow(sum / total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{TestBackend, assert_close, first_keys, random};
    use crate::ops::{Attention, AttentionSaved, Scores};
    use crate::{Backend, Buffer, DType};

    const SHAPE: AttentionShape = AttentionShape {
        batch: 2,
        sequence: 150,
        heads: 4,
        kv_heads: 2,
        head_dim: 18,
        scores: Scores::PLAIN,
    };

    const LIMITED: AttentionShape =
        AttentionShape { scores: Scores { width: Some(30), soft_cap: Some(2.0), window: Some(40) }, ..SHAPE };

    fn whole(backend: &TestBackend, shape: AttentionShape, qkv: &[f64], dtype: DType) -> Vec<f64> {
        let starts = first_keys(shape, None).map(|starts| backend.tokens(&starts));
        let (qkv, out) = (backend.buffer(qkv, dtype), backend.blank(SHAPE.rows() * 72, dtype));
        let sums = backend.blank(SHAPE.rows() * SHAPE.heads, dtype.accumulator());
        let saved = AttentionSaved::LogSumExp(sums.view());
        backend.cpu.attention(Attention {
            qkv: qkv.view(),
            starts: starts.as_ref().map(Buffer::view),
            out: out.view(),
            saved,
            shape,
        });
        backend.values(out.view())
    }

    /// The same, some tokens at a time.
    fn in_pieces(
        backend: &TestBackend,
        shape: AttentionShape,
        qkv: &[f64],
        dtype: DType,
        pieces: &[usize],
    ) -> Vec<f64> {
        let (width, capacity) = (SHAPE.qkv_width(), 160);
        let [keys, values] = [(); 2].map(|()| backend.buffer(&vec![f64::NAN; 2 * 2 * capacity * 18], dtype));
        let mut out = vec![0.0; SHAPE.rows() * 72];
        let mut first = 0;
        for &sequence in pieces {
            let rows: Vec<usize> =
                (0..2).flat_map(|b| (first..first + sequence).map(move |t| b * SHAPE.sequence + t)).collect();
            let new: Vec<f64> = rows.iter().flat_map(|row| qkv[row * width..][..width].to_vec()).collect();
            let at: Vec<u32> = rows.iter().map(|row| (row % SHAPE.sequence) as u32).collect();
            let (new, at, some) =
                (backend.buffer(&new, dtype), backend.tokens(&at), backend.blank(rows.len() * 72, dtype));
            backend.cpu.cached_attention(CachedAttention {
                qkv: new.view(),
                positions: at.view(),
                keys: keys.view(),
                values: values.view(),
                out: some.view(),
                shape: AttentionShape { sequence, ..shape },
                capacity,
            });
            for (row, values) in rows.iter().zip(backend.values(some.view()).chunks_exact(72)) {
                out[row * 72..][..72].copy_from_slice(values);
            }
            first += sequence;
        }
        out
    }

    #[test]
    fn any_split_into_calls_gives_the_same_result() {
        let backend = TestBackend::new(1);
        let qkv: Vec<f64> =
            random(SHAPE.rows() * SHAPE.qkv_width(), 1).into_iter().map(|x| 3.0 * x).collect();
        for (dtype, tolerance) in
            [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F16, 2e-3)]
        {
            for shape in [SHAPE, LIMITED] {
                let expected = whole(&backend, shape, &qkv, dtype);
                for pieces in [&[150][..], &[1; 150], &[3, 61, 64, 1, 1, 20]] {
                    assert_close(&in_pieces(&backend, shape, &qkv, dtype, pieces), &expected, tolerance);
                }
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let qkv = random(SHAPE.rows() * SHAPE.qkv_width(), 2);
        TestBackend::same_for_all_threads(|backend| in_pieces(backend, SHAPE, &qkv, DType::F32, &[149, 1]));
    }
}
