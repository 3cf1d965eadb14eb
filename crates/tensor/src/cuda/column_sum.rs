//! Sums over rows, by partial sums that are added in a fixed order.

use super::error::CudaError;
use super::kernels::{COLUMN_SUM, suffix};
use super::launcher::{COLUMN_THREADS, LANES, Launcher, PACK, aligned, pointer, size};
use super::stream::Grid;
use crate::ops::{ColumnSum, Gradient};

/// See [`ColumnSum`].
pub(super) fn column_sum(launcher: &Launcher, op: &ColumnSum) -> Result<(), CudaError> {
    let wide = aligned(op.width, &[op.x]);
    let blocks = op.width.div_ceil(LANES * if wide { PACK } else { 1 });
    let chunks = launcher.row_chunks(op.rows, blocks, op.width * size_of::<f32>());
    let partial = launcher.scratch(chunks * op.width * size_of::<f32>())?;
    let name = format!("column_sum_{}{}", if wide { "wide_" } else { "" }, suffix(op.x.dtype())?);
    let grid = Grid { blocks: (blocks as u32, chunks as u32, 1), ..Grid::new(blocks, COLUMN_THREADS) };
    let arguments = [pointer(op.x), partial.into(), size(op.rows), size(op.width)];
    // SAFETY: as the kernel declares; the partial sums fit into the scratch.
    unsafe { launcher.launch(&COLUMN_SUM, &name, grid, &arguments)? };
    sum_partials(launcher, partial, chunks, op.width, op.out)
}

/// `to (+)= Σ_parts partial`, where `partial` is `[parts, width]` in f32, in the scratch.
pub(super) fn sum_partials(
    launcher: &Launcher,
    partial: u64,
    parts: usize,
    width: usize,
    to: Gradient,
) -> Result<(), CudaError> {
    let name = format!("sum_partials_{}", suffix(to.view.dtype())?);
    let arguments = [partial.into(), pointer(to.view), size(parts), size(width), to.accumulate.into()];
    // SAFETY: as the kernel declares; the caller has written the partial sums.
    unsafe {
        launcher.launch(&COLUMN_SUM, &name, Grid::new(width.div_ceil(LANES), COLUMN_THREADS), &arguments)
    }
}
