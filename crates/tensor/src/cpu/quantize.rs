//! Quantisation in blocks: see [`crate::ops::Quantize`] for the format.
//!
//! Everything is read from memory and written to it once. Blocks stay in the first-level cache between finding their largest number
//! and packing them, and [sums over parts](sums) stay in registers.
#![allow(clippy::inline_always, reason = "what the innermost loops call must not be called")]

mod codes;
mod sums;

use std::iter::Zip;
use std::ops::Range;
use std::slice::{ChunksMut, IterMut};

use self::codes::{Number, STEP, pack};
use self::sums::Parts;
use super::access::{Access, Scatter};
use super::parallel::{Rows, Threads};
use crate::ops::{Bits, BlockFormat, Dequantize, MIN_BLOCK_MAXIMUM, Quantize, Requantize};

/// See [`Quantize`].
pub fn quantize<T: Number>(threads: Threads, op: &Quantize) {
    match op.format.bits {
        Bits::Four => quantize_to::<T, 4>(threads, op),
        Bits::Eight => quantize_to::<T, 8>(threads, op),
    }
}

/// See [`Requantize`].
pub fn requantize(threads: Threads, op: &Requantize) {
    match op.format.bits {
        Bits::Four => requantize_to::<4>(threads, op),
        Bits::Eight => requantize_to::<8>(threads, op),
    }
}

/// See [`Dequantize`].
pub fn dequantize<T: Number>(threads: Threads, op: &Dequantize) {
    match op.format.bits {
        Bits::Four => dequantize_from::<T, 4>(threads, op),
        Bits::Eight => dequantize_from::<T, 8>(threads, op),
    }
}

fn quantize_to<T: Number, const BITS: usize>(threads: Threads, op: &Quantize) {
    let access = Access::new();
    let elements = op.elements();
    let (x, out) = (access.read::<T>(op.x), Slices::new(access.write_bytes(op.out), elements, op.format));
    out.each_run(threads, op.slices, |slice, run, blocks| {
        let x = &x[slice * elements..][run];
        for (block, (codes, scale)) in x.chunks(out.format.block).zip(blocks) {
            *scale = encode_block::<T, BITS>(block, codes).to_ne_bytes();
        }
    });
}

fn requantize_to<const BITS: usize>(threads: Threads, op: &Requantize) {
    let access = Access::new();
    let (codes, out) =
        (access.bytes(op.codes), Slices::new(access.write_bytes(op.out), op.elements, op.format));
    let parts = Parts::new(codes, op.slices, op.elements, op.format);
    out.each_run(threads, op.slices, |slice, run, mut blocks| {
        let mut sums = [0.0; SEGMENT];
        for start in run.clone().step_by(SEGMENT) {
            let sums = &mut sums[..SEGMENT.min(run.end - start)];
            parts.sum::<f32, BITS>(slice, start, false, sums);
            for (numbers, (codes, scale)) in sums.chunks(out.format.block).zip(&mut blocks) {
                *scale = encode_block::<f32, BITS>(numbers, codes).to_ne_bytes();
            }
        }
    });
}

/// Sums that are in the first-level cache until they are quantised: whole blocks of every size.
const SEGMENT: usize = *BlockFormat::BLOCKS.end();

fn dequantize_from<T: Number, const BITS: usize>(threads: Threads, op: &Dequantize) {
    let access = Access::new();
    let (codes, out) = (access.bytes(op.codes), access.write::<T>(op.out.view));
    let (elements, accumulate) = (op.elements(), op.out.accumulate);
    let parts = Parts::new(codes, op.slices, elements, op.format);
    // Threads share one slice: slices are long.
    for (slice, out) in out.chunks_mut(elements.max(1)).enumerate() {
        if op.parts == 1 && !accumulate {
            restore::<T, BITS>(threads, &parts, slice, out);
            continue;
        }
        threads.each(out.len().div_ceil(STEP), STEP * op.parts, Rows(out, STEP), |steps, out| {
            parts.sum::<T, BITS>(slice, steps.start * STEP, accumulate, out.0);
        });
    }
}

/// Writes the numbers of the first part. Nothing is added, so they are never in memory as sums.
fn restore<T: Number, const BITS: usize>(threads: Threads, parts: &Parts, slice: usize, out: &mut [T]) {
    let block = 1 << parts.block;
    threads.each(out.len().div_ceil(block), block, Rows(out, block), |range, out| {
        for (index, out) in range.zip(out.0.chunks_mut(block)) {
            let (codes, scale) = parts.block::<BITS>(slice, index);
            decode_block::<T, BITS>(codes, scale, out);
        }
    });
}

