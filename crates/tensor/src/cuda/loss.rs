//! Cross-entropy: statistics of this rank's part of the vocabulary, then loss and gradient.

use super::error::CudaError;
use super::kernels::{LOSS, suffix};
use super::launcher::{Launcher, PACK, aligned, per_row, pointer, size};
use super::stream::Grid;
use crate::ops::{CrossEntropy, LossStatistics};

/// Most threads that share a row.
const MOST_THREADS: usize = 512;

/// Threads of the one block that adds up the losses of all rows.
const LOSS_THREADS: u32 = 1024;

/// See [`LossStatistics`].
pub(super) fn statistics(launcher: &Launcher, op: &LossStatistics) -> Result<(), CudaError> {
    let wide = aligned(op.columns, &[op.logits]);
    let name = format!("loss_statistics_{}", suffix(op.logits.dtype())?);
    let arguments = [
        pointer(op.logits),
        pointer(op.targets),
        pointer(op.statistics),
        size(op.first),
        size(op.valid),
        size(op.columns),
        wide.into(),
    ];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&LOSS, &name, rows_grid(op.rows, op.columns, wide), &arguments) }
}

/// See [`CrossEntropy`].
pub(super) fn cross_entropy(launcher: &Launcher, op: &CrossEntropy) -> Result<(), CudaError> {
    let parts = op.parts as u32;
    let arguments = [pointer(op.statistics), pointer(op.loss), size(op.rows), parts.into()];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&LOSS, "cross_entropy_loss", Grid::new(1, LOSS_THREADS), &arguments)? };
    let Some(scale) = op.scale else { return Ok(()) };
    let wide = aligned(op.columns, &[op.logits]);
    let name = format!("cross_entropy_{}", suffix(op.logits.dtype())?);
    let arguments = [
        pointer(op.logits),
        pointer(op.targets),
        pointer(op.statistics),
        pointer(scale),
        (op.factor as f32).into(),
        size(op.first),
        size(op.valid),
        size(op.rows),
        size(op.columns),
        parts.into(),
        wide.into(),
    ];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&LOSS, &name, rows_grid(op.rows, op.columns, wide), &arguments) }
}

/// One block per row, a pack or an element per thread and turn.
fn rows_grid(rows: usize, columns: usize, wide: bool) -> Grid {
    per_row(rows, if wide { columns / PACK } else { columns }, MOST_THREADS)
}
