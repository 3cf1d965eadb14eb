//! Quantised numbers for collectives: small integers with one scale per block.

use super::Check;
use super::check::{expect, expect_type};
use crate::{DType, View};

/// Bits of a quantised integer, in two's complement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bits {
    /// From −7 to 7.
    Four,
    /// From −127 to 127.
    Eight,
}

impl Bits {
    /// Their number.
    pub const fn count(self) -> usize {
        match self {
            Bits::Four => 4,
            Bits::Eight => 8,
        }
    }

    /// The largest integer that is used. The smallest is its negative, so quantisation is symmetric.
    pub const fn largest(self) -> u8 {
        match self {
            Bits::Four => 7,
            Bits::Eight => 127,
        }
    }

    /// Integers in a 32-bit word.
    pub const fn per_word(self) -> usize {
        32 / self.count()
    }
}

/// The number of elements must be a multiple of this, so that they fill whole words.
pub const UNIT: usize = 8;

/// A block whose numbers are all smaller in magnitude is quantised to zeros.
pub const LEAST: f32 = f32::from_bits(27 << 23); // 2^-100

/// For each block `scale = max |x| / largest` and `codes = x · (largest / max |x|)`, rounded to nearest, ties to even.
/// All arithmetic is fp32, so the codes have the same bits on every device.
///
/// If a block has a number that is not finite, its scale is NaN, so that the overflow is noticed.
#[derive(Clone, Copy, Debug)]
pub struct Quantize<'a> {
    /// Read, fp32, bf16 or fp16, `[elements]`; a multiple of [`UNIT`].
    pub x: View<'a>,
    /// Written, u32: integers packed into words, the first in the lowest bits.
    pub codes: View<'a>,
    /// Written, fp32, `[⌈elements / block⌉]`.
    pub scales: View<'a>,
    /// Numbers that share a scale: a multiple of [`UNIT`]. The last block may be shorter.
    pub block: usize,
    /// Bits of a code.
    pub bits: Bits,
}

/// `out (+)= codes · scales`: the inverse of [`Quantize`], except for rounding.
#[derive(Clone, Copy, Debug)]
pub struct Restore<'a> {
    /// Read, the codes of [`Quantize`].
    pub codes: View<'a>,
    /// Read, the scales of [`Quantize`].
    pub scales: View<'a>,
    /// Written, or added to, fp32, bf16 or fp16, `[elements]`.
    pub out: View<'a>,
    /// Add to `out` instead of overwriting it.
    pub accumulate: bool,
    /// Numbers that share a scale.
    pub block: usize,
    /// Bits of a code.
    pub bits: Bits,
}

impl Check for Quantize<'_> {
    fn check(&self) {
        check(self.x, self.codes, self.scales, self.block, self.bits);
    }
}

impl Check for Restore<'_> {
    fn check(&self) {
        check(self.out, self.codes, self.scales, self.block, self.bits);
    }
}

fn check(numbers: View, codes: View, scales: View, block: usize, bits: Bits) {
    let elements = numbers.len();
    assert!(
        !matches!(numbers.dtype(), DType::F64 | DType::U32),
        "blocks are of fp32, bf16 or fp16, and not of {:?}",
        numbers.dtype()
    );
    assert!(block > 0 && block.is_multiple_of(UNIT), "blocks of {block}, which is no multiple of {UNIT}");
    assert!(elements.is_multiple_of(UNIT), "{elements} numbers in blocks, which is no multiple of {UNIT}");
    expect("codes", codes, elements / bits.per_word());
    expect_type("codes", codes, DType::U32);
    expect("scales", scales, elements.div_ceil(block));
    expect_type("scales", scales, DType::F32);
}
