//! Sums over rows. Blocks write partial sums, which are added in a fixed order.

use super::driver::Grid;
use super::error::GpuError;
use super::kernels::{COLUMN_SUM, suffix};
use super::launcher::{
    COLUMN_THREADS, LANES, Launcher, PACK, aligned, common_suffix, pointer, pointer_or_null, size,
};
use super::stream::Argument;
use kintsugi_tensor::View;
use kintsugi_tensor::ops::{ColumnSum, Gradient};

/// See [`ColumnSum`].
pub(super) fn column_sum(launcher: &Launcher, op: &ColumnSum) -> Result<(), GpuError> {
    let wide = aligned(op.width, &[op.x]);
    let blocks = op.width.div_ceil(LANES * if wide { PACK } else { 1 });
    let chunks = launcher.row_chunks(op.rows, blocks, op.width * size_of::<f32>());
    let partial = launcher.scratch(chunks * op.width * size_of::<f32>())?;
    let name = format!("column_sum_{}{}", if wide { "wide_" } else { "" }, suffix(op.x.dtype())?);
    let grid = Grid { blocks: (blocks as u32, chunks as u32, 1), ..Grid::new(blocks, COLUMN_THREADS) };
    let arguments = [pointer(op.x), partial.into(), size(op.rows), size(op.width)];
    // SAFETY: as the kernel declares; the partial sums fit into the scratch.
    unsafe { launcher.launch(&COLUMN_SUM, &name, grid, &arguments)? };
    sum_partials(launcher, partial, chunks, op.width, &[op.out])
}

/// Most gradients whose partial sums are added in one launch.
const TOGETHER: usize = 3;

/// Groups of threads that share the partial sums (`column_sum.cu`).
const PART_GROUPS: usize = 32;

/// `to (+)= Σ_parts partial` for each gradient, where `partial` is `[gradients, parts, width]` in f32, in the scratch.
pub(super) fn sum_partials(
    launcher: &Launcher,
    partial: u64,
    parts: usize,
    width: usize,
    to: &[Gradient],
) -> Result<(), GpuError> {
    assert!(to.len() <= TOGETHER, "more sums than a launch takes");
    let views: Vec<View> = to.iter().map(|to| to.view).collect();
    let name = format!("sum_partials_{}", common_suffix(&views)?);
    let mut arguments = vec![Argument::from(partial)];
    arguments.extend((0..TOGETHER).map(|i| pointer_or_null(views.get(i).copied())));
    let adding = to.iter().enumerate().map(|(i, to)| u32::from(to.accumulate) << i).sum::<u32>();
    arguments.extend([size(parts), size(width), adding.into()]);
    let columns = width.div_ceil(LANES);
    let blocks = (columns as u32, to.len() as u32, 1);
    let grid = Grid { blocks, threads: (LANES * PART_GROUPS) as u32, shared: 0 };
    // SAFETY: as the kernel declares; the caller has written the partial sums.
    unsafe { launcher.launch(&COLUMN_SUM, &name, grid, &arguments) }
}
