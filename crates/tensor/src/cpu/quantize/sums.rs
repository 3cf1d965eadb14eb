//! Sums over the parts that several ranks sent.
//!
//! A step of numbers is added from all parts before the next step, so that its sums stay in registers. Parts are far apart in memory,
//! and processors do not prefetch from so many places at once by themselves, so every read prefetches what is read some steps later.

use super::codes::{Number, STEP, add, narrow};
use super::widen;
use crate::ops::BlockFormat;

/// How far ahead of a read the same part is prefetched.
const PREFETCH_BYTES: usize = 512;

const SCALE_BYTES: usize = size_of::<f32>();

/// Codes and scales of several parts, each of several slices.
pub struct Parts<'a> {
    bytes: &'a [u8],
    count: usize,
    part_bytes: usize,
    slice_bytes: usize,
    /// Where the scales of a slice begin.
    scales: usize,
    /// Logarithm of the numbers that share a scale.
    pub block: u32,
}

/// Where the codes of a step and its scale are in the first part. They are as far apart in every part.
#[derive(Clone, Copy)]
struct Place {
    codes: usize,
    scale: usize,
}

impl<'a> Parts<'a> {
    /// As many parts of `slices` each as there are bytes for.
    pub fn new(bytes: &'a [u8], slices: usize, elements: usize, format: BlockFormat) -> Self {
        let (slice_bytes, scales) = (format.slice_bytes(elements), format.code_bytes(elements));
        let part_bytes = slices * slice_bytes;
        let count = bytes.len() / part_bytes.max(1);
        Parts { bytes, count, part_bytes, slice_bytes, scales, block: format.block.ilog2() }
    }

    /// The codes and the scale of a block of the first part.
    pub fn block<const BITS: usize>(&self, slice: usize, index: usize) -> (&'a [u8], f32) {
        let (codes, scales) = self.bytes[slice * self.slice_bytes..].split_at(self.scales);
        let start = (index << self.block) * BITS / 8;
        let end = codes.len().min(start + (1 << self.block) * BITS / 8);
        (&codes[start..end], scale_at(scales, SCALE_BYTES * index))
    }

    /// `out (+)= Σ_parts codes · scales`, for the numbers of a slice from `start` on, which is a multiple of a step.
    pub fn sum<T: Number, const BITS: usize>(
        &self,
        slice: usize,
        start: usize,
        accumulate: bool,
        out: &mut [T],
    ) {
        #[cfg(target_arch = "x86_64")]
        if BITS == 4 && is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512.
            return unsafe { self.sum_four_wide(slice, start, accumulate, out) };
        }
        self.sum_steps::<T, BITS>(slice, start, accumulate, out, |place, sums| self.add::<BITS>(place, sums));
    }

    /// The same with codes of 4 bits, by the instructions of AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn sum_four_wide<T: Number>(&self, slice: usize, start: usize, accumulate: bool, out: &mut [T]) {
        self.sum_steps::<T, 4>(slice, start, accumulate, out, |place, sums| self.add_four_wide(place, sums));
    }

    /// Sums of one step after the other, to which `add` adds all parts.
    #[inline(always)]
    fn sum_steps<T: Number, const BITS: usize>(
        &self,
        slice: usize,
        start: usize,
        accumulate: bool,
        out: &mut [T],
        add: impl Fn(Place, &mut [f32; STEP]),
    ) {
        let first = slice * self.slice_bytes;
        for (step, out) in out.chunks_mut(STEP).enumerate() {
            let start = start + step * STEP;
            let scale = first + self.scales + SCALE_BYTES * (start >> self.block);
            let mut sums = if accumulate { widen(out) } else { [0.0; STEP] };
            let place = Place { codes: first + start * BITS / 8, scale };
            if self.has::<BITS>(place) {
                add(place, &mut sums);
            } else {
                self.add_padded::<BITS>(place, &mut sums);
            }
            match out.as_chunks_mut() {
                ([whole], _) => *whole = narrow(&sums),
                (_, rest) => T::narrow_slice(&sums[..rest.len()], rest),
            }
        }
    }

    /// Whether all bytes of a step are there. The last step of a slice may be shorter. Where other slices follow it, their bytes are
    /// read as its codes, for sums that nobody reads.
    fn has<const BITS: usize>(&self, Place { codes, scale }: Place) -> bool {
        let end = (codes + STEP * BITS / 8).max(scale + SCALE_BYTES);
        self.count > 0 && (self.count - 1) * self.part_bytes + end <= self.bytes.len()
    }

    /// Adds the codes of a step of every part.
    #[inline(always)]
    fn add<const BITS: usize>(&self, place: Place, sums: &mut [f32; STEP]) {
        debug_assert!(self.has::<BITS>(place));
        let mut own = *sums;
        for part in 0..self.count {
            // SAFETY: all bytes of the step are there.
            unsafe {
                let part = self.bytes.as_ptr().add(part * self.part_bytes);
                let codes = part.add(place.codes);
                prefetch(codes);
                let scale = part.add(place.scale).cast::<f32>().read_unaligned();
                add::<BITS>(std::slice::from_raw_parts(codes, STEP * BITS / 8), scale, &mut own);
            }
        }
        *sums = own;
    }

    /// The same with codes of 4 bits. One instruction looks up 16 of them.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn add_four_wide(&self, place: Place, sums: &mut [f32; STEP]) {
        use std::arch::x86_64::{
            _mm_loadu_si128, _mm512_castsi128_si512, _mm512_fmadd_ps, _mm512_loadu_ps,
            _mm512_permutexvar_epi32, _mm512_permutexvar_ps, _mm512_set1_ps, _mm512_setr_epi32,
            _mm512_setr_ps, _mm512_srlv_epi32, _mm512_storeu_ps,
        };
        debug_assert!(self.has::<4>(place));
        // A lookup takes the lowest four bits of each index.
        let table = _mm512_setr_ps(
            0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0,
        );
        let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        let low_words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let high_words = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        // SAFETY: all bytes of the step are there, and `sums` has two vectors of 16 numbers.
        unsafe {
            let (mut low, mut high) = (_mm512_loadu_ps(sums.as_ptr()), _mm512_loadu_ps(sums[16..].as_ptr()));
            for part in 0..self.count {
                let part = self.bytes.as_ptr().add(part * self.part_bytes);
                let codes = part.add(place.codes);
                prefetch(codes);
                let scale = _mm512_set1_ps(part.add(place.scale).cast::<f32>().read_unaligned());
                let codes = _mm512_castsi128_si512(_mm_loadu_si128(codes.cast()));
                let numbers = |words| {
                    let words = _mm512_permutexvar_epi32(words, codes);
                    _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), table)
                };
                low = _mm512_fmadd_ps(numbers(low_words), scale, low);
                high = _mm512_fmadd_ps(numbers(high_words), scale, high);
            }
            _mm512_storeu_ps(sums.as_mut_ptr(), low);
            _mm512_storeu_ps(sums[16..].as_mut_ptr(), high);
        }
    }

    /// The same for the last step of the last slice, whose codes may be fewer.
    #[cold]
    fn add_padded<const BITS: usize>(&self, place: Place, sums: &mut [f32; STEP]) {
        for part in self.bytes.chunks_exact(self.part_bytes) {
            let codes = &part[place.codes..];
            let (mut padded, used) = ([0; STEP], codes.len().min(STEP));
            padded[..used].copy_from_slice(&codes[..used]);
            add::<BITS>(&padded, scale_at(part, place.scale), sums);
        }
    }
}

