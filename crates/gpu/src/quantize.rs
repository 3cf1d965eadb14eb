//! Quantisation in blocks with one scale each.

use super::driver::Grid;
use super::error::GpuError;
use super::kernels::{QUANTIZE, suffix};
use super::launcher::{Launcher, aligned, pointer, size};
use super::stream::Argument;
use kintsugi_tensor::ops::{BlockFormat, Dequantize, Quantize, Requantize};

/// Threads of a thread block, and the numbers that each holds in registers (`quantize.cu`). Together they have the largest block.
const THREADS: u32 = 256;
const VALUES: usize = 16;
/// The same of `requantize`: a sum takes many instructions, and more numbers share those that each thread needs.
const SUMMED_VALUES: usize = 32;

/// Thread blocks for every slice.
fn tiles(values: usize, elements: usize, slices: usize) -> Grid {
    let tiles = Grid::new(elements.div_ceil(values * THREADS as usize), THREADS);
    Grid { blocks: (tiles.blocks.0, slices as u32, 1), ..tiles }
}

/// The shape of a slice of quantised numbers, as the kernels take it.
fn shape(elements: usize, format: BlockFormat) -> [Argument; 4] {
    let (code_bytes, bytes) = (format.code_bytes(elements), format.slice_bytes(elements));
    [size(elements), size(code_bytes), size(bytes), format.block.ilog2().into()]
}

/// See [`Quantize`].
pub(super) fn quantize(launcher: &Launcher, op: &Quantize) -> Result<(), GpuError> {
    let (elements, wide) = (op.elements(), aligned(op.elements(), &[op.x]));
    let name = format!("quantize_{}_{}", suffix(op.x.dtype())?, op.format.bits.count());
    let views = [pointer(op.x), pointer(op.out)];
    let arguments = [&views[..], &shape(elements, op.format), &[wide.into()]].concat();
    let grid = tiles(VALUES, elements, op.slices);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&QUANTIZE, &name, grid, &arguments) }
}

/// See [`Dequantize`].
pub(super) fn dequantize(launcher: &Launcher, op: &Dequantize) -> Result<(), GpuError> {
    let (elements, wide) = (op.elements(), aligned(op.elements(), &[op.out.view]));
    let name = format!("dequantize_{}_{}", suffix(op.out.view.dtype())?, op.format.bits.count());
    let views = [pointer(op.codes), pointer(op.out.view), count(op.parts), size(op.slices)];
    let flags = [op.out.accumulate.into(), wide.into()];
    let arguments = [&views[..], &shape(elements, op.format), &flags].concat();
    let grid = tiles(VALUES, elements, op.slices);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&QUANTIZE, &name, grid, &arguments) }
}

/// See [`Requantize`].
pub(super) fn requantize(launcher: &Launcher, op: &Requantize) -> Result<(), GpuError> {
    let name = format!("requantize_{}", op.format.bits.count());
    let views = [pointer(op.codes), pointer(op.out), count(op.parts), size(op.slices)];
    let arguments = [&views[..], &shape(op.elements, op.format)].concat();
    let grid = tiles(SUMMED_VALUES, op.elements, op.slices);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&QUANTIZE, &name, grid, &arguments) }
}

/// A number of parts, as the kernels' `int`.
fn count(parts: usize) -> Argument {
    u32::try_from(parts).expect("fewer parts than ranks").into()
}
