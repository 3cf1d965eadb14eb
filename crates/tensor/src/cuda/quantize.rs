//! Blockwise quantisation to small integers.

use super::error::CudaError;
use super::kernels::{QUANTIZE, suffix};
use super::launcher::{Launcher, PACK, aligned_flat, per_row, pointer, size};
use crate::ops::{Quantize, Restore};

/// Most threads that share a block.
const MOST_THREADS: usize = 256;

/// See [`Quantize`].
pub(super) fn quantize(launcher: &Launcher, op: &Quantize) -> Result<(), CudaError> {
    let wide = aligned_flat(&[op.x]);
    let name = format!("quantize_{}_{}", suffix(op.x.dtype())?, op.bits.count());
    let sizes = [size(op.x.len()), size(op.block), wide.into()];
    let arguments = [&[pointer(op.x), pointer(op.codes), pointer(op.scales)][..], &sizes].concat();
    let grid = per_row(op.scales.len(), op.block / PACK, MOST_THREADS);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&QUANTIZE, &name, grid, &arguments) }
}

/// See [`Restore`].
pub(super) fn restore(launcher: &Launcher, op: &Restore) -> Result<(), CudaError> {
    let wide = aligned_flat(&[op.out]);
    let name = format!("restore_{}_{}", suffix(op.out.dtype())?, op.bits.count());
    let sizes = [size(op.out.len()), size(op.block), op.accumulate.into(), wide.into()];
    let arguments = [&[pointer(op.codes), pointer(op.scales), pointer(op.out)][..], &sizes].concat();
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&QUANTIZE, &name, launcher.flat(op.out.len(), true), &arguments) }
}
