//! Packs numbers into codes, and unpacks codes.
//!
//! Loops over arrays vectorise, except where a comment says so. There the instructions of AVX2 are named.
#![allow(clippy::inline_always, reason = "what the innermost loops call must not be called")]

use half::{bf16, f16};

use super::super::element::Element;
use crate::ops::ROUND;

/// Numbers that are packed or unpacked at once, in registers. All blocks but the last of a slice are whole steps.
pub const STEP: usize = 32;

/// Numbers of a vector.
const EIGHT: usize = 8;

/// `sums += codes · scale`, by fused multiply-adds.
#[inline(always)]
pub fn add<const BITS: usize>(codes: &[u8], scale: f32, sums: &mut [f32; STEP]) {
    let (sums, codes) = (sums.as_chunks_mut::<EIGHT>().0, codes[..STEP * BITS / 8].chunks_exact(BITS));
    // Exact, because scales are 0, NaN or far above the subnormal numbers.
    let factor = if BITS == 4 { scale / ONE } else { scale };
    for (sums, codes) in sums.iter_mut().zip(codes) {
        let numbers = match *codes {
            [a, b, c, d] => unpack(u32::from_le_bytes([a, b, c, d])),
            _ => std::array::from_fn(|i| f32::from(codes[i] as i8)),
        };
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum = number.mul_add(factor, *sum);
        }
    }
}

/// What [`unpack`] returns for a code of 1.
const ONE: f32 = (1_u32 << 28) as f32;

/// The codes of 4 bits in a word as numbers. Each stays in the highest bits, where its sign is.
#[cfg(not(target_feature = "avx2"))]
#[inline(always)]
fn unpack(word: u32) -> [f32; EIGHT] {
    std::array::from_fn(|i| (word << (28 - 4 * i) & 0xf000_0000) as i32 as f32)
}

/// The same. Compilers shift and blend the first code separately.
#[cfg(target_feature = "avx2")]
#[inline(always)]
fn unpack(word: u32) -> [f32; EIGHT] {
    use std::arch::x86_64::{
        __m256, _mm256_and_si256, _mm256_cvtepi32_ps, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_sllv_epi32,
    };
    // SAFETY: this code is compiled for processors with AVX2, and a vector of eight numbers is an array of them.
    unsafe {
        let words =
            _mm256_sllv_epi32(_mm256_set1_epi32(word as i32), _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
        let highest = _mm256_and_si256(words, _mm256_set1_epi32(0xf000_0000_u32 as i32));
        std::mem::transmute::<__m256, [f32; EIGHT]>(_mm256_cvtepi32_ps(highest))
    }
}

/// Writes numbers times `inverse`, rounded to the nearest integer, ties to even.
#[inline(always)]
pub fn pack<const BITS: usize>(numbers: &[f32; STEP], inverse: f32, codes: &mut [u8]) {
    if BITS == 4 {
        codes[..STEP / 2].copy_from_slice(&pack_four(numbers, inverse));
    } else {
        codes[..STEP].copy_from_slice(&pack_eight(numbers, inverse));
    }
}

#[cfg(not(target_feature = "avx2"))]
#[inline(always)]
fn pack_eight(numbers: &[f32; STEP], inverse: f32) -> [u8; STEP] {
    numbers.map(|x| x.mul_add(inverse, ROUND).to_bits() as u8)
}

#[cfg(not(target_feature = "avx2"))]
#[inline(always)]
fn pack_four(numbers: &[f32; STEP], inverse: f32) -> [u8; STEP / 2] {
    let bytes = pack_eight(numbers, inverse);
    std::array::from_fn(|i| bytes[2 * i] & 0xf | bytes[2 * i + 1] << 4)
}

/// Compilers narrow one integer after the other.
#[cfg(target_feature = "avx2")]
#[inline(always)]
fn pack_eight(numbers: &[f32; STEP], inverse: f32) -> [u8; STEP] {
    use std::arch::x86_64::{
        __m256i, _mm256_packs_epi16, _mm256_packs_epi32, _mm256_permutevar8x32_epi32, _mm256_setr_epi32,
    };
    let [a, b, c, d] = integers(numbers, inverse);
    // SAFETY: this code is compiled for processors with AVX2, and a vector of 32 bytes is an array of them.
    unsafe {
        // Both halves of a vector are narrowed by themselves, so groups of four are out of order.
        let halves = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        std::mem::transmute::<__m256i, [u8; STEP]>(_mm256_permutevar8x32_epi32(halves, order))
    }
}

#[cfg(target_feature = "avx2")]
#[inline(always)]
fn pack_four(numbers: &[f32; STEP], inverse: f32) -> [u8; STEP / 2] {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_unpacklo_epi16, _mm256_and_si256, _mm256_castsi256_si128,
        _mm256_extracti128_si256, _mm256_madd_epi16, _mm256_packs_epi32, _mm256_packus_epi16,
        _mm256_packus_epi32, _mm256_set1_epi16, _mm256_set1_epi32,
    };
    let [a, b, c, d] = integers(numbers, inverse);
    // SAFETY: this code is compiled for processors with AVX2, and a vector of 16 bytes is an array of them.
    unsafe {
        // The second code of a pair times 16, plus the first.
        let pairs = |a: __m256i, b: __m256i| {
            let codes = _mm256_and_si256(_mm256_packs_epi32(a, b), _mm256_set1_epi16(0xf));
            _mm256_madd_epi16(codes, _mm256_set1_epi32(16 << 16 | 1))
        };
        let words = _mm256_packus_epi32(pairs(a, b), pairs(c, d));
        // Both halves of a vector are narrowed by themselves, so groups of four codes alternate between them.
        let halves = _mm256_packus_epi16(words, words);
        let (first, second) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
        std::mem::transmute::<__m128i, [u8; STEP / 2]>(_mm_unpacklo_epi16(first, second))
    }
}

