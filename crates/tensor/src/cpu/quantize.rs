//! Quantisation in blocks: see [`crate::ops::Quantize`] for the format.
//!
//! A block is widened to fp32 on the stack, where loops over it vectorise and stay in the first-level cache.

use std::ops::Range;

use super::access::{Access, Scatter};
use super::element::Element;
use super::parallel::{Rows, Threads};
use crate::ops::{Bits, BlockFormat, Dequantize, LEAST, Quantize, ROUND, Requantize, transposed};

/// The numbers of the largest block.
type Numbers = [f32; *BlockFormat::BLOCKS.end()];

/// Numbers that are packed or unpacked at once.
const STEP: usize = 32;

/// See [`Quantize`].
pub fn quantize<T: Element<Accumulator = f32>>(threads: Threads, op: &Quantize) {
    let access = Access::new();
    let (x, out) =
        (access.read::<T>(op.x), Slices::new(access.write_bytes(op.out), op.elements(), op.format));
    let (elements, columns) = (op.elements(), op.columns);
    out.each_block(threads, op.slices, columns, |slice, block, numbers| {
        let from = &x[slice * elements..][block];
        T::widen_slice(from, &mut numbers[..from.len()]);
    });
}

/// See [`Requantize`].
pub fn requantize(threads: Threads, op: &Requantize) {
    let access = Access::new();
    let (codes, out) =
        (access.bytes(op.codes), Slices::new(access.write_bytes(op.out), op.elements, op.format));
    let parts = Parts { codes, slices: op.slices, elements: op.elements, format: op.format };
    out.each_block(threads, op.slices, op.columns, |slice, block, numbers| {
        numbers[..block.len()].fill(0.0);
        parts.add(slice, block, numbers);
    });
}

/// See [`Dequantize`].
pub fn dequantize<T: Element<Accumulator = f32>>(threads: Threads, op: &Dequantize) {
    let access = Access::new();
    let (codes, out) = (access.bytes(op.codes), access.write::<T>(op.out.view));
    let (elements, accumulate, block) = (op.elements(), op.out.accumulate, op.format.block);
    let parts = Parts { codes, slices: op.slices, elements, format: op.format };
    let blocks = op.format.blocks(elements);
    // Threads share the blocks of one slice: slices are long.
    for (slice, out) in out.chunks_mut(elements.max(1)).enumerate() {
        threads.each(blocks, block * op.parts, Rows(out, block), |range, out| {
            let mut numbers = [0.0; *BlockFormat::BLOCKS.end()];
            for (index, out) in range.zip(out.0.chunks_mut(block)) {
                let numbers = &mut numbers[..out.len()];
                if accumulate {
                    T::widen_slice(out, numbers);
                } else {
                    numbers.fill(0.0);
                }
                parts.add(slice, index * block..index * block + out.len(), numbers);
                T::narrow_slice(numbers, out);
            }
        });
    }
}

/// Slices that are written.
struct Slices<'a> {
    bytes: Scatter<'a, u8>,
    elements: usize,
    format: BlockFormat,
}

impl<'a> Slices<'a> {
    fn new(bytes: &'a mut [u8], elements: usize, format: BlockFormat) -> Self {
        Slices { bytes: Scatter::new(bytes), elements, format }
    }

    /// Quantises every block. `load` writes the numbers of a range of a slice.
    fn each_block(
        &self,
        threads: Threads,
        slices: usize,
        columns: usize,
        load: impl Fn(usize, Range<usize>, &mut Numbers) + Sync,
    ) {
        let BlockFormat { bits, block } = self.format;
        let blocks = self.format.blocks(self.elements);
        threads.each(slices * blocks, block, (), |range, ()| {
            let mut numbers = [0.0; *BlockFormat::BLOCKS.end()];
            for item in range {
                let (slice, index) = (item / blocks, item % blocks);
                let elements = index * block..self.elements.min((index + 1) * block);
                load(slice, elements.clone(), &mut numbers);
                let parts = self.parts(transposed(slice, slices, columns), index, &elements);
                // SAFETY: every block has bytes of its own, and a block is part of one item.
                let [codes, scale, padding] = parts.map(|range| unsafe { self.bytes.part(range) });
                let found = encode(&numbers[..elements.len()], bits, codes);
                scale.copy_from_slice(&found.to_ne_bytes());
                padding.fill(0);
            }
        });
    }

