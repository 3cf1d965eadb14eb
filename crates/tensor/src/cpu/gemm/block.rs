//! The blocked product of one thread, after BLIS (doi:10.1145/2764454).
//!
//! A block of `b` is packed so that it stays in the second-level cache while groups of panels of `a` stream past it.
//! The inner dimension is always split into blocks of [`DEPTH`], and an element is `old + Σ_blocks (Σ_p a·b)`. So its
//! bits depend neither on its position nor on the thread that computes it.

use std::ops::Range;

use super::kernel::{Kernel, Tile};
use super::pack::{OperandBlock, pack};
use super::{Epilogue, Output, Product};
use crate::cpu::element::{Element, Real};

/// Length along `k` that is summed in registers before the sums are written.
pub const DEPTH: usize = 256;
/// Rows of `a` that are packed together: many, because a transposed `a` is read across its rows in memory.
const GROUP: usize = 64;

const A_BYTES: usize = GROUP * DEPTH * size_of::<f64>();
const B_BYTES: usize = 512 << 10;
const SUMS_BYTES: usize = 512 << 10;
const ALIGNMENT: usize = 64;

/// Bytes of scratch that each thread needs.
pub const SCRATCH_BYTES: usize = A_BYTES + B_BYTES + SUMS_BYTES + ALIGNMENT;

/// A range of rows and columns of the result.
#[derive(Clone, Debug)]
pub struct Rectangle {
    /// Its rows.
    pub rows: Range<usize>,
    /// Its columns.
    pub columns: Range<usize>,
}

/// Computes one rectangle of a product.
pub fn run<In, Out, Right, K, const R: usize, const C: usize>(
    product: &Product<In, Out, Right>,
    epilogue: Option<Epilogue<In::Accumulator>>,
    rectangle: Rectangle,
    scratch: &mut [u8],
) where
    In: Element,
    Right: Element<Accumulator = In::Accumulator>,
    Out: Element<Accumulator = In::Accumulator>,
    K: Kernel<R, C>,
{
    let mut scratch = Scratch::new(scratch);
    let k = product.k;
    let width = scratch.b.len() / k.clamp(1, DEPTH) / C * C;
    // Sums over several blocks of depth are kept in the output if it has the accumulator type, otherwise in scratch.
    let sums_wait = k > DEPTH && product.out.as_sums().is_none();
    let height = if sums_wait { scratch.sums.len() / width / R * R } else { usize::MAX };
    for columns in blocks(rectangle.columns, width) {
        for rows in blocks(rectangle.rows.clone(), height) {
            let block = Rectangle { rows, columns: columns.clone() };
            for depths in blocks(0..k.max(1), DEPTH) {
                let (first, last) = (depths.start == 0, depths.end >= k);
                let depths = depths.start..depths.end.min(k);
                let pass = DepthPass { product, epilogue, depths, first, last, sums_wait };
                pass.run::<K, R, C>(&block, &mut scratch);
            }
        }
    }
}

/// The parts of a thread's scratch.
struct Scratch<'a, A> {
    /// A group of panels of `a`.
    a: &'a mut [A],
    /// Panels of `b`.
    b: &'a mut [A],
    /// Sums that are not kept in the output, tile after tile.
    sums: &'a mut [A],
}

impl<'a, A: Real> Scratch<'a, A> {
    fn new(bytes: &'a mut [u8]) -> Self {
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        // SAFETY: every pattern of bits is a number.
        let numbers = unsafe { bytes[start..].align_to_mut::<A>().1 };
        let (a, numbers) = numbers.split_at_mut(A_BYTES / size_of::<A>());
        let (b, numbers) = numbers.split_at_mut(B_BYTES / size_of::<A>());
        Scratch { a, b, sums: &mut numbers[..SUMS_BYTES / size_of::<A>()] }
    }
}

/// One block of depth for one block of the result.
struct DepthPass<'a, In: Element, Out, Right> {
    product: &'a Product<'a, In, Out, Right>,
    epilogue: Option<Epilogue<'a, In::Accumulator>>,
    depths: Range<usize>,
    /// Whether it is the first block of depth.
    first: bool,
    /// Whether it is the last block of depth.
    last: bool,
    /// Whether sums are kept in scratch between passes.
    sums_wait: bool,
}