/// Numbers times `inverse`, rounded to the nearest integer, ties to even.
#[cfg(target_feature = "avx2")]
#[inline(always)]
fn integers(numbers: &[f32; STEP], inverse: f32) -> [std::arch::x86_64::__m256i; 4] {
    use std::arch::x86_64::{
        _mm256_castps_si256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_epi32, _mm256_set1_ps,
        _mm256_sub_epi32,
    };
    // SAFETY: this code is compiled for processors with AVX2 and FMA, and every load is of eight numbers of the array.
    std::array::from_fn(|i| unsafe {
        let x = _mm256_loadu_ps(numbers[EIGHT * i..].as_ptr());
        let rounded = _mm256_fmadd_ps(x, _mm256_set1_ps(inverse), _mm256_set1_ps(ROUND));
        _mm256_sub_epi32(_mm256_castps_si256(rounded), _mm256_set1_epi32(ROUND.to_bits() as i32))
    })
}

/// The types of numbers that are quantised.
pub trait Number: Element<Accumulator = f32> {
    /// The largest magnitude; not finite if one of the numbers is not.
    fn largest(numbers: &[Self]) -> f32;
}

// As integers, the bits of numbers that are not finite are larger than those of all others.

impl Number for f32 {
    #[inline(always)]
    fn largest(numbers: &[f32]) -> f32 {
        f32::from_bits(numbers.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff)))
    }
}

impl Number for bf16 {
    #[inline(always)]
    fn largest(numbers: &[bf16]) -> f32 {
        bf16::from_bits(numbers.iter().fold(0, |most: u16, x| most.max(x.to_bits() & 0x7fff))).to_f32()
    }
}

impl Number for f16 {
    #[inline(always)]
    fn largest(numbers: &[f16]) -> f32 {
        f16::from_bits(numbers.iter().fold(0, |most: u16, x| most.max(x.to_bits() & 0x7fff))).to_f32()
    }
}
