//! Blocks of small integers for collectives: symmetric quantisation with one scale per block, as in ZeRO++ (arXiv
//! 2306.10209).
//!
//! Quantised numbers travel as bytes ([`DType::U8`]). A *slice* is a number of elements that travels as one piece:
//!
//! ```text
//! codes   ⌈elements · bits / 8⌉ bytes, padded with zeros to whole words of 4 bytes; a first code of 4 bits is in the low half
//! scales  fp32, one per block; the last block may be shorter
//! padding zeros, up to a multiple of 16 bytes
//! ```
//!
//! A buffer is one slice after another, all of the same number of elements, so an all-gather or an all-to-all whose chunks
//! are whole slices moves codes with their scales.
//!
//! All arithmetic is fp32 with every rounding specified, so all devices compute the same bits.

use std::ops::RangeInclusive;

use super::Check;
use super::Gradient;
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
}

/// How numbers are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockFormat {
    /// Bits of a code.
    pub bits: Bits,
    /// Numbers that share a scale: a power of two in [`BlockFormat::BLOCKS`].
    pub block: usize,
}

/// The smallest piece of a GPU's memory access, to which slices are padded.
const SLICE_ALIGNMENT: usize = 16;

const SCALE_BYTES: usize = DType::F32.bytes();

impl BlockFormat {
    /// The block sizes that the kernels support.
    pub const BLOCKS: RangeInclusive<usize> = 32..=4096;

    /// Number of blocks of a slice.
    pub const fn blocks(self, elements: usize) -> usize {
        elements.div_ceil(self.block)
    }

    /// Bytes of the codes of a slice, with padding. The scales begin there.
    pub const fn code_bytes(self, elements: usize) -> usize {
        (elements * self.bits.count()).div_ceil(8).next_multiple_of(SCALE_BYTES)
    }

    /// Bytes of a slice.
    pub const fn slice_bytes(self, elements: usize) -> usize {
        let bytes = self.code_bytes(elements) + SCALE_BYTES * self.blocks(elements);
        bytes.next_multiple_of(SLICE_ALIGNMENT)
    }
}

/// If all numbers of a block are smaller in magnitude, all its codes and its scale are zero.
pub const MIN_BLOCK_MAXIMUM: f32 = f32::from_bits(27 << 23); // 2^-100

/// Adding it to a number below 2²² rounds the number to the nearest integer, ties to even. The integer is then in the low bits.
pub(crate) const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³

/// The integer nearest to `x · inverse`, ties to even: the product is exact.
fn nearest_integer(x: f32, inverse: f32) -> f32 {
    x.mul_add(inverse, ROUND) - ROUND
}

/// Rounds numbers on the host to what [`Quantize`] and [`Dequantize`] make of them.
pub fn round_to_codes(numbers: &mut [f32], format: BlockFormat) {
    let largest = f32::from(format.bits.largest());
    for block in numbers.chunks_mut(format.block) {
        let most = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let (scale, inverse) = match most {
            _ if !block.iter().all(|x| x.is_finite()) => (f32::NAN, 0.0),
            most if most < MIN_BLOCK_MAXIMUM => (0.0, 0.0),
            most => (most / largest, largest / most),
        };
        for x in block {
            *x = nearest_integer(*x, inverse).mul_add(scale, 0.0);
        }
    }
}

/// Quantises slices.
///
/// For each block `scale = max |x| / largest` and `code = x · (largest / max |x|)`: both quotients are rounded to fp32, and the
/// exact product to the nearest integer, ties to even. If a block has a number that is not finite, its scale is NaN, so that
/// the overflow is noticed.
#[derive(Clone, Copy, Debug)]
pub struct Quantize<'a> {
    /// Read, fp32, bf16 or fp16, `[slices, elements]`.
    pub x: View<'a>,
    /// Written, bytes, `[slices, slice_bytes]`.
    pub out: View<'a>,
    /// Number of slices.
    pub slices: usize,
    /// The format of `out`.
    pub format: BlockFormat,
}

/// `out (+)= Σ_parts codes · scales`: the inverse of [`Quantize`] except for rounding, and the sum over what several ranks
/// have sent.
///
/// The sum is in fp32, in the order of the parts after what is in `out`, by fused multiply-adds. It is rounded to the type of
/// `out` once.
#[derive(Clone, Copy, Debug)]
pub struct Dequantize<'a> {
    /// Read, bytes, `[parts, slices, slice_bytes]`.
    pub codes: View<'a>,
    /// Written, or added to, fp32, bf16 or fp16, `[slices, elements]`.
    pub out: Gradient<'a>,
    /// Numbers that are summed.
    pub parts: usize,
    /// Slices in each part.
    pub slices: usize,
    /// The format of `codes`.
    pub format: BlockFormat,
}

/// [`Dequantize`] and [`Quantize`] in one pass: the sums over parts are quantised again and stay in fp32 in between.
#[derive(Clone, Copy, Debug)]
pub struct Requantize<'a> {
    /// Read, bytes, `[parts, slices, slice_bytes]`.
    pub codes: View<'a>,
    /// Written, bytes, `[slices, slice_bytes]`.
    pub out: View<'a>,
    /// Numbers that are summed.
    pub parts: usize,
    /// Slices in each part.
    pub slices: usize,
    /// Elements of a slice.
    pub elements: usize,
    /// The format of `codes` and `out`.
    pub format: BlockFormat,
}

impl Quantize<'_> {
    /// Elements of a slice.
    pub fn elements(&self) -> usize {
        self.x.len() / self.slices
    }
}

impl Dequantize<'_> {
    /// Elements of a slice.
    pub fn elements(&self) -> usize {
        self.out.view.len() / self.slices
    }
}

impl Check for Quantize<'_> {
    fn check(&self) {
        check_numbers("x", self.x, self.slices);
        check_slices("out", self.out, self.slices, self.elements(), self.format);
    }
}

impl Check for Dequantize<'_> {
    fn check(&self) {
        check_numbers("out", self.out.view, self.slices);
        check_slices("codes", self.codes, self.parts * self.slices, self.elements(), self.format);
        assert!(self.parts > 0, "a sum over no parts");
    }
}

impl Check for Requantize<'_> {
    fn check(&self) {
        check_slices("codes", self.codes, self.parts * self.slices, self.elements, self.format);
        check_slices("out", self.out, self.slices, self.elements, self.format);
        assert!(self.parts > 0, "a sum over no parts");
    }
}

fn check_numbers(name: &str, numbers: View, slices: usize) {
    assert!(
        matches!(numbers.dtype(), DType::F32 | DType::BF16 | DType::F16),
        "{name} is {:?}, and blocks are of fp32, bf16 or fp16",
        numbers.dtype()
    );
    assert!(
        slices > 0 && numbers.len().is_multiple_of(slices),
        "{} numbers are not {slices} equal slices",
        numbers.len()
    );
}

fn check_slices(name: &str, bytes: View, slices: usize, elements: usize, format: BlockFormat) {
    let BlockFormat { block, .. } = format;
    assert!(
        BlockFormat::BLOCKS.contains(&block) && block.is_power_of_two(),
        "blocks of {block}, which is not a power of two in {:?}",
        BlockFormat::BLOCKS
    );
    expect_type(name, bytes, DType::U8);
    expect(name, bytes, slices * format.slice_bytes(elements));
    assert!(bytes.address().is_multiple_of(SLICE_ALIGNMENT as u64), "{name} is not aligned");
}