/// As many numbers, and zeros if there are fewer.
#[inline(always)]
fn widen<T: Number, const N: usize>(numbers: &[T]) -> [f32; N] {
    let mut wide = [0.0; N];
    match numbers.as_chunks::<N>() {
        ([whole], _) => T::widen_slice(whole, &mut wide),
        (_, rest) => T::widen_slice(rest, &mut wide[..rest.len()]),
    }
    wide
}

/// Writes the codes of a block, the last bytes padded with zeros, and returns the scale.
#[inline(always)]
fn encode_block<T: Number, const BITS: usize>(numbers: &[T], codes: &mut [u8]) -> f32 {
    let (scale, inverse) = scale_and_inverse::<BITS>(T::largest(numbers));
    if scale.is_nan() {
        codes.fill(0);
        return scale;
    }
    let (packs, rest) = numbers.as_chunks::<STEP>();
    let (whole, padded) = codes.split_at_mut(packs.len() * STEP * BITS / 8);
    for (numbers, codes) in packs.iter().zip(whole.chunks_exact_mut(STEP * BITS / 8)) {
        pack::<BITS>(&widen(numbers), inverse, codes);
    }
    if !rest.is_empty() {
        let mut last = [0; STEP];
        pack::<BITS>(&widen(rest), inverse, &mut last);
        padded.copy_from_slice(&last[..padded.len()]);
    }
    scale
}

/// Writes the numbers of a block.
#[inline(always)]
fn decode_block<T: Number, const BITS: usize>(codes: &[u8], scale: f32, numbers: &mut [T]) {
    let decoder = T::decoder::<BITS>(scale);
    let (steps, rest) = numbers.as_chunks_mut::<STEP>();
    let (whole, last) = codes.split_at(steps.len() * STEP * BITS / 8);
    for (numbers, codes) in steps.iter_mut().zip(whole.chunks_exact(STEP * BITS / 8)) {
        *numbers = T::decode::<BITS>(codes, &decoder);
    }
    if !rest.is_empty() {
        let (mut padded, used) = ([0; STEP], last.len().min(STEP));
        padded[..used].copy_from_slice(&last[..used]);
        rest.copy_from_slice(&T::decode::<BITS>(&padded, &decoder)[..rest.len()]);
    }
}

/// The scale of a block with this largest magnitude, and the factor for its numbers.
fn scale_and_inverse<const BITS: usize>(most: f32) -> (f32, f32) {
    let largest = ((1_u32 << (BITS - 1)) - 1) as f32;
    if !most.is_finite() {
        (f32::NAN, 0.0)
    } else if most < MIN_BLOCK_MAXIMUM {
        (0.0, 0.0)
    } else {
        (most / largest, largest / most)
    }
}

/// The codes and the scale of each block.
type Blocks<'a> = Zip<ChunksMut<'a, u8>, IterMut<'a, [u8; 4]>>;

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

    /// Calls `body` for runs of adjacent blocks of a slice: the slice, the elements of the run, and where the codes and the scale of
    /// each block go. The last codes of a slice include their padding.
    fn each_run(&self, threads: Threads, slices: usize, body: impl Fn(usize, Range<usize>, Blocks) + Sync) {
        let BlockFormat { bits, block } = self.format;
        let (blocks, bytes) = (self.format.blocks(self.elements), self.format.slice_bytes(self.elements));
        let (code_bytes, block_bytes) = (self.format.code_bytes(self.elements), block * bits.count() / 8);
        threads.each(slices * blocks, block, (), |mut items, ()| {
            while !items.is_empty() {
                let (slice, first) = (items.start / blocks, items.start % blocks);
                let end = blocks.min(first + items.len());
                items.start += end - first;
                let start = slice * bytes;
                let codes = first * block_bytes..code_bytes.min(end * block_bytes);
                let scales = code_bytes + 4 * first..if end == blocks { bytes } else { code_bytes + 4 * end };
                let [codes, scales] = [codes, scales].map(|part| {
                    // SAFETY: every block has bytes of its own, and is part of one item; so has the padding of a slice, with its
                    // last block.
                    unsafe { self.bytes.part(start + part.start..start + part.end) }
                });
                let (scales, padding) = scales.split_at_mut(4 * (end - first));
                padding.fill(0);
                let each = codes.chunks_mut(block_bytes).zip(scales.as_chunks_mut().0.iter_mut());
                body(slice, first * block..self.elements.min(end * block), each);
            }
        });
    }
}

#[cfg(test)]
mod tests;
