//! Loops over slices with a fixed number of independent lanes: they vectorise, and the order of sums never changes.

use super::element::{Element, Real};

/// Two AVX2 registers of f32: enough to hide most of the latency of an addition.
const LANES: usize = 16;

/// `Σ f(x)`.
#[inline]
pub fn sum<T: Element, A: Real>(xs: &[T], f: impl Fn(T) -> A) -> A {
    let mut lanes = [A::ZERO; LANES];
    let (chunks, rest) = xs.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f(x);
    }
    fold(lanes, |a, b| a + b)
}

/// `Σ f(x, y)` over pairs.
#[inline]
pub fn sum_pairs<S: Element, T: Element, A: Real>(xs: &[S], ys: &[T], f: impl Fn(S, T) -> A) -> A {
    let mut lanes = [A::ZERO; LANES];
    let (x_chunks, x_rest) = xs.as_chunks::<LANES>();
    let (y_chunks, y_rest) = ys.as_chunks::<LANES>();
    for (x_chunk, y_chunk) in x_chunks.iter().zip(y_chunks) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(x_chunk).zip(y_chunk) {
            *lane += f(x, y);
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
        *lane += f(x, y);
    }
    fold(lanes, |a, b| a + b)
}

/// `Σ f(x, y, z)` over triples.
#[inline]
pub fn sum_triples<T: Element>(
    xs: &[T],
    ys: &[T],
    zs: &[T],
    f: impl Fn(T, T, T) -> T::Accumulator,
) -> T::Accumulator {
    let mut lanes = [T::Accumulator::ZERO; LANES];
    let (x_chunks, x_rest) = xs.as_chunks::<LANES>();
    let (y_chunks, y_rest) = ys.as_chunks::<LANES>();
    let (z_chunks, z_rest) = zs.as_chunks::<LANES>();
    for ((x_chunk, y_chunk), z_chunk) in x_chunks.iter().zip(y_chunks).zip(z_chunks) {
        for i in 0..LANES {
            lanes[i] += f(x_chunk[i], y_chunk[i], z_chunk[i]);
        }
    }
    for (((lane, &x), &y), &z) in lanes.iter_mut().zip(x_rest).zip(y_rest).zip(z_rest) {
        *lane += f(x, y, z);
    }
    fold(lanes, |a, b| a + b)
}

/// The largest element, −∞ if there is none. NaN is ignored.
#[inline]
pub fn max<T: Element>(xs: &[T]) -> T::Accumulator {
    let mut lanes = [T::Accumulator::NEG_INFINITY; LANES];
    let (chunks, rest) = xs.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = x.widen().max(*lane);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = x.widen().max(*lane);
    }
    fold(lanes, Real::max)
}

/// `x = f(x, y)` over pairs. Short slices and remainders vectorise too, which matters in the epilogues of products.
#[inline]
pub fn map_pairs<T: Element>(
    xs: &mut [T::Accumulator],
    ys: &[T],
    f: impl Fn(T::Accumulator, T::Accumulator) -> T::Accumulator,
) {
    let (x_chunks, x_rest) = xs.as_chunks_mut::<LANES>();
    let (y_chunks, y_rest) = ys[..x_chunks.len() * LANES + x_rest.len()].as_chunks::<LANES>();
    for (x_chunk, y_chunk) in x_chunks.iter_mut().zip(y_chunks) {
        let y_chunk = *y_chunk;
        for (x, y) in x_chunk.iter_mut().zip(y_chunk) {
            *x = f(*x, y.widen());
        }
    }
    for (x, y) in x_rest.iter_mut().zip(y_rest) {
        *x = f(*x, y.widen());
    }
}

/// Combines the lanes as a tree.
#[inline]
fn fold<A: Real>(mut lanes: [A; LANES], f: impl Fn(A, A) -> A) -> A {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}
