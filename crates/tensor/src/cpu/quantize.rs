//! Quantisation in blocks: see [`crate::ops::Quantize`] for the format.
//!
//! Everything is read from memory and written to it once. Blocks stay in the first-level cache between finding their largest number
//! and packing them, and sums over parts stay in registers.
#![allow(clippy::inline_always, reason = "what the innermost loops call must not be called")]

mod codes;

use std::iter::Zip;
use std::ops::Range;
use std::slice::{ChunksMut, IterMut};

use self::codes::{Number, STEP, add, pack};
use super::access::{Access, Scatter};
use super::parallel::{Rows, Threads};
use crate::ops::{Bits, BlockFormat, Dequantize, LEAST, Quantize, Requantize};

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
    let segment = op.format.block.max(SEGMENT);
    out.each_run(threads, op.slices, |slice, run, mut blocks| {
        let mut sums = Sums::default();
        for start in run.clone().step_by(segment) {
            let len = segment.min(run.end - start);
            let sums = &mut sums.0[..len.div_ceil(STEP)];
            sums.fill([0.0; STEP]);
            parts.add::<BITS>(slice, start, sums);
            for (numbers, (codes, scale)) in
                sums.as_flattened()[..len].chunks(out.format.block).zip(&mut blocks)
            {
                *scale = encode_block::<f32, BITS>(numbers, codes).to_ne_bytes();
            }
        }
    });
}

fn dequantize_from<T: Number, const BITS: usize>(threads: Threads, op: &Dequantize) {
    let access = Access::new();
    let (codes, out) = (access.bytes(op.codes), access.write::<T>(op.out.view));
    let (elements, accumulate) = (op.elements(), op.out.accumulate);
    let parts = Parts::new(codes, op.slices, elements, op.format);
    // Threads share the segments of one slice: slices are long.
    for (slice, out) in out.chunks_mut(elements.max(1)).enumerate() {
        if op.parts == 1 && !accumulate {
            restore::<T, BITS>(threads, &parts, slice, out);
            continue;
        }
        let segments = out.len().div_ceil(SEGMENT);
        threads.each(segments, SEGMENT * op.parts, Rows(out, SEGMENT), |range, out| {
            let mut sums = Sums::default();
            for (segment, out) in range.zip(out.0.chunks_mut(SEGMENT)) {
                let sums = &mut sums.0[..out.len().div_ceil(STEP)];
                sums.fill([0.0; STEP]);
                if accumulate {
                    T::widen_slice(out, &mut sums.as_flattened_mut()[..out.len()]);
                }
                parts.add::<BITS>(slice, segment * SEGMENT, sums);
                T::narrow_slice(&sums.as_flattened()[..out.len()], out);
            }
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

/// Numbers whose sums stay in the first-level cache until all parts are added.
const SEGMENT: usize = 512;

/// Sums of a segment or of a block.
struct Sums([[f32; STEP]; *BlockFormat::BLOCKS.end() / STEP]);

impl Default for Sums {
    fn default() -> Self {
        Sums([[0.0; STEP]; _])
    }
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
    } else if most < LEAST {
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

/// Slices that are read.
struct Parts<'a> {
    codes: &'a [u8],
    /// Bytes of a part.
    part_bytes: usize,
    slice_bytes: usize,
    /// Where the scales of a slice begin.
    scales: usize,
    block: u32,
}

impl<'a> Parts<'a> {
    /// Several parts of `slices` each.
    fn new(codes: &'a [u8], slices: usize, elements: usize, format: BlockFormat) -> Self {
        let slice_bytes = format.slice_bytes(elements);
        let (part_bytes, scales) = (slices * slice_bytes, format.code_bytes(elements));
        Parts { codes, part_bytes, slice_bytes, scales, block: format.block.ilog2() }
    }

    /// The codes and the scale of a block of the first part.
    fn block<const BITS: usize>(&self, slice: usize, index: usize) -> (&'a [u8], f32) {
        let (codes, scales) = self.codes[slice * self.slice_bytes..].split_at(self.scales);
        let start = (index << self.block) * BITS / 8;
        let end = codes.len().min(start + (1 << self.block) * BITS / 8);
        (&codes[start..end], scale_at(scales, 4 * index))
    }

    /// Adds the steps from element `start` of a slice on of every part to `sums`, in order. Numbers after the end of the slice stay
    /// zero, or become NaN.
    #[inline(always)]
    fn add<const BITS: usize>(&self, slice: usize, start: usize, sums: &mut [[f32; STEP]]) {
        let bytes = STEP * BITS / 8;
        let (first, codes) = (slice * self.slice_bytes, start * BITS / 8);
        let whole = sums.len().min((self.scales - codes) / bytes);
        let place = |step: usize| {
            let scale = self.scales + 4 * ((start + step * STEP) >> self.block);
            (first + codes + step * bytes, first + scale)
        };
        for batch in self.codes.chunks(BATCH * self.part_bytes) {
            for (step, sums) in sums[..whole].iter_mut().enumerate() {
                let ((codes, scale), mut own) = (place(step), *sums);
                for part in batch.chunks_exact(self.part_bytes) {
                    add::<BITS>(&part[codes..codes + bytes], scale_at(part, scale), &mut own);
                }
                *sums = own;
            }
        }
        // The last step of a slice may be shorter.
        if let Some(sums) = sums.get_mut(whole) {
            let (codes, scale) = place(whole);
            for part in self.codes.chunks_exact(self.part_bytes) {
                let (mut padded, rest) = ([0; STEP], &part[codes..first + self.scales]);
                padded[..rest.len()].copy_from_slice(rest);
                add::<BITS>(&padded, scale_at(part, scale), sums);
            }
        }
    }
}

fn scale_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_ne_bytes(*bytes[at..].first_chunk().expect("a scale"))
}

/// Parts whose sums stay in registers. Often they all map to the same place in the first-level cache, which has room for eight.
const BATCH: usize = 4;

#[cfg(test)]
mod tests;
