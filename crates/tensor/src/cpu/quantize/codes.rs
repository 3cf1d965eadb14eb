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
    for (sums, codes) in sums.iter_mut().zip(codes) {
        let numbers = match *codes {
            [a, b, c, d] => unpack(u32::from_le_bytes([a, b, c, d])),
            _ => std::array::from_fn(|i| f32::from(codes[i] as i8)),
        };
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum = number.mul_add(scale, *sum);
        }
    }
}

/// The codes of 4 bits in a word as numbers.
#[cfg(not(target_feature = "avx2"))]
#[inline(always)]
fn unpack(word: u32) -> [f32; EIGHT] {
    std::array::from_fn(|i| ((word << (28 - 4 * i)) as i32 >> 28) as f32)
}

/// The same. Compilers shift and blend the first code separately.
#[cfg(target_feature = "avx2")]
#[inline(always)]
fn unpack(word: u32) -> [f32; EIGHT] {
    use std::arch::x86_64::{
        __m256, _mm256_cvtepi32_ps, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_sllv_epi32,
        _mm256_srai_epi32,
    };
    // SAFETY: this code is compiled for processors with AVX2, and a vector of eight numbers is an array of them.
    unsafe {
        let words =
            _mm256_sllv_epi32(_mm256_set1_epi32(word as i32), _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
        std::mem::transmute::<__m256, [f32; EIGHT]>(_mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(words)))
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
    /// What [`Self::decode`] knows of a block.
    type Decoder;
    /// The decoder of a block with this scale.
    fn decoder<const BITS: usize>(scale: f32) -> Self::Decoder;
    /// The numbers of codes: code · scale, rounded.
    fn decode<const BITS: usize>(codes: &[u8], decoder: &Self::Decoder) -> [Self; STEP];
}

/// Code · scale, for the codes of one step.
#[inline(always)]
fn products<const BITS: usize>(codes: &[u8], scale: f32) -> [f32; STEP] {
    let mut sums = [0.0; STEP];
    add::<BITS>(codes, scale, &mut sums);
    sums
}

/// A scale, and the bits of the 16 numbers that codes of 4 bits stand for: their low bytes, then their high bytes.
pub struct Values {
    scale: f32,
    bytes: [[u8; 16]; 2],
}

/// The integers that codes of 4 bits stand for.
const INTEGERS: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0];

#[cfg(not(target_feature = "avx2"))]
#[inline(always)]
fn split(bits: [u16; 16]) -> [[u8; 16]; 2] {
    [bits.map(|bits| bits as u8), bits.map(|bits| (bits >> 8) as u8)]
}

/// The same. Compilers write the bytes one by one, and a vector load of them right afterwards is slow.
#[cfg(target_feature = "avx2")]
#[inline(always)]
fn split(bits: [u16; 16]) -> [[u8; 16]; 2] {
    use std::arch::x86_64::{
        __m256i, _mm256_and_si256, _mm256_packus_epi16, _mm256_permute4x64_epi64, _mm256_set1_epi16,
        _mm256_srli_epi16,
    };
    // SAFETY: this code is compiled for processors with AVX2, and a vector of 32 bytes is an array of them.
    unsafe {
        let bits = std::mem::transmute::<[u16; 16], __m256i>(bits);
        let low = _mm256_and_si256(bits, _mm256_set1_epi16(0xff));
        // Both halves of a vector are narrowed by themselves.
        let halves = _mm256_packus_epi16(low, _mm256_srli_epi16::<8>(bits));
        std::mem::transmute::<__m256i, [[u8; 16]; 2]>(_mm256_permute4x64_epi64::<0b11_01_10_00>(halves))
    }
}

/// The bits of the numbers that codes of 4 bits stand for.
#[cfg(not(target_feature = "avx2"))]
#[inline(always)]
fn look_up(codes: &[u8], values: &Values) -> [u16; STEP] {
    std::array::from_fn(|i| {
        let code = usize::from(codes[i / 2] >> (4 * (i % 2)) & 0xf);
        u16::from_le_bytes([values.bytes[0][code], values.bytes[1][code]])
    })
}

