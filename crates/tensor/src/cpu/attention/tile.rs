//! Products of small matrices in the first caches: what attention does with its tiles.
//!
//! [`ROWS`] × [`LANES`] sums stay in registers. The right factor is row-major and its width a multiple of
//! [`LANES`]; the left factor is row-major or the transpose of such a matrix.

use std::ops::Range;

use crate::cpu::element::Real;

/// Rows of a block of sums; heights are padded to a multiple of it.
pub const ROWS: usize = 4;

/// Columns of a block of sums: two AVX2 registers of f32.
pub const LANES: usize = 16;

/// Queries, and keys, of a tile.
pub const TILE: usize = 64;

/// What a causal mask leaves of a product of tiles on the diagonal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// The left factor is zero above the diagonal.
    LowerLeft,
    /// The left factor is zero below the diagonal.
    UpperLeft,
    /// Of the result nothing above the diagonal is needed.
    LowerResult,
}

impl Part {
    /// The terms of the sums in the block of rows that starts at `row`.
    fn terms(self, row: usize, inner: usize) -> Range<usize> {
        match self {
            Part::Whole | Part::LowerResult => 0..inner,
            Part::LowerLeft => 0..inner.min(row + ROWS),
            Part::UpperLeft => row.min(inner)..inner,
        }
    }

    fn columns(self, row: usize, columns: usize) -> usize {
        if self == Part::LowerResult { columns.min(row + ROWS) } else { columns }
    }
}

/// `out[rows, columns] (+)= left[rows, inner] · right[inner, columns]`, with the strides of each.
///
/// Rows are padded to [`ROWS`] and columns to [`LANES`], for which there must be room.
pub struct Product<'a, A> {
    pub rows: usize,
    pub columns: usize,
    pub inner: usize,
    pub left: (&'a [A], usize),
    pub right: (&'a [A], usize),
    pub part: Part,
    pub accumulate: bool,
}

impl<A: Real> Product<'_, A> {
    /// With `left` row-major.
    pub fn run(&self, (out, stride): (&mut [A], usize)) {
        let (left, left_stride) = self.left;
        for row in (0..self.rows).step_by(ROWS) {
            let terms = self.part.terms(row, self.inner);
            let line = |i: usize| left[(row + i) * left_stride..][terms.clone()].iter();
            for column in (0..self.part.columns(row, self.columns)).step_by(LANES) {
                let mut sums = self.start(out, row * stride + column, stride);
                let right = self.right_rows(&terms, column);
                let lines = line(0).zip(line(1)).zip(line(2)).zip(line(3));
                for (right, (((&a, &b), &c), &d)) in right.zip(lines) {
                    step(&mut sums, [a, b, c, d], right);
                }
                store(&sums, out, row * stride + column, stride);
            }
        }
    }

    /// With the transpose of `left` row-major: `left` is `[inner, rows]` in memory.
    pub fn run_transposed(&self, (out, stride): (&mut [A], usize)) {
        let (left, left_stride) = self.left;
        for row in (0..self.rows).step_by(ROWS) {
            let terms = self.part.terms(row, self.inner);
            for column in (0..self.part.columns(row, self.columns)).step_by(LANES) {
                let mut sums = self.start(out, row * stride + column, stride);
                let lefts = left[terms.start * left_stride..].chunks_exact(left_stride);
                for (right, left) in self.right_rows(&terms, column).zip(lefts) {
                    let left = left[row..].first_chunk::<ROWS>().expect("rows are padded");
                    step(&mut sums, *left, right);
                }
                store(&sums, out, row * stride + column, stride);
            }
        }
    }

    #[inline]
    fn start(&self, out: &[A], first: usize, stride: usize) -> [[A; LANES]; ROWS] {
        if !self.accumulate {
            return [[A::ZERO; LANES]; ROWS];
        }
        std::array::from_fn(|row| *out[first + row * stride..].first_chunk().expect("columns are padded"))
    }

    #[inline]
    fn right_rows(&self, terms: &Range<usize>, column: usize) -> impl Iterator<Item = &[A; LANES]> {
        let (right, stride) = self.right;
        let rows = right[terms.start * stride..].chunks_exact(stride).take(terms.len());
        rows.map(move |row| row[column..].first_chunk::<LANES>().expect("columns are padded"))
    }
}

#[inline]
fn step<A: Real>(sums: &mut [[A; LANES]; ROWS], left: [A; ROWS], right: &[A; LANES]) {
    for (sums, left) in sums.iter_mut().zip(left) {
        for (sum, &right) in sums.iter_mut().zip(right) {
            *sum = left.mul_add(right, *sum);
        }
    }
}

#[inline]
fn store<A: Real>(sums: &[[A; LANES]; ROWS], to: &mut [A], start: usize, stride: usize) {
    for (row, sums) in sums.iter().enumerate() {
        to[start + row * stride..][..LANES].copy_from_slice(sums);
    }
}
