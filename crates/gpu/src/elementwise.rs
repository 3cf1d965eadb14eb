//! Fills, copies, additions, and the sum that ends a residual branch.

use super::error::GpuError;
use super::kernels::{ELEMENTWISE, suffix};
use super::launcher::{Launcher, aligned, aligned_flat, common_suffix, pointer, pointer_or_null, size};
use kintsugi_tensor::ops::{CopyColumns, Residual};
use kintsugi_tensor::{DType, View};

/// Most addends, and most biases, of a residual sum.
const ADDENDS: usize = 4;

/// Sets every element.
pub(super) fn fill(launcher: &Launcher, value: f64, to: View) -> Result<(), GpuError> {
    let wide = aligned_flat(&[to]);
    let name = format!("fill_{}", suffix(to.dtype())?);
    let arguments = [pointer(to), size(to.len()), (value as f32).into(), wide.into()];
    // SAFETY: as the kernel declares; it writes the view.
    unsafe { launcher.launch(&ELEMENTWISE, &name, launcher.flat(to.len(), wide), &arguments) }
}

/// `x *= factor`.
pub(super) fn scale(launcher: &Launcher, factor: f64, x: View) -> Result<(), GpuError> {
    let wide = aligned_flat(&[x]);
    let name = format!("scale_{}", suffix(x.dtype())?);
    let arguments = [pointer(x), size(x.len()), (factor as f32).into(), wide.into()];
    // SAFETY: as the kernel declares; it reads and writes the view.
    unsafe { launcher.launch(&ELEMENTWISE, &name, launcher.flat(x.len(), wide), &arguments) }
}

/// Copies, converting between types.
pub(super) fn copy(launcher: &Launcher, from: View, to: View) -> Result<(), GpuError> {
    if from.dtype() == DType::U8 && to.dtype() == DType::U8 {
        return copy_bytes(launcher, from, to);
    }
    pairwise(launcher, "copy", from, to)
}

/// Copies bytes as words, with the kernel for f32, which keeps all bits.
fn copy_bytes(launcher: &Launcher, from: View, to: View) -> Result<(), GpuError> {
    let word = DType::F32.bytes();
    let whole = [from, to].iter().all(|view| view.address().is_multiple_of(word as u64));
    if !whole || !to.len().is_multiple_of(word) {
        return Err(GpuError::Unsupported(format!("a copy of {} bytes that are not whole words", to.len())));
    }
    let wide = aligned_flat(&[from, to]);
    let words = to.len() / word;
    let arguments = [pointer(from), pointer(to), size(words), wide.into()];
    // SAFETY: the arguments match the kernel, and both views have this many words.
    unsafe { launcher.launch(&ELEMENTWISE, "copy_f32_f32", launcher.flat(words, wide), &arguments) }
}

/// `to += from`, converting between types.
pub(super) fn add(launcher: &Launcher, from: View, to: View) -> Result<(), GpuError> {
    pairwise(launcher, "add", from, to)
}

fn pairwise(launcher: &Launcher, operation: &str, from: View, to: View) -> Result<(), GpuError> {
    let wide = aligned_flat(&[from, to]);
    let name = format!("{operation}_{}_{}", suffix(from.dtype())?, suffix(to.dtype())?);
    let arguments = [pointer(from), pointer(to), size(to.len()), wide.into()];
    // SAFETY: the arguments match the kernels, and both views have the same number of elements.
    unsafe { launcher.launch(&ELEMENTWISE, &name, launcher.flat(to.len(), wide), &arguments) }
}

/// See [`CopyColumns`].
pub(super) fn copy_columns(launcher: &Launcher, op: &CopyColumns) -> Result<(), GpuError> {
    let views = [op.from.view, op.to.view];
    let widths = [op.from.width, op.from.first, op.to.width, op.to.first, op.columns];
    let wide = widths.into_iter().all(|width| aligned(width, &views));
    let elements = op.rows * op.columns;
    let mut arguments = vec![pointer(op.from.view), pointer(op.to.view), size(elements)];
    arguments.extend(widths.map(size));
    arguments.push(wide.into());
    let name = format!("copy_columns_{}", common_suffix(&views)?);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&ELEMENTWISE, &name, launcher.flat(elements, wide), &arguments) }
}

/// See [`Residual`].
pub(super) fn residual(launcher: &Launcher, op: &Residual) -> Result<(), GpuError> {
    assert!(
        op.addends.len() <= ADDENDS && op.biases.len() <= ADDENDS,
        "a residual branch with too many ends"
    );
    let views: Vec<View> = [op.x, op.out].iter().chain(op.addends).chain(op.biases).copied().collect();
    let wide = aligned(op.width, &views);
    let mut arguments = vec![pointer(op.x)];
    for ends in [op.addends, op.biases] {
        arguments.extend((0..ADDENDS).map(|i| pointer_or_null(ends.get(i).copied())));
    }
    arguments.extend([pointer(op.out), size(op.out.len()), size(op.width), wide.into()]);
    let name = format!("residual_{}", common_suffix(&views)?);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&ELEMENTWISE, &name, launcher.flat(op.out.len(), wide), &arguments) }
}
