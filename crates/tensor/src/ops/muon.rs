//! The operations of Muon beside matrix products. Muon moves a matrix by the nearest orthogonal matrix of its momentum, which
//! the Newton–Schulz iteration approximates by products (<https://kellerjordan.github.io/posts/muon/>).

use super::check::{Check, expect};
use super::control;
use crate::View;

/// Adds a step's gradients `g` to their momenta: `m = μ·m + (1 − μ)·g`, and writes the direction `m`, or with Nesterov's momentum
/// `(1 − μ)·g + μ·m`. Gradients are clipped before. It does nothing if the control's skip flag is set.
#[derive(Clone, Copy, Debug)]
pub struct Momentum<'a> {
    /// Read, `[len]`, gradients' type.
    pub gradient: View<'a>,
    /// Read and written, `[len]`, states' type.
    pub momentum: View<'a>,
    /// Written, `[len]`: the direction.
    pub out: View<'a>,
    /// Read: gradient factor and skip flag ([`control`]).
    pub control: View<'a>,
    /// μ.
    pub beta: f64,
    /// Whether the momentum is Nesterov's.
    pub nesterov: bool,
}

/// `x = x / max(√sum, ε)`.
#[derive(Clone, Copy, Debug)]
pub struct Normalize<'a> {
    /// Read and written.
    pub x: View<'a>,
    /// Read, `[1]`, accumulator type: the sum of the squares of `x`.
    pub sum_of_squares: View<'a>,
    /// ε.
    pub epsilon: f64,
}

/// `x = a·x + b·y`.
#[derive(Clone, Copy, Debug)]
pub struct ScaledSum<'a> {
    /// Read and written.
    pub x: View<'a>,
    /// Read, of the same type.
    pub y: View<'a>,
    /// a, b.
    pub factors: (f64, f64),
}

impl Check for Momentum<'_> {
    fn check(&self) {
        expect("control", self.control, control::LEN);
        expect("momentum", self.momentum, self.gradient.len());
        expect("direction", self.out, self.gradient.len());
    }
}

impl Check for Normalize<'_> {
    fn check(&self) {
        expect("sum of squares", self.sum_of_squares, 1);
    }
}

impl Check for ScaledSum<'_> {
    fn check(&self) {
        expect("y", self.y, self.x.len());
        assert_eq!(self.x.dtype(), self.y.dtype(), "a sum of different types");
    }
}
