//! The element types of CPU kernels and the arithmetic that sums are kept in.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use half::{bf16, f16};

use crate::DType;

/// A type that sums are kept in: f32, or f64 for finite differences.
pub trait Real:
    Element<Accumulator = Self>
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + Sum
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Below every number.
    const NEG_INFINITY: Self;
    /// Rounds from f64.
    fn from_f64(x: f64) -> Self;
    /// Widens to f64.
    fn to_f64(self) -> f64;
    /// `self · a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// `eˣ`, written so that loops over it vectorise.
    fn exp(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// The larger of two.
    fn max(self, other: Self) -> Self;
}

/// A type that tensors are stored in.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// The type that sums over this one are kept in.
    type Accumulator: Real;
    /// Its name at run time.
    const DTYPE: DType;
    /// Widens.
    fn widen(self) -> Self::Accumulator;
    /// Rounds to nearest even.
    fn round(x: Self::Accumulator) -> Self;
}

macro_rules! real {
    ($t:ty, $dtype:expr, $exp:expr) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = <$t>::NEG_INFINITY;
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                <$t>::mul_add(self, a, b)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                <$t>::ln(self)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other { self } else { other }
            }
        }
        impl Element for $t {
            type Accumulator = $t;
            const DTYPE: DType = $dtype;
            #[inline(always)]
            fn widen(self) -> $t {
                self
            }
            #[inline(always)]
            fn round(x: $t) -> Self {
                x
            }
        }
    };
}

real!(f32, DType::F32, exp_f32);
real!(f64, DType::F64, f64::exp);

macro_rules! half_width {
    ($t:ty, $dtype:expr) => {
        impl Element for $t {
            type Accumulator = f32;
            const DTYPE: DType = $dtype;
            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn round(x: f32) -> Self {
                <$t>::from_f32(x)
            }
        }
    };
}

half_width!(bf16, DType::BF16);
half_width!(f16, DType::F16);

/// `eˣ` to about 1 ulp: `2ⁿ · p(r)` with `r = x − n·ln 2` in two parts. No branches, so loops vectorise.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Beyond these the result is 0 or infinity; clamping keeps the exponent arithmetic in range.
    let clamped = x.clamp(-104.0, 89.0);
    let n = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.000_000_1e-1] {
        p = p.mul_add(r, c);
    }
    let p = p.mul_add(r * r, r + 1.0);
    // 2ⁿ in two factors, so that subnormal results and the last step before overflow are right.
    let half = (n * 0.5).floor();
    let scale = |e: f32| f32::from_bits((((e as i32) + 127) << 23) as u32);
    let y = p * scale(half) * scale(n - half);
    // NaN passes through `clamp`, but not through the conversion to an integer.
    if x.is_nan() { x } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_of_the_library() {
        let mut worst = 0.0_f64;
        for i in -200_000..=200_000 {
            let x = i as f32 * 4.3e-4;
            let (ours, exact) = (f64::from(exp_f32(x)), f64::from(x).exp());
            worst = worst.max((ours - exact).abs() / exact);
        }
        assert!(worst < 2.4e-7, "worst relative error {worst:e}");
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert!(exp_f32(f32::NAN).is_nan());
    }
}
