//! Cross-entropy: statistics of this rank's part of the vocabulary, then loss and gradient.

use super::driver::Grid;
use super::error::GpuError;
use super::kernels::{LOSS, soft_cap_definition, suffix};
use super::launcher::{Launcher, PACK, aligned, pointer, size};
use super::stream::Argument;
use kintsugi_tensor::View;
use kintsugi_tensor::ops::{CrossEntropy, LossStatistics};

/// Most threads that share a row.
const MAX_THREADS: usize = 512;

/// Static shared memory of a block, beside the row that it holds.
const STATIC_SHARED: usize = 1024;

/// Threads of the one block that adds up the losses of all rows.
const LOSS_THREADS: u32 = 1024;

/// See [`LossStatistics`].
pub(super) fn statistics(launcher: &Launcher, op: &LossStatistics) -> Result<(), GpuError> {
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
    unsafe {
        launch(launcher, op.soft_cap, &name, rows_grid(launcher, op.rows, op.columns, wide), &arguments)
    }
}

/// See [`CrossEntropy`].
pub(super) fn cross_entropy(launcher: &Launcher, op: &CrossEntropy) -> Result<(), GpuError> {
    match (op.own_statistics(), op.scale) {
        (Some(_), Some(scale)) if fits(launcher, op) => {
            whole(launcher, op, scale)?;
            return loss(launcher, op);
        }
        (Some(own), _) => statistics(launcher, &own)?,
        (None, _) => {}
    }
    loss(launcher, op)?;
    op.scale.map_or(Ok(()), |scale| gradient(launcher, op, scale))
}

/// Whether a row of the logits fits into shared memory, so that it is read only once.
fn fits(launcher: &Launcher, op: &CrossEntropy) -> bool {
    aligned(op.columns, &[op.logits]) && row_bytes(op) + STATIC_SHARED <= launcher.properties().shared_bytes
}

fn row_bytes(op: &CrossEntropy) -> usize {
    op.columns * op.logits.dtype().bytes()
}

/// Statistics and gradient in one pass.
fn whole(launcher: &Launcher, op: &CrossEntropy, scale: View) -> Result<(), GpuError> {
    let name = format!("cross_entropy_whole_{}", suffix(op.logits.dtype())?);
    let arguments = [
        pointer(op.logits),
        pointer(op.targets),
        pointer(op.statistics),
        pointer(scale),
        (op.factor as f32).into(),
        (op.z_loss as f32).into(),
        size(op.first),
        size(op.valid),
        size(op.columns),
    ];
    let grid = Grid { shared: row_bytes(op) as u32, ..rows_grid(launcher, op.rows, op.columns, true) };
    // SAFETY: as the kernel declares; the operation's shapes were checked, and a block may have this much memory.
    unsafe { launch(launcher, op.soft_cap, &name, grid, &arguments) }
}

/// Adds up the losses of all rows.
fn loss(launcher: &Launcher, op: &CrossEntropy) -> Result<(), GpuError> {
    let parts = op.parts as u32;
    let arguments = [pointer(op.statistics), pointer(op.loss), size(op.rows), parts.into()];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&LOSS, "cross_entropy_loss", Grid::new(1, LOSS_THREADS), &arguments) }
}

/// The gradient from statistics that were computed earlier.
fn gradient(launcher: &Launcher, op: &CrossEntropy, scale: View) -> Result<(), GpuError> {
    let wide = aligned(op.columns, &[op.logits]);
    let name = format!("cross_entropy_{}", suffix(op.logits.dtype())?);
    let arguments = [
        pointer(op.logits),
        pointer(op.targets),
        pointer(op.statistics),
        pointer(scale),
        (op.factor as f32).into(),
        (op.z_loss as f32).into(),
        size(op.first),
        size(op.valid),
        size(op.rows),
        size(op.columns),
        (op.parts as u32).into(),
        wide.into(),
    ];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe {
        launch(launcher, op.soft_cap, &name, rows_grid(launcher, op.rows, op.columns, wide), &arguments)
    }
}

/// Launches a kernel that reads logits.
///
/// # Safety
/// As [`Launcher::launch`].
unsafe fn launch(
    launcher: &Launcher,
    soft_cap: Option<f64>,
    name: &str,
    grid: Grid,
    arguments: &[Argument],
) -> Result<(), GpuError> {
    let definitions: Vec<String> = soft_cap_definition(soft_cap).into_iter().collect();
    // SAFETY: the caller's promise.
    unsafe { launcher.launch_defined(&LOSS, &definitions, name, grid, arguments) }
}

/// One block per row. In each iteration a thread handles a pack, or one element.
fn rows_grid(launcher: &Launcher, rows: usize, columns: usize, wide: bool) -> Grid {
    launcher.per_row(rows, if wide { columns / PACK } else { columns }, MAX_THREADS)
}
