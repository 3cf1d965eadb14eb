//! RMSNorm of rows whose columns are divided among tensor-parallel ranks: the ranks sum [`RowDots`] between two operations.

use super::check::{expect, expect_type};
use super::{Check, Gradient};
use crate::View;

/// `out[row] = Σ_columns x ∘ y`, or `Σ_columns x ∘ y ∘ weight`.
#[derive(Clone, Copy, Debug)]
pub struct RowDots<'a> {
    /// Read, `[rows, width]`.
    pub x: View<'a>,
    /// Read, `[rows, width]`.
    pub y: View<'a>,
    /// Read, `[width]`.
    pub weight: Option<View<'a>>,
    /// Written, `[rows]` in the accumulator type.
    pub out: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Columns on this rank.
    pub width: usize,
}

/// `out = x · rstd · weight` with `rstd = 1/√(squares / whole + ε)`.
#[derive(Clone, Copy, Debug)]
pub struct SplitNorm<'a> {
    /// Read, `[rows, width]`.
    pub x: View<'a>,
    /// Read, `[width]`.
    pub weight: View<'a>,
    /// Read, `[rows]`: the sums of the squares of whole rows.
    pub squares: View<'a>,
    /// Written, `[rows, width]`.
    pub out: View<'a>,
    /// Written, `[rows, 2]` in the accumulator type, as by a norm: 0 and rstd.
    pub statistics: View<'a>,
    /// Added to the mean square.
    pub epsilon: f64,
    /// Tokens.
    pub rows: usize,
    /// Columns on this rank.
    pub width: usize,
    /// Columns of all ranks.
    pub whole: usize,
}

/// Backward of [`SplitNorm`]: `dx = rstd · (dy ∘ weight − x · rstd² · dots / whole)`. `dx` may be `dy`.
#[derive(Clone, Copy, Debug)]
pub struct SplitNormBackward<'a> {
    /// Read, `[rows, width]`.
    pub dy: View<'a>,
    /// Read, `[rows, width]`.
    pub x: View<'a>,
    /// Read, `[rows, 2]`.
    pub statistics: View<'a>,
    /// Read, `[width]`.
    pub weight: View<'a>,
    /// Read, `[rows]`: `Σ dy ∘ x ∘ weight` over whole rows.
    pub dots: View<'a>,
    /// Written, `[rows, width]`.
    pub dx: View<'a>,
    /// Written, `[width]`, unless the weights are frozen.
    pub dweight: Option<Gradient<'a>>,
    /// Tokens.
    pub rows: usize,
    /// Columns on this rank.
    pub width: usize,
    /// Columns of all ranks.
    pub whole: usize,
}

impl Check for RowDots<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.width);
        expect("y", self.y, self.rows * self.width);
        expect("out", self.out, self.rows);
        expect_type("out", self.out, self.x.dtype().accumulator());
        if let Some(weight) = self.weight {
            expect("weight", weight, self.width);
        }
    }
}

impl Check for SplitNorm<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.width);
        expect("weight", self.weight, self.width);
        expect("squares", self.squares, self.rows);
        expect("out", self.out, self.rows * self.width);
        expect("statistics", self.statistics, self.rows * 2);
    }
}

impl Check for SplitNormBackward<'_> {
    fn check(&self) {
        for (name, view) in [("dy", self.dy), ("x", self.x), ("dx", self.dx)] {
            expect(name, view, self.rows * self.width);
        }
        expect("statistics", self.statistics, self.rows * 2);
        expect("weight", self.weight, self.width);
        expect("dots", self.dots, self.rows);
        if let Some(dweight) = self.dweight {
            expect("dweight", dweight.view, self.width);
        }
    }
}