impl<In, Out, Right> DepthPass<'_, In, Out, Right>
where
    In: Element,
    Right: Element<Accumulator = In::Accumulator>,
    Out: Element<Accumulator = In::Accumulator>,
{
    fn run<K: Kernel<R, C>, const R: usize, const C: usize>(
        &self,
        block: &Rectangle,
        scratch: &mut Scratch<In::Accumulator>,
    ) {
        const { assert!(GROUP.is_multiple_of(R), "a group is cut into whole panels") };
        let Product { a, b, .. } = *self.product;
        let a = OperandBlock { data: a.data, across: a.row_stride, along: a.column_stride };
        let b = OperandBlock { data: b.data, across: b.column_stride, along: b.row_stride };
        let depth = self.depths.len();
        pack::<Right, C>(b.at(block.columns.start, self.depths.start), block.columns.len(), depth, scratch.b);
        let mut tiles = 0;
        for group in blocks(block.rows.clone(), GROUP) {
            pack::<In, R>(a.at(group.start, self.depths.start), group.len(), depth, scratch.a);
            for (i, rows) in blocks(group, R).enumerate() {
                let a_panel = &scratch.a[i * R * depth..][..R * depth];
                for (j, columns) in blocks(block.columns.clone(), C).enumerate() {
                    let b_panel = &scratch.b[j * C * depth..][..C * depth];
                    let sums = &mut scratch.sums[tiles * R * C..][..R * C];
                    let tile = Rectangle { rows: rows.clone(), columns };
                    self.tile::<K, R, C>(a_panel, b_panel, tile, sums);
                    tiles += usize::from(self.sums_wait);
                }
            }
        }
    }

    /// Computes one tile: in the output if it has the accumulator type and room for a whole tile, else in `sums`.
    #[inline(always)]
    fn tile<K: Kernel<R, C>, const R: usize, const C: usize>(
        &self,
        a_panel: &[In::Accumulator],
        b_panel: &[In::Accumulator],
        tile: Rectangle,
        sums: &mut [In::Accumulator],
    ) {
        let depth = self.depths.len();
        let add = self.product.accumulate || !self.first;
        let compute = |pointer, stride| {
            // SAFETY: the panels have `depth` lines, and the tile has `R` rows of `C` that only this thread touches.
            unsafe { K::run(depth, a_panel.as_ptr(), b_panel.as_ptr(), Tile { pointer, stride, add }) }
        };
        match self.product.out.as_sums() {
            Some(out) if tile.rows.len() == R && tile.columns.len() == C => {
                compute(out.pointer_to(tile.rows.start, tile.columns.start), out.row_stride());
                if let Some(epilogue) = self.epilogue.filter(|_| self.last) {
                    finish_in_place(epilogue, &out, tile);
                }
            }
            in_place => {
                if add && (in_place.is_some() || self.first) {
                    self.load::<C>(&tile, sums);
                }
                compute(sums.as_mut_ptr(), C);
                if in_place.is_some() || self.last {
                    self.store::<C>(tile, sums);
                }
            }
        }
    }

    /// Copies a tile of the output into `sums`. Rows of known length vectorise without a remainder.
    #[inline(always)]
    fn load<const C: usize>(&self, tile: &Rectangle, sums: &mut [In::Accumulator]) {
        let columns = tile.columns.len();
        for (row, sums) in tile.rows.clone().zip(sums.as_chunks_mut::<C>().0) {
            // SAFETY: the tile lies in this thread's rectangle, and this is the only reference.
            let out = unsafe { self.product.out.segment(row, tile.columns.start, columns) };
            match out.as_chunks::<C>().0 {
                [whole] => Out::widen_slice(whole, sums),
                _ => Out::widen_slice(out, &mut sums[..columns]),
            }
        }
    }

    /// Writes `sums` to a tile of the output. If they are complete, the epilogue is applied first.
    #[inline(always)]
    fn store<const C: usize>(&self, tile: Rectangle, sums: &mut [In::Accumulator]) {
        let columns = tile.columns.len();
        for (row, sums) in tile.rows.zip(sums.as_chunks_mut::<C>().0) {
            if let Some(epilogue) = self.epilogue.filter(|_| self.last) {
                epilogue(row, tile.columns.start, &mut sums[..columns]);
            }
            // SAFETY: the tile lies in this thread's rectangle, and this is the only reference.
            let out = unsafe { self.product.out.segment(row, tile.columns.start, columns) };
            match out.as_chunks_mut::<C>().0 {
                [whole] => Out::narrow_slice(sums, whole),
                _ => Out::narrow_slice(&sums[..columns], out),
            }
        }
    }
}

fn finish_in_place<A: Element>(epilogue: Epilogue<A>, out: &Output<A>, tile: Rectangle) {
    for row in tile.rows {
        // SAFETY: the tile lies in this thread's rectangle, and this is the only reference.
        let sums = unsafe { out.segment(row, tile.columns.start, tile.columns.len()) };
        epilogue(row, tile.columns.start, sums);
    }
}

/// Splits a range into pieces of `size`; the last one may be smaller.
fn blocks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size).map(move |start| start..end.min(start.saturating_add(size)))
}