    /// Where codes and scale of a block are in the buffer; and the padding of the slice, for its last block.
    fn parts(&self, slice: usize, index: usize, elements: &Range<usize>) -> [Range<usize>; 3] {
        let BlockFormat { bits, .. } = self.format;
        let is_last = elements.end == self.elements;
        let first = slice * self.format.slice_bytes(self.elements);
        let at = |byte: usize| first + byte;
        let (codes, scales) = (elements.start * bits.count() / 8, self.format.code_bytes(self.elements));
        let end_of_codes = if is_last { scales } else { elements.end * bits.count() / 8 };
        let scale = scales + 4 * index;
        let end = if is_last { self.format.slice_bytes(self.elements) } else { scale + 4 };
        [at(codes)..at(end_of_codes), at(scale)..at(scale + 4), at(scale + 4)..at(end)]
    }
}

/// Slices that are read: several parts of `slices` each.
struct Parts<'a> {
    codes: &'a [u8],
    slices: usize,
    elements: usize,
    format: BlockFormat,
}

impl Parts<'_> {
    /// Adds a block of every part to `numbers`, in order.
    fn add(&self, slice: usize, block: Range<usize>, numbers: &mut [f32]) {
        let (bytes, bits) = (self.format.slice_bytes(self.elements), self.format.bits);
        let scales = self.format.code_bytes(self.elements);
        let (scale_at, part_bytes) = (scales + 4 * (block.start / self.format.block), self.slices * bytes);
        let at = block.start * bits.count() / 8;
        let numbers = &mut numbers[..block.len()];
        // One loop over the block for each part: it vectorises, and the numbers stay in the first-level cache.
        for part in self.codes.chunks_exact(part_bytes) {
            let part = &part[slice * bytes..][..bytes];
            let (scale, _) = part[scale_at..].split_first_chunk().expect("a scale");
            let (codes, scale) = (&part[at..scales], f32::from_ne_bytes(*scale));
            match bits {
                Bits::Eight => add_eight(codes, scale, numbers),
                Bits::Four => add_four(codes, scale, numbers),
            }
        }
    }
}

/// Writes the codes of a block, the last byte or word padded with zeros, and returns the scale.
fn encode(numbers: &[f32], bits: Bits, codes: &mut [u8]) -> f32 {
    let (scale, inverse) = scale_and_inverse(numbers, bits);
    if scale.is_nan() {
        codes.fill(0);
        return scale;
    }
    let step_bytes = STEP * bits.count() / 8;
    let (steps, rest) = numbers.as_chunks::<STEP>();
    let (whole, last) = codes.split_at_mut(steps.len() * step_bytes);
    for (numbers, codes) in steps.iter().zip(whole.chunks_exact_mut(step_bytes)) {
        pack(numbers, inverse, bits, codes);
    }
    let mut padded = [0.0; STEP];
    padded[..rest.len()].copy_from_slice(rest);
    let mut packed = [0; STEP];
    pack(&padded, inverse, bits, &mut packed[..step_bytes]);
    last.copy_from_slice(&packed[..last.len()]);
    scale
}

/// The scale of a block, and the factor for its numbers.
fn scale_and_inverse(numbers: &[f32], bits: Bits) -> (f32, f32) {
    let largest = f32::from(bits.largest());
    // As integers, the bits of numbers that are not finite are larger than those of all others.
    let most = numbers.iter().map(|x| x.to_bits() as i32 & i32::MAX).max().unwrap_or(0);
    let most = f32::from_bits(most as u32);
    if !most.is_finite() {
        (f32::NAN, 0.0)
    } else if most < LEAST {
        (0.0, 0.0)
    } else {
        (most / largest, largest / most)
    }
}

#[inline]
fn pack(numbers: &[f32; STEP], inverse: f32, bits: Bits, codes: &mut [u8]) {
    let integers = integers(numbers, inverse);
    match bits {
        Bits::Eight => codes.copy_from_slice(&integers),
        Bits::Four => {
            let packed: [u8; STEP / 2] = std::array::from_fn(|i| {
                let pair = u16::from_le_bytes([integers[2 * i], integers[2 * i + 1]]);
                (pair & 0xf | pair >> 4 & 0xf0) as u8
            });
            codes.copy_from_slice(&packed);
        }
    }
}

