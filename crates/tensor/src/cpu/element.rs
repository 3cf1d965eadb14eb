//! The element types of CPU kernels, and the types in which they accumulate.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::DType;

/// An accumulator type: f32, or f64 for finite differences.
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
    /// Less than every number.
    const NEG_INFINITY: Self;
    /// Rounds from f64.
    fn from_f64(x: f64) -> Self;
    /// Widens to f64.
    fn to_f64(self) -> f64;
    /// `self · a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// `eˣ`, written so that loops vectorise.
    fn exp(self) -> Self;
    /// The error function.
    fn erf(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// The larger of two numbers.
    fn max(self, other: Self) -> Self;
}

/// A storage type of tensors.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// Its accumulator type.
    type Accumulator: Real;
    /// The same type as a run-time value.
    const DTYPE: DType;
    /// Widens.
    fn widen(self) -> Self::Accumulator;
    /// Rounds to nearest even.
    fn narrow(x: Self::Accumulator) -> Self;

    /// Widens a slice.
    #[inline]
    fn widen_slice(from: &[Self], to: &mut [Self::Accumulator]) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = from.widen();
        }
    }

    /// Rounds a slice to nearest even.
    #[inline]
    fn narrow_slice(from: &[Self::Accumulator], to: &mut [Self]) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = Self::narrow(from);
        }
    }
}

macro_rules! real {
    ($t:ty, $dtype:expr, $exp:expr, $erf:expr) => {
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
            fn erf(self) -> Self {
                $erf(self)
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                <$t>::tanh(self)
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
            fn narrow(x: $t) -> Self {
                x
            }
        }
    };
}

real!(f32, DType::F32, exp_f32, libm::erff);
real!(f64, DType::F64, f64::exp, libm::erf);

macro_rules! half_width {
    ($t:ty, $dtype:expr, $widen:expr, $round:expr $(, $slices:item)*) => {
        impl Element for $t {
            type Accumulator = f32;
            const DTYPE: DType = $dtype;
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(x: f32) -> Self {
                $round(x)
            }
            $($slices)*
        }
    };
}

half_width!(bf16, DType::BF16, widen_bf16, round_bf16);
// Loops over single f16 do not vectorise; the conversions of `half` for whole slices do.
half_width!(
    f16,
    DType::F16,
    f16::to_f32,
    f16::from_f32,
    #[inline]
    fn widen_slice(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    },
    #[inline]
    fn narrow_slice(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }
);

/// `bf16::to_f32`, except that NaN keeps its bits.
#[expect(clippy::inline_always, reason = "loops over it vectorise only if it is inlined")]
#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// `bf16::from_f32` without its branches.
#[expect(clippy::inline_always, reason = "loops over it vectorise only if it is inlined")]
#[inline(always)]
fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest_even = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet_nan = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet_nan } else { nearest_even } as u16)
}

/// `eˣ` to about 1 ulp: `2ⁿ · p(r)` with `r = x − n·ln 2` in two parts. It has no branches, so loops vectorise.
///
/// Below [`LOWEST`] the result is 0. Subnormal results would be correct but slow, and softmax produces many of them.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5·2²³: adding it to a number rounds the number to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // The bounds keep the exponents below in range. From 89 on the result is infinite. NaN becomes a bound.
    let bounded = if x > LOWEST { x } else { LOWEST };
    let bounded = if bounded < 89.0 { bounded } else { 89.0 };
    let rounded = bounded.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, bounded));
    let p = 1.987_569_1e-4_f32.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r + 1.0);
    // 2ⁿ in two factors, so that results just below overflow are correct.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    let y = p * power(n >> 1) * power(n - (n >> 1));
    let y = if x < LOWEST { 0.0 } else { y };
    if x.is_nan() { x } else { y }
}

/// A little above where `eˣ` becomes subnormal.
const LOWEST: f32 = -87.0;

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
        assert_eq!(exp_f32(f32::NEG_INFINITY).to_bits(), 0);
        assert!(exp_f32(f32::INFINITY).is_infinite());
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn rounding_to_bf16_is_the_librarys() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(round_bf16(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }
}
