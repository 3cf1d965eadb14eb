//! Causal self-attention in tiles of 64 queries by 64 keys (arXiv 2205.14135), with grouped key and value heads.
//!
//! "Plain" attention runs the same tiles and also writes the probabilities to memory. Its backward reads them, while
//! flash attention recomputes them. Tiles of keys that no query of a tile attends to are skipped.

mod backward;
mod cached;
mod forward;
mod sliced;
#[cfg(test)]
mod sliced_tests;
#[cfg(test)]
mod tests;
mod tile;

pub use backward::backward;
pub use cached::cached;
pub use forward::forward;
pub use sliced::{backward as sliced_backward, forward as sliced_forward};

use super::element::{Element, Real};
use crate::ops::AttentionShape;
use tile::{LANES, TILE};

/// The largest head size that fits into the workspace.
pub const HEAD_DIM: usize = 256;

/// Scratch per thread: the backward's tiles in f64, and as much again for the gradients of queries.
pub const SCRATCH_BYTES: usize = 2 << 20;

/// The position of one head's vectors in an interleaved tensor of one sample.
#[derive(Clone, Copy)]
struct Head {
    /// Index of the first element.
    start: usize,
    /// Elements from one token to the next.
    stride: usize,
    /// Elements of a vector.
    dim: usize,
}

impl Head {
    /// Head `index` of sample `batch` in `qkv`. Heads are ordered queries, keys, values.
    fn of_qkv(shape: AttentionShape, batch: usize, index: usize) -> Self {
        let stride = shape.qkv_width();
        Head { start: batch * shape.sequence * stride + index * shape.head_dim, stride, dim: shape.head_dim }
    }

    /// Head `index` of sample `batch` in the output.
    fn of_out(shape: AttentionShape, batch: usize, index: usize) -> Self {
        let stride = shape.heads * shape.head_dim;
        Head { start: batch * shape.sequence * stride + index * shape.head_dim, stride, dim: shape.head_dim }
    }

    /// The range of one token's vector.
    fn vector(self, token: usize) -> std::ops::Range<usize> {
        let start = self.start + token * self.stride;
        start..start + self.dim
    }
}

/// Elements of a padded row of a tile.
fn padded(dim: usize) -> usize {
    dim.next_multiple_of(LANES)
}

fn softmax_scale<A: Real>(shape: AttentionShape) -> A {
    A::from_f64(shape.scale())
}

/// The first key of the first tile that a query, and so any later query, attends to.
fn first_tile(starts: Option<&[u32]>, query: usize) -> usize {
    starts.map_or(0, |starts| starts[query] as usize / TILE * TILE)
}

/// Copies vectors `first..first + count` into rows of `tile`, multiplied by `factor`. Padding is set to zero.
fn pack<T: Element>(
    from: &[T],
    head: Head,
    (first, count): (usize, usize),
    factor: T::Accumulator,
    tile: &mut [T::Accumulator],
) {
    for (i, row) in tile.chunks_exact_mut(padded(head.dim)).take(TILE).enumerate() {
        if i >= count {
            row.fill(T::Accumulator::ZERO);
            continue;
        }
        let (row, rest) = row.split_at_mut(head.dim);
        for (to, from) in row.iter_mut().zip(&from[head.vector(first + i)]) {
            *to = from.widen() * factor;
        }
        rest.fill(T::Accumulator::ZERO);
    }
}

/// Like [`pack`], but each vector becomes a column of `[dim, TILE]`, and the padding is undefined.
fn pack_transposed<T: Element>(
    from: &[T],
    head: Head,
    (first, count): (usize, usize),
    factor: T::Accumulator,
    tile: &mut [T::Accumulator],
) {
    const AT_ONCE: usize = 8;
    for i in (0..count).step_by(AT_ONCE) {
        let vectors: [&[T]; AT_ONCE] =
            std::array::from_fn(|j| &from[head.vector(first + (i + j).min(count - 1))]);
        for (dim, row) in tile.chunks_exact_mut(TILE).take(head.dim).enumerate() {
            for (to, vector) in row[i..i + AT_ONCE].iter_mut().zip(vectors) {
                *to = vector[dim].widen() * factor;
            }
        }
    }
}

/// Splits ranges off the front of a thread's scratch.
struct Scratch<'a, A>(&'a mut [A]);

impl<'a, A: Real> Scratch<'a, A> {
    fn take(&mut self, len: usize) -> &'a mut [A] {
        let (piece, rest) = std::mem::take(&mut self.0).split_at_mut(len);
        self.0 = rest;
        piece
    }
}