fn scale_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_ne_bytes(*bytes[at..].first_chunk().expect("a scale"))
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(codes: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: nothing is read, so any address is allowed.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(PREFETCH_BYTES).cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch(_: *const u8) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Bits;

    /// Every sum has the bits of fused multiply-adds in the order of the parts, whichever instructions are used.
    fn sums_of<const BITS: usize>(bits: Bits, elements: usize, block: usize, accumulate: bool) {
        let (slices, parts) = (2, 7);
        let format = BlockFormat { bits, block };
        let slice_bytes = format.slice_bytes(elements);
        let mut seed = elements as u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed >> 8
        };
        let mut bytes: Vec<u8> = (0..parts * slices * slice_bytes).map(|_| random() as u8).collect();
        for slice in bytes.chunks_mut(slice_bytes) {
            for scale in slice[format.code_bytes(elements)..].as_chunks_mut::<4>().0 {
                *scale = (random() as f32 * 2.0_f32.powi(random() as i32 % 40 - 60)).to_ne_bytes();
            }
        }
        let sums = Parts::new(&bytes, slices, elements, format);
        for slice in 0..slices {
            let expected: Vec<u32> = (0..elements)
                .map(|i| {
                    let initial = if accumulate { 0.1 } else { 0.0 };
                    let sum = bytes.chunks(slices * slice_bytes).fold(initial, |sum: f32, part| {
                        let slice = &part[slice * slice_bytes..];
                        let code = match bits {
                            Bits::Eight => slice[i] as i8,
                            Bits::Four => (slice[i / 2] >> (4 * (i % 2)) << 4) as i8 >> 4,
                        };
                        f32::from(code)
                            .mul_add(scale_at(slice, format.code_bytes(elements) + 4 * (i / block)), sum)
                    });
                    sum.to_bits()
                })
                .collect();
            let mut found = vec![0.1_f32; elements];
            sums.sum::<f32, BITS>(slice, 0, accumulate, &mut found);
            assert_eq!(expected, found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), "{format:?}");
            found.fill(0.1);
            sums.sum_steps::<f32, BITS>(slice, 0, accumulate, &mut found, |place, own| {
                sums.add::<BITS>(place, own);
            });
            assert_eq!(expected, found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), "{format:?}");
        }
    }

    #[test]
    fn sums_are_fused_multiply_adds_in_the_order_of_parts() {
        for elements in [1, 5, 31, 32, 33, 64, 100, 257, 1000] {
            for block in [32, 64, 256] {
                sums_of::<4>(Bits::Four, elements, block, elements % 2 == 0);
                sums_of::<8>(Bits::Eight, elements, block, elements % 2 == 1);
            }
        }
    }
}
