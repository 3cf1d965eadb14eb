//! Matrices in 8 bits for products: see [`Float8`] for the formats.
//!
//! A matrix has one scale, which follows from its own largest number. So no state outlives an operation, and what a rank
//! computes does not depend on steps before.

use super::Check;
use super::check::{expect, expect_type};
use crate::{DType, Float8, View};

/// Rows and columns of matrices in 8 bits are multiples of this, which libraries' products need.
pub const FLOAT8_MULTIPLE: usize = 16;

/// What the factors of a product in 8 bits have beside their codes, which are bytes.
///
/// The numbers that a sum goes over are adjacent in memory, in both factors. So the weight of the backward of the input is
/// transposed, `[inputs, outputs]`, and so are the factors of the gradient of the weight, `[outputs, rows]` and `[inputs,
/// rows]`.
#[derive(Clone, Copy, Debug)]
pub struct Float8Factors<'a> {
    /// Of the factor with rows: `x` of the forward, `dy` of the backwards.
    pub left: Float8Scale<'a>,
    /// Of the other factor.
    pub right: Float8Scale<'a>,
}

/// The format of codes, and what their numbers are multiplied by.
#[derive(Clone, Copy, Debug)]
pub struct Float8Scale<'a> {
    /// The format.
    pub format: Float8,
    /// Read, `[1]`, fp32: the factor that makes numbers of codes.
    pub inverse: View<'a>,
}

/// The numbers that become codes.
#[derive(Clone, Copy, Debug)]
pub enum Float8Source<'a> {
    /// These.
    Numbers(View<'a>),
    /// GELU of these, tanh form. It is rounded once, to 8 bits.
    Gelu(View<'a>),
}

impl<'a> Float8Source<'a> {
    /// What is read.
    pub fn view(self) -> View<'a> {
        match self {
            Float8Source::Numbers(view) | Float8Source::Gelu(view) => view,
        }
    }
}

/// Converts a matrix to 8 bits: its codes, those of the transposed matrix, or both, and the inverse of its scale.
///
/// The [scale](Float8::scale) follows from the largest finite number. A number that is not finite becomes NaN.
#[derive(Clone, Copy, Debug)]
pub struct CastToFloat8<'a> {
    /// Read, fp32, bf16 or fp16, `[rows, columns]`.
    pub x: Float8Source<'a>,
    /// Written, bytes, `[rows, columns]`.
    pub codes: Option<View<'a>>,
    /// Written, bytes, `[columns, rows]`.
    pub transposed: Option<View<'a>>,
    /// The format, and where the inverse of the scale is written.
    pub scale: Float8Scale<'a>,
    /// Rows of `x`.
    pub rows: usize,
    /// Columns of `x`.
    pub columns: usize,
}

impl Check for CastToFloat8<'_> {
    fn check(&self) {
        let (len, x) = (self.rows * self.columns, self.x.view());
        expect("x", x, len);
        assert!(
            matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16),
            "a matrix of {:?} in 8 bits",
            x.dtype()
        );
        for codes in [self.codes, self.transposed].into_iter().flatten() {
            expect("codes", codes, len);
            expect_type("codes", codes, DType::U8);
        }
        self.scale.check();
        for size in [self.rows, self.columns] {
            assert!(size.is_multiple_of(FLOAT8_MULTIPLE), "{size} is no multiple of {FLOAT8_MULTIPLE}");
        }
    }
}

impl Float8Scale<'_> {
    fn check(&self) {
        expect("inverse of the scale", self.inverse, 1);
        expect_type("inverse of the scale", self.inverse, DType::F32);
    }
}

impl Float8Factors<'_> {
    /// Panics unless these are the factors of a product with these views.
    pub(super) fn check(factors: Option<Self>, left: View, right: View) {
        if let Some(Float8Factors { left: a, right: b }) = factors {
            for view in [left, right] {
                expect_type("factor in 8 bits", view, DType::U8);
            }
            a.check();
            b.check();
        }
    }
}
