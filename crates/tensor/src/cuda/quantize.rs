//! Quantisation in blocks with one scale each.

use super::error::CudaError;
use super::kernels::{QUANTIZE, suffix};
use super::launcher::{Launcher, aligned, pointer, size};
use super::stream::{Argument, Grid};
use crate::ops::{BlockFormat, Dequantize, Quantize, Requantize};

/// Threads of a block, and the elements that they hold (`quantize.cu`): the largest block of numbers.
const THREADS: u32 = 256;
const TILE: usize = *BlockFormat::BLOCKS.end();

/// One thread block per tile of every slice.
fn tiles(slices: usize, elements: usize) -> Grid {
    Grid::new(slices * elements.div_ceil(TILE), THREADS)
}

/// The shape of a slice of quantised numbers, as the kernels take it.
fn shape(elements: usize, format: BlockFormat) -> [Argument; 4] {
    let (code_bytes, bytes) = (format.code_bytes(elements), format.slice_bytes(elements));
    [size(elements), size(code_bytes), size(bytes), format.block.ilog2().into()]
}

/// See [`Quantize`].
pub(super) fn quantize(launcher: &Launcher, op: &Quantize) -> Result<(), CudaError> {
    let (elements, wide) = (op.elements(), aligned(op.elements(), &[op.x]));
    let name = format!("quantize_{}_{}", suffix(op.x.dtype())?, op.format.bits.count());
    let views = [pointer(op.x), pointer(op.out), size(op.slices), size(op.columns)];
    let arguments = [&views[..], &shape(elements, op.format), &[wide.into()]].concat();
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&QUANTIZE, &name, tiles(op.slices, elements), &arguments) }
}

/// See [`Dequantize`].
pub(super) fn dequantize(launcher: &Launcher, op: &Dequantize) -> Result<(), CudaError> {
    let (elements, wide) = (op.elements(), aligned(op.elements(), &[op.out.view]));
    let name = format!("dequantize_{}_{}", suffix(op.out.view.dtype())?, op.format.bits.count());
    let views = [pointer(op.codes), pointer(op.out.view), size(op.parts), size(op.slices)];
    let flags = [op.out.accumulate.into(), wide.into()];
    let arguments = [&views[..], &shape(elements, op.format), &flags].concat();
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&QUANTIZE, &name, tiles(op.slices, elements), &arguments) }
}

/// See [`Requantize`].
pub(super) fn requantize(launcher: &Launcher, op: &Requantize) -> Result<(), CudaError> {
    let name = format!("requantize_{}", op.format.bits.count());
    let views = [pointer(op.codes), pointer(op.out), size(op.parts), size(op.slices), size(op.columns)];
    let arguments = [&views[..], &shape(op.elements, op.format)].concat();
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&QUANTIZE, &name, tiles(op.slices, op.elements), &arguments) }
}