/// Numbers times `inverse`, rounded to the nearest integer, ties to even. They fit into a byte.
#[cfg(not(target_feature = "avx2"))]
#[inline(always)]
fn integers(numbers: &[f32; STEP], inverse: f32) -> [u8; STEP] {
    numbers.map(|x| x.mul_add(inverse, ROUND).to_bits() as u8)
}

/// The same. Compilers narrow one integer after the other.
#[cfg(target_feature = "avx2")]
#[inline(always)]
fn integers(numbers: &[f32; STEP], inverse: f32) -> [u8; STEP] {
    use std::arch::x86_64::{
        __m256i, _mm256_castps_si256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_packs_epi16,
        _mm256_packs_epi32, _mm256_permutevar8x32_epi32, _mm256_set1_epi32, _mm256_set1_ps,
        _mm256_setr_epi32, _mm256_sub_epi32,
    };
    // SAFETY: this code is compiled for processors with AVX2, every load is of eight numbers of the array, and a vector of 32
    // bytes is an array of them.
    unsafe {
        let eight = |i: usize| {
            let x = _mm256_loadu_ps(numbers.as_ptr().add(8 * i));
            let rounded = _mm256_fmadd_ps(x, _mm256_set1_ps(inverse), _mm256_set1_ps(ROUND));
            _mm256_sub_epi32(_mm256_castps_si256(rounded), _mm256_set1_epi32(ROUND.to_bits() as i32))
        };
        // Both halves of a vector are narrowed by themselves, so groups of four are out of order.
        let sixteen = [_mm256_packs_epi32(eight(0), eight(1)), _mm256_packs_epi32(eight(2), eight(3))];
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(sixteen[0], sixteen[1]), order);
        std::mem::transmute::<__m256i, [u8; STEP]>(all)
    }
}

/// Adds the numbers of codes of 8 bits.
fn add_eight(codes: &[u8], scale: f32, numbers: &mut [f32]) {
    for (number, &code) in numbers.iter_mut().zip(codes) {
        *number = f32::from(code as i8).mul_add(scale, *number);
    }
}

/// Adds the numbers of codes of 4 bits. There are whole words of codes.
fn add_four(codes: &[u8], scale: f32, numbers: &mut [f32]) {
    let (words, last) = (codes.as_chunks::<4>().0, numbers.len() / 8);
    let (whole, rest) = numbers.as_chunks_mut::<8>();
    for (&word, numbers) in words.iter().zip(whole) {
        for (number, code) in numbers.iter_mut().zip(unpack(u32::from_le_bytes(word))) {
            *number = (code as f32).mul_add(scale, *number);
        }
    }
    for (&word, numbers) in words.iter().skip(last).zip(rest.chunks_mut(8)) {
        for (number, code) in numbers.iter_mut().zip(unpack(u32::from_le_bytes(word))) {
            *number = (code as f32).mul_add(scale, *number);
        }
    }
}

/// The integers of 4 bits in a word, the first in the lowest bits.
#[cfg(not(target_feature = "avx2"))]
#[inline(always)]
fn unpack(word: u32) -> [i32; 8] {
    std::array::from_fn(|i| (word << (28 - 4 * i)) as i32 >> 28)
}

/// The same. Compilers generate five times as many instructions for the plain loop.
#[cfg(target_feature = "avx2")]
#[inline(always)]
fn unpack(word: u32) -> [i32; 8] {
    use std::arch::x86_64::{
        __m256i, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_sllv_epi32, _mm256_srai_epi32,
    };
    // SAFETY: this code is compiled for processors with AVX2, and a vector of eight integers is an array of them.
    unsafe {
        let words =
            _mm256_sllv_epi32(_mm256_set1_epi32(word as i32), _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
        std::mem::transmute::<__m256i, [i32; 8]>(_mm256_srai_epi32::<28>(words))
    }
}

#[cfg(test)]
mod tests;
