//! RMSNorm of rows whose columns are divided among ranks.

use super::error::GpuError;
use super::kernels::SPLIT_NORM;
use super::launcher::{Launcher, common_suffix, pointer, pointer_or_null, size};
use super::norm;
use kintsugi_tensor::ops::{RowDots, SplitNorm, SplitNormBackward};

/// Most threads of a block.
const MAX_THREADS: usize = 1024;

/// See [`RowDots`].
pub(super) fn row_dots(launcher: &Launcher, op: &RowDots) -> Result<(), GpuError> {
    let name = format!("row_dots_{}", common_suffix(&[op.x, op.y])?);
    let arguments =
        [pointer(op.x), pointer(op.y), pointer_or_null(op.weight), pointer(op.out), size(op.width)];
    let grid = launcher.per_row(op.rows, op.width, MAX_THREADS);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&SPLIT_NORM, &name, grid, &arguments) }
}

/// See [`SplitNorm`].
pub(super) fn forward(launcher: &Launcher, op: &SplitNorm) -> Result<(), GpuError> {
    let name = format!("split_norm_{}", common_suffix(&[op.x, op.weight, op.out])?);
    let arguments = [
        pointer(op.x),
        pointer(op.weight),
        pointer(op.squares),
        pointer(op.out),
        pointer(op.statistics),
        size(op.width),
        (1.0 / op.whole as f32).into(),
        (op.epsilon as f32).into(),
    ];
    let grid = launcher.per_row(op.rows, op.width, MAX_THREADS);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&SPLIT_NORM, &name, grid, &arguments) }
}

/// See [`SplitNormBackward`]. The gradient of the weights comes first, because `dx` may be the same memory as `dy`.
pub(super) fn backward(launcher: &Launcher, op: &SplitNormBackward) -> Result<(), GpuError> {
    norm::weight_gradient(launcher, op)?;
    let name = format!("split_norm_backward_{}", common_suffix(&[op.dy, op.x, op.weight, op.dx])?);
    let arguments = [
        pointer(op.dy),
        pointer(op.x),
        pointer(op.statistics),
        pointer(op.weight),
        pointer(op.dots),
        pointer(op.dx),
        size(op.width),
        (1.0 / op.whole as f32).into(),
    ];
    let grid = launcher.per_row(op.rows, op.width, MAX_THREADS);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&SPLIT_NORM, &name, grid, &arguments) }
}