/// The same. One instruction looks up 32 bytes.
#[cfg(target_feature = "avx2")]
#[inline(always)]
fn look_up(codes: &[u8], values: &Values) -> [u16; STEP] {
    use std::arch::x86_64::{
        __m256i, _mm_and_si128, _mm_loadu_si128, _mm_set1_epi8, _mm_srli_epi16, _mm_unpackhi_epi8,
        _mm_unpacklo_epi8, _mm256_broadcastsi128_si256, _mm256_permute2x128_si256, _mm256_set_m128i,
        _mm256_shuffle_epi8, _mm256_unpackhi_epi8, _mm256_unpacklo_epi8,
    };
    let codes: &[u8; STEP / 2] = codes[..STEP / 2].try_into().expect("as many codes");
    // SAFETY: this code is compiled for processors with AVX2, every load is of an array of 16 bytes, and two vectors of 16 numbers
    // are an array of them.
    unsafe {
        let table = |bytes: &[u8; 16]| _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast()));
        let (pairs, mask) = (_mm_loadu_si128(codes.as_ptr().cast()), _mm_set1_epi8(0xf));
        let (even, odd) = (_mm_and_si128(pairs, mask), _mm_and_si128(_mm_srli_epi16::<4>(pairs), mask));
        let codes = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
        let low = _mm256_shuffle_epi8(table(&values.bytes[0]), codes);
        let high = _mm256_shuffle_epi8(table(&values.bytes[1]), codes);
        // Both halves of a vector are interleaved by themselves, so groups of eight are out of order.
        let (first, second) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
        std::mem::transmute::<[__m256i; 2], [u16; STEP]>([
            _mm256_permute2x128_si256::<0x20>(first, second),
            _mm256_permute2x128_si256::<0x31>(first, second),
        ])
    }
}

// As integers, the bits of numbers that are not finite are larger than those of all others.

impl Number for f32 {
    #[inline(always)]
    fn largest(numbers: &[f32]) -> f32 {
        f32::from_bits(numbers.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff)))
    }

    type Decoder = f32;

    #[inline(always)]
    fn decoder<const BITS: usize>(scale: f32) -> f32 {
        scale
    }

    #[inline(always)]
    fn decode<const BITS: usize>(codes: &[u8], scale: &f32) -> [f32; STEP] {
        products::<BITS>(codes, *scale)
    }
}

macro_rules! number_of_16_bits {
    ($t:ty) => {
        impl Number for $t {
            #[inline(always)]
            fn largest(numbers: &[$t]) -> f32 {
                let most = numbers.iter().fold(0, |most: u16, x| most.max(x.to_bits() & 0x7fff));
                <$t>::from_bits(most).to_f32()
            }

            type Decoder = Values;

            #[inline(always)]
            fn decoder<const BITS: usize>(scale: f32) -> Values {
                let numbers = if BITS == 4 {
                    narrow(&INTEGERS.map(|x| x.mul_add(scale, 0.0)))
                } else {
                    [Self::ZERO; 16]
                };
                Values { scale, bytes: split(numbers.map(Self::to_bits)) }
            }

            #[inline(always)]
            fn decode<const BITS: usize>(codes: &[u8], values: &Values) -> [$t; STEP] {
                match BITS {
                    4 => look_up(codes, values).map(<$t>::from_bits),
                    _ => narrow(&products::<BITS>(codes, values.scale)),
                }
            }
        }
    };
}

number_of_16_bits!(bf16);
number_of_16_bits!(f16);

/// Rounds numbers to their type.
#[inline(always)]
pub fn narrow<T: Number, const N: usize>(wide: &[f32; N]) -> [T; N] {
    let mut numbers = [T::default(); N];
    T::narrow_slice(wide, &mut numbers);
    numbers
}
