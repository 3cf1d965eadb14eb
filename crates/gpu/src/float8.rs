//! Matrices in 8 bits for products.

use super::driver::Grid;
use super::error::GpuError;
use super::kernels::{FLOAT8, suffix};
use super::launcher::{Launcher, aligned_flat, pointer, pointer_or_null, size};
use kintsugi_tensor::Float8;
use kintsugi_tensor::ops::{CastToFloat8, Float8Source};

/// Rows and columns of a block's tile, and its threads (`float8.cu`).
const TILE: usize = 128;
const THREADS: u32 = 256;

/// See [`CastToFloat8`].
pub(super) fn cast(launcher: &Launcher, op: &CastToFloat8) -> Result<(), GpuError> {
    let (x, function) = match op.x {
        Float8Source::Numbers(x) => (x, ""),
        Float8Source::Gelu(x) => (x, "_gelu"),
    };
    let views = [Some(x), op.codes, op.transposed];
    if !views.into_iter().flatten().all(|view| aligned_flat(&[view])) {
        return Err(GpuError::Unsupported("a matrix in 8 bits that is not at a multiple of 16 bytes".into()));
    }
    let grid = launcher.flat(x.len(), true);
    let maxima = launcher.scratch(grid.blocks.0 as usize * size_of::<f32>())?;
    let dtype = suffix(x.dtype())?;
    let arguments = [pointer(x), maxima.into(), size(x.len())];
    // SAFETY: as the kernel declares; the scratch has a number for each block.
    unsafe { launcher.launch(&FLOAT8, &format!("float8_maximum{function}_{dtype}"), grid, &arguments)? };
    let format = match op.scale.format {
        Float8::E4M3 => "e4m3",
        Float8::E5M2 => "e5m2",
    };
    let arguments = [
        pointer(x),
        maxima.into(),
        grid.blocks.0.into(),
        pointer_or_null(op.codes),
        pointer_or_null(op.transposed),
        pointer(op.scale.inverse),
        size(op.rows),
        size(op.columns),
    ];
    let tiles = Grid::new(op.columns.div_ceil(TILE), THREADS);
    let down = u32::try_from(op.rows.div_ceil(TILE)).expect("a grid of more blocks than the GPU counts");
    let tiles = Grid { blocks: (tiles.blocks.0, down, 1), ..tiles };
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&FLOAT8, &format!("float8_cast{function}_{dtype}_{format}"), tiles, &arguments) }
}
