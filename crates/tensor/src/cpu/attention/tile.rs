//! Products of small matrices in the first-level caches, for attention's tiles.
//!
//! [`ROWS`] × [`LANES`] sums stay in registers. The right factor is row-major with a width that is a multiple of
//! [`LANES`]. The left factor is row-major or the transpose of such a matrix.

use std::ops::Range;

use crate::cpu::element::Real;

/// Rows of a block of sums. Heights are padded to a multiple of it.
pub const ROWS: usize = 4;

/// Columns of a block of sums: two AVX2 registers of f32.
pub const LANES: usize = 16;

/// Queries, and keys, per tile.
pub const TILE: usize = 64;

/// Which part of a product of tiles on the diagonal a causal mask leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CausalPart {
    /// All of it.
    Whole,
    /// The left factor is zero above the diagonal.
    LowerLeft,
    /// The left factor is zero below the diagonal.
    UpperLeft,
    /// Only the part of the result on and below the diagonal is needed.
    LowerResult,
}

impl CausalPart {
    /// The range of the inner dimension for the block of rows that starts at `row`.
    fn terms(self, row: usize, inner: usize) -> Range<usize> {
        match self {
            CausalPart::Whole | CausalPart::LowerResult => 0..inner,
            CausalPart::LowerLeft => 0..inner.min(row + ROWS),
            CausalPart::UpperLeft => row.min(inner)..inner,
        }
    }

    fn columns(self, row: usize, columns: usize) -> usize {
        if self == CausalPart::LowerResult { columns.min(row + ROWS) } else { columns }
    }
}

/// `out[rows, columns] (+)= left[rows, inner] · right[inner, columns]`, each with its stride.
///
/// Rows are padded to [`ROWS`] and columns to [`LANES`]; the buffers must have room for the padding.
pub struct Product<'a, A> {
    pub rows: usize,
    pub columns: usize,
    pub inner: usize,
    pub left: (&'a [A], usize),
    pub right: (&'a [A], usize),
    pub part: CausalPart,
    pub accumulate: bool,
}

impl<A: Real> Product<'_, A> {
    /// `left` is row-major.
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

    /// `left` is transposed: `[inner, rows]` in memory.
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
