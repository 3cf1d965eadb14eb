//! Packing: copies a block of an operand into panels, in the order in which a microkernel reads them.
//!
//! A panel is `[depth, W]`: `W` rows of `a`, or `W` columns of `b`. Elements are widened on the way. Elements beyond
//! the matrix become zero, so that kernels only see whole panels.

use crate::cpu::element::{Element, Real};

/// A block of an operand. Element `(i, p)`, across and along the depth, is `data[i · across + p · along]`.
#[derive(Clone, Copy)]
pub struct OperandBlock<'a, T> {
    /// Elements from the block's first one on.
    pub data: &'a [T],
    /// Stride across the depth.
    pub across: usize,
    /// Stride along the depth.
    pub along: usize,
}

impl<T> OperandBlock<'_, T> {
    /// The block that starts at `(i, p)`; empty beyond the end.
    pub fn at(self, i: usize, p: usize) -> Self {
        OperandBlock { data: self.data.get(i * self.across + p * self.along..).unwrap_or_default(), ..self }
    }
}

/// Packs `width` by `depth` elements into panels of `W`, at the start of `panels`.
pub fn pack<T: Element, const W: usize>(
    block: OperandBlock<T>,
    width: usize,
    depth: usize,
    panels: &mut [T::Accumulator],
) {
    let panels = &mut panels[..width.next_multiple_of(W) * depth];
    if block.across == 1 {
        return copy::<T, W>(block, width, depth, panels);
    }
    for (index, first) in (0..width).step_by(W).enumerate() {
        let lines = panels[index * W * depth..][..W * depth].as_chunks_mut().0;
        let (block, width) = (block.at(first, 0), W.min(width - first));
        if block.along == 1 {
            transpose_lines::<T, W>(block, width, lines);
        } else {
            gather_lines::<T, W>(block, 0, width, lines);
        }
    }
}

/// Memory is contiguous across the depth: a line of a panel is a range of memory. Loops over depth first, so that
/// memory is read in long runs.
fn copy<T: Element, const W: usize>(
    block: OperandBlock<T>,
    width: usize,
    depth: usize,
    panels: &mut [T::Accumulator],
) {
    let lines = panels.as_chunks_mut::<W>().0;
    for p in 0..depth {
        let (pieces, rest) = block.data[p * block.along..][..width].as_chunks::<W>();
        for (index, piece) in pieces.iter().enumerate() {
            widen(piece, &mut lines[index * depth + p]);
        }
        if !rest.is_empty() {
            let line = &mut lines[pieces.len() * depth + p];
            let (values, beyond) = line.split_at_mut(rest.len());
            widen(rest, values);
            beyond.fill(T::Accumulator::ZERO);
        }
    }
}

/// Memory is contiguous along the depth: copies blocks of 4 × 8, so that reads and writes use vectors.
fn transpose_lines<T: Element, const W: usize>(
    block: OperandBlock<T>,
    width: usize,
    lines: &mut [[T::Accumulator; W]],
) {
    let whole = width / 4 * 4;
    let (eights, rest) = lines.as_chunks_mut::<8>();
    let depth = 8 * eights.len();
    for first in (0..whole).step_by(4) {
        let row = |i: usize| block.at(first + i, 0).data[..depth].as_chunks::<8>().0;
        let rows = row(0).iter().zip(row(1)).zip(row(2)).zip(row(3));
        for (lines, (((r0, r1), r2), r3)) in eights.iter_mut().zip(rows) {
            let piece = [widen_eight(r0), widen_eight(r1), widen_eight(r2), widen_eight(r3)];
            transpose_piece(&piece, lines, first);
        }
    }
    gather_lines(block, whole, width, eights.as_flattened_mut());
    gather_lines(block.at(0, depth), 0, width, rest);
}

/// Any strides: copies element by element, starting at `first` across.
fn gather_lines<T: Element, const W: usize>(
    block: OperandBlock<T>,
    first: usize,
    width: usize,
    lines: &mut [[T::Accumulator; W]],
) {
    if first == W {
        return;
    }
    for (p, line) in lines.iter_mut().enumerate() {
        for (i, value) in (first..width).zip(&mut line[first..]) {
            *value = block.data[i * block.across + p * block.along].widen();
        }
        line[width..].fill(T::Accumulator::ZERO);
    }
}

#[inline(always)]
fn widen<T: Element>(from: &[T], to: &mut [T::Accumulator]) {
    let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<8>(), to.as_chunks_mut::<8>());
    for (to, from) in to.iter_mut().zip(from) {
        *to = widen_eight(from);
    }
    for (to, from) in to_rest.iter_mut().zip(from_rest) {
        *to = from.widen();
    }
}

/// Reads everything before anything is written, so that it compiles to a vector load.
#[inline(always)]
fn widen_eight<T: Element>(from: &[T; 8]) -> [T::Accumulator; 8] {
    let mut to = [T::Accumulator::ZERO; 8];
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.widen();
    }
    to
}

/// `lines[p][first + i] = piece[i][p]`.
#[inline(always)]
fn transpose_piece<A: Real, const W: usize>(piece: &[[A; 8]; 4], lines: &mut [[A; W]; 8], first: usize) {
    #[cfg(target_feature = "avx")]
    if A::DTYPE == crate::DType::F32 {
        assert!(first + 4 <= W);
        // SAFETY: `A` is f32; the piece is whole, and every one of the eight lines has four elements from `first`.
        unsafe { transpose_f32(piece.as_ptr().cast(), lines.as_mut_ptr().cast::<f32>().add(first), W) };
        return;
    }
    for (p, line) in lines.iter_mut().enumerate() {
        for (value, row) in line[first..].iter_mut().zip(piece) {
            *value = row[p];
        }
    }
}

/// Transposes `[4, 8]` to `[8, 4]` with rows `stride` apart. Compilers generate scalar moves for the plain loop.
#[cfg(target_feature = "avx")]
#[inline(always)]
unsafe fn transpose_f32(piece: *const f32, lines: *mut f32, stride: usize) {
    use std::arch::x86_64::{
        _mm_storeu_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_ps, _mm256_shuffle_ps,
        _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };
    // SAFETY: the caller promises both sides.
    unsafe {
        let [r0, r1, r2, r3] = [0, 8, 16, 24].map(|start| _mm256_loadu_ps(piece.add(start)));
        let (low01, high01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
        let (low23, high23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
        let pairs = [
            _mm256_shuffle_ps::<0b01_00_01_00>(low01, low23),
            _mm256_shuffle_ps::<0b11_10_11_10>(low01, low23),
            _mm256_shuffle_ps::<0b01_00_01_00>(high01, high23),
            _mm256_shuffle_ps::<0b11_10_11_10>(high01, high23),
        ];
        for (p, &pair) in pairs.iter().enumerate() {
            _mm_storeu_ps(lines.add(p * stride), _mm256_castps256_ps128(pair));
            _mm_storeu_ps(lines.add((p + 4) * stride), _mm256_extractf128_ps::<1>(pair));
        }
    }
}
