//! Rotary positions (arXiv 2104.09864).

use kintsugi_spec::FrequencyScaling;

use super::driver::Grid;
use super::error::GpuError;
use super::kernels::{ROTARY, suffix};
use super::launcher::{Launcher, PACK, aligned, pointer, pointer_or_null, size};
use kintsugi_tensor::ops::Rotary;

const THREADS: usize = 128;

/// See [`Rotary`].
pub(super) fn rotary(launcher: &Launcher, op: &Rotary) -> Result<(), GpuError> {
    let pairs = op.dims / 2;
    if pairs == 0 {
        return Ok(());
    }
    let wide = pairs.is_multiple_of(PACK) && aligned(op.shape.head_dim, &[op.qkv]);
    let name = format!("rotary_{}{}", if wide { "wide_" } else { "" }, suffix(op.qkv.dtype())?);
    let threads = op.shape.rows() * if wide { pairs / PACK } else { pairs };
    let rotated = op.shape.heads + op.shape.kv_heads;
    let FrequencyScaling { factor, divided, kept, positions, amplitude } = op.scaling;
    let [early, late] = op.slices.offsets(op.shape.sequence);
    let arguments = [
        pointer(op.qkv),
        pointer_or_null(op.positions),
        size(op.shape.rows()),
        size(op.shape.sequence),
        size(early),
        size(late),
        size(op.shape.qkv_width()),
        (rotated as u32).into(),
        (op.shape.head_dim as u32).into(),
        (pairs as u32).into(),
        op.base.into(),
        factor.into(),
        divided.into(),
        kept.into(),
        positions.into(),
        amplitude.into(),
        op.inverse.into(),
    ];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe {
        launcher.launch(&ROTARY, &name, Grid::new(threads.div_ceil(THREADS), THREADS as u32), &arguments)
    }
}
