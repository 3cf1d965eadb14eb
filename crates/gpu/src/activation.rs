//! GELU and gated linear units.

use super::error::GpuError;
use super::kernels::ACTIVATION;
use super::launcher::{Launcher, PACK, aligned, aligned_flat, common_suffix, pointer, size};
use kintsugi_tensor::View;
use kintsugi_tensor::ops::{Gated, GatedBackward};

/// Most threads that share a row.
const MAX_THREADS: usize = 256;

/// `to = GELU(from)`.
pub(super) fn gelu(launcher: &Launcher, from: View, to: View) -> Result<(), GpuError> {
    flat(launcher, "gelu", from, to)
}

/// `to = GELU(from)`, by the error function.
pub(super) fn exact_gelu(launcher: &Launcher, from: View, to: View) -> Result<(), GpuError> {
    flat(launcher, "exact_gelu", from, to)
}

/// `d = d ∘ GELU'(from)`, by the error function.
pub(super) fn exact_gelu_backward(launcher: &Launcher, from: View, d: View) -> Result<(), GpuError> {
    flat(launcher, "exact_gelu_backward", from, d)
}

/// A kernel over two views of the same length.
fn flat(launcher: &Launcher, kernel: &str, from: View, to: View) -> Result<(), GpuError> {
    let wide = aligned_flat(&[from, to]);
    let name = format!("{kernel}_{}", common_suffix(&[from, to])?);
    let arguments = [pointer(from), pointer(to), size(to.len()), wide.into()];
    // SAFETY: the arguments match the kernel, and both views have the same number of elements.
    unsafe { launcher.launch(&ACTIVATION, &name, launcher.flat(to.len(), wide), &arguments) }
}

/// See [`Gated`].
pub(super) fn gated(launcher: &Launcher, op: &Gated) -> Result<(), GpuError> {
    let wide = aligned(op.width, &[op.x, op.out]);
    let name = format!("{}_{}", op.gate.unit(), common_suffix(&[op.x, op.out])?);
    let arguments = [pointer(op.x), pointer(op.out), size(op.width), wide.into()];
    let items = if wide { op.width / PACK } else { op.width };
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&ACTIVATION, &name, launcher.per_row(op.rows, items, MAX_THREADS), &arguments) }
}

/// See [`GatedBackward`].
pub(super) fn gated_backward(launcher: &Launcher, op: &GatedBackward) -> Result<(), GpuError> {
    let wide = aligned(op.width, &[op.dout, op.x, op.dx]);
    let name = format!("{}_backward_{}", op.gate.unit(), common_suffix(&[op.dout, op.x, op.dx])?);
    let arguments = [pointer(op.dout), pointer(op.x), pointer(op.dx), size(op.width), wide.into()];
    let items = if wide { op.width / PACK } else { op.width };
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&ACTIVATION, &name, launcher.per_row(op.rows, items, MAX_THREADS), &arguments) }
}
