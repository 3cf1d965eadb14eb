//! Divides the work of one operation among the rank's threads.
//!
//! Work is split into contiguous pieces, one per thread. Every operand is split with it, so a piece owns what it
//! writes. The split never changes a result; see [`CHUNKS`] for sums.

use std::ops::Range;

/// With fewer elements per piece, another thread does not pay off. Tests use a small value, to test all splits.
const MIN_PIECE: usize = if cfg!(test) { 1 << 6 } else { 1 << 15 };

/// A sum over all elements has at most this many partial sums, for any number of threads.
pub const CHUNKS: usize = 64;

/// The number of threads that share an operation. With one, rayon is not used.
#[derive(Clone, Copy, Debug)]
pub struct Threads(pub usize);

/// Data that can be split in two.
pub trait Split: Sized + Send {
    /// The first `at` items and the rest.
    fn split(self, at: usize) -> (Self, Self);
}

impl Split for () {
    fn split(self, _: usize) -> (Self, Self) {
        ((), ())
    }
}

impl<T: Sync> Split for &[T] {
    fn split(self, at: usize) -> (Self, Self) {
        self.split_at(at)
    }
}

impl<T: Send> Split for &mut [T] {
    fn split(self, at: usize) -> (Self, Self) {
        self.split_at_mut(at)
    }
}

impl<S: Split> Split for Option<S> {
    fn split(self, at: usize) -> (Self, Self) {
        self.map_or((None, None), |whole| {
            let (left, right) = whole.split(at);
            (Some(left), Some(right))
        })
    }
}

/// A row-major matrix in a slice, split between rows of the given width.
#[derive(Clone, Copy, Debug)]
pub struct Rows<S>(pub S, pub usize);

impl<S: Split> Split for Rows<S> {
    fn split(self, at: usize) -> (Self, Self) {
        let (left, right) = self.0.split(at * self.1);
        (Rows(left, self.1), Rows(right, self.1))
    }
}

macro_rules! split_tuple {
    ($($name:ident)+) => {
        impl<$($name: Split),+> Split for ($($name,)+) {
            #[allow(non_snake_case, reason = "the type's name serves as the variable's")]
            fn split(self, at: usize) -> (Self, Self) {
                let ($($name,)+) = self;
                $(let $name = $name.split(at);)+
                (($($name.0,)+), ($($name.1,)+))
            }
        }
    };
}

split_tuple!(A B);
split_tuple!(A B C);
split_tuple!(A B C D);
split_tuple!(A B C D E);

impl Threads {
    /// Runs `body` over `items` items of `cost` elements each, split into contiguous pieces that run in parallel.
    ///
    /// `body` gets the range of its items and its piece of `parts`.
    pub fn each<P: Split>(self, items: usize, cost: usize, parts: P, body: impl Fn(Range<usize>, P) + Sync) {
        let worthwhile = (items * cost).div_ceil(MIN_PIECE);
        let pieces = self.0.min(items).min(worthwhile).max(1);
        halve(0..items, pieces, parts, &body);
    }

    /// Like [`Threads::each`], but every piece also gets its own equal share of `scratch`.
    pub fn each_with_scratch<P: Split>(
        self,
        items: usize,
        scratch: &mut [u8],
        parts: P,
        body: impl Fn(Range<usize>, P, &mut [u8]) + Sync,
    ) {
        let pieces = self.0.min(items).max(1);
        let bytes = scratch.len() / self.0;
        share(0..items, pieces, parts, Rows(scratch, bytes), &body);
    }

    /// The sum over `0..len`, where `body` sums a range. The order of additions depends on `len` alone.
    pub fn sum(self, len: usize, body: impl Fn(Range<usize>) -> f64 + Sync) -> f64 {
        let size = len.div_ceil(CHUNKS).next_multiple_of(64).max(64);
        let chunks = len.div_ceil(size);
        let mut sums = [0.0; CHUNKS];
        self.each(chunks, size, &mut sums[..chunks], |range, sums| {
            for (chunk, sum) in range.zip(sums) {
                *sum = body(chunk * size..len.min((chunk + 1) * size));
            }
        });
        sums[..chunks].iter().sum()
    }
}

// What is done to a piece is not a type parameter, so that rayon's code is compiled once for each type of parts and not for
// each operation.
type Body<'a, P> = &'a (dyn Fn(Range<usize>, P) + Sync);
type BodyWithScratch<'a, P> = &'a (dyn Fn(Range<usize>, P, &mut [u8]) + Sync);

fn halve<P: Split>(items: Range<usize>, pieces: usize, parts: P, body: Body<P>) {
    if pieces == 1 {
        return body(items, parts);
    }
    let left = pieces / 2;
    let at = items.len() * left / pieces;
    let middle = items.start + at;
    let (first, second) = parts.split(at);
    rayon::join(
        || halve(items.start..middle, left, first, body),
        || halve(middle..items.end, pieces - left, second, body),
    );
}

fn share<P: Split>(
    items: Range<usize>,
    pieces: usize,
    parts: P,
    scratch: Rows<&mut [u8]>,
    body: BodyWithScratch<P>,
) {
    if pieces == 1 {
        return body(items, parts, &mut scratch.0[..scratch.1]);
    }
    let left = pieces / 2;
    let at = items.len() * left / pieces;
    let middle = items.start + at;
    let (first, second) = parts.split(at);
    let (scratch_left, scratch_right) = scratch.split(left);
    rayon::join(
        || share(items.start..middle, left, first, scratch_left, body),
        || share(middle..items.end, pieces - left, second, scratch_right, body),
    );
}
