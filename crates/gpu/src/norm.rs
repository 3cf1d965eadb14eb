//! LayerNorm and RMSNorm: chooses the kernel for the width, and the number of blocks that share the rows.

use super::column_sum::sum_partials;
use super::driver::Grid;
use super::error::GpuError;
use super::kernels::NORM;
use super::launcher::{
    COLUMN_THREADS, LANES, Launcher, PACK, aligned, common_suffix, pointer, pointer_or_null, size,
};
use super::stream::Argument;
use kintsugi_tensor::View;
use kintsugi_tensor::ops::{Gradient, Norm, NormBackward, SplitNormBackward};

/// Packs of a row that each thread of the forward holds in registers (`HELD` of `norm.cu`).
const HELD: usize = 2;

/// Most threads of a block.
const MAX_THREADS: usize = 1024;

/// Backward kernels that hold a row in registers: name, packs per thread, and the most threads for which the registers
/// suffice.
const HELD_BACKWARD: [(&str, usize, usize); 3] =
    [("held1", 1, 512), ("held2", 2, 512), ("held2_long", 2, 768)];

/// See [`Norm`].
pub(super) fn forward(launcher: &Launcher, op: &Norm) -> Result<(), GpuError> {
    let mut views = vec![op.x, op.weight, op.out];
    views.extend(op.bias);
    let threads = op.width.div_ceil(PACK * HELD);
    let held = aligned(op.width, &views) && threads <= MAX_THREADS;
    let (way, items) = if held { ("held", threads) } else { ("any", op.width) };
    let name = format!("norm_{way}_{}", common_suffix(&views)?);
    let arguments = [
        pointer(op.x),
        pointer(op.weight),
        pointer_or_null(op.bias),
        pointer(op.out),
        pointer(op.statistics),
        size(op.rows),
        size(op.width),
        (op.epsilon as f32).into(),
    ];
    let by_row = launcher.per_row(op.rows, items, MAX_THREADS);
    let blocks = op.rows.min(launcher.multiprocessors() * (MAX_THREADS / by_row.threads as usize));
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&NORM, &name, Grid::new(blocks, by_row.threads), &arguments) }
}

/// See [`NormBackward`].
pub(super) fn backward(launcher: &Launcher, op: &NormBackward) -> Result<(), GpuError> {
    let sums: Vec<Gradient> = [op.dweight, op.dbias, op.residual_sum].into_iter().flatten().collect();
    let bytes_per_part = 3 * op.width * size_of::<f32>();
    let mut views: Vec<View> = vec![op.dy, op.x, op.weight, op.dx];
    views.extend(op.residual);
    let dtype = common_suffix(&views)?;
    let held =
        if aligned(op.width, &views) { held_backward(op.width, launcher.properties().warp) } else { None };
    let parts = match held {
        Some((_, threads)) => {
            // As many blocks as run at once, or fewer if their partial sums would not fit.
            let blocks = launcher.multiprocessors() * (MAX_THREADS / threads).clamp(1, 8);
            blocks.min(op.rows).min(launcher.scratch_bytes() / bytes_per_part).max(1)
        }
        None => launcher.row_chunks(op.rows, op.width.div_ceil(LANES), bytes_per_part),
    };
    let partial = launcher.scratch(parts * bytes_per_part)?;
    let arguments = backward_arguments(op, partial);
    let launch = |way: &str, grid: Grid| {
        // SAFETY: as the kernels declare; the operation's shapes were checked, and the partial sums fit.
        unsafe { launcher.launch(&NORM, &format!("norm_backward_{way}_{dtype}"), grid, &arguments) }
    };
    if let Some((way, threads)) = held {
        let sum = if op.residual_sum.is_some() { "_sum" } else { "" };
        launch(&format!("{way}{sum}"), Grid::new(parts, threads as u32))?;
    } else {
        let columns = op.width.div_ceil(LANES);
        // The gradient of the weights comes first, because `dx` may be the same memory as `dy`.
        if op.dweight.is_some() {
            let blocks = (columns as u32, parts as u32, 1);
            launch("any_weight", Grid { blocks, ..Grid::new(columns, COLUMN_THREADS) })?;
        }
        launch("any_input", launcher.per_row(op.rows, op.width, MAX_THREADS))?;
    }
    if sums.is_empty() {
        return Ok(());
    }
    if op.dbias.is_some() || op.residual_sum.is_none() {
        return sum_partials(launcher, partial, parts, op.width, &sums);
    }
    // Without a bias the two sums are not adjacent in the scratch buffer.
    sum_partials(launcher, partial, parts, op.width, &sums[..1])?;
    sum_partials(launcher, partial + (2 * parts * bytes_per_part / 3) as u64, parts, op.width, &sums[1..])
}

/// The gradient of the weights of [`SplitNormBackward`], which is that of a norm with the same statistics.
pub(super) fn weight_gradient(launcher: &Launcher, op: &SplitNormBackward) -> Result<(), GpuError> {
    let Some(dweight) = op.dweight else { return Ok(()) };
    let bytes_per_part = 3 * op.width * size_of::<f32>();
    let columns = op.width.div_ceil(LANES);
    let parts = launcher.row_chunks(op.rows, columns, bytes_per_part);
    let partial = launcher.scratch(parts * bytes_per_part)?;
    let arguments = [
        pointer(op.dy),
        pointer(op.x),
        pointer(op.statistics),
        pointer(op.weight),
        pointer_or_null(None),
        pointer(op.dx),
        partial.into(),
        size(op.rows),
        size(op.width),
        false.into(),
    ];
    let name = format!("norm_backward_any_weight_{}", common_suffix(&[op.dy, op.x, op.weight])?);
    let grid = Grid { blocks: (columns as u32, parts as u32, 1), ..Grid::new(columns, COLUMN_THREADS) };
    // SAFETY: as the kernel declares; the operation's shapes were checked, and the partial sums fit.
    unsafe { launcher.launch(&NORM, &name, grid, &arguments)? };
    sum_partials(launcher, partial, parts, op.width, &[dweight])
}

/// Name and threads of the backward kernel that holds a row of this width, if there is one.
fn held_backward(width: usize, warp: usize) -> Option<(&'static str, usize)> {
    HELD_BACKWARD
        .iter()
        .map(|&(way, packs, most)| (way, width.div_ceil(PACK * packs).next_multiple_of(warp), most))
        .find(|&(_, threads, most)| threads <= most)
        .map(|(way, threads, _)| (way, threads))
}

fn backward_arguments(op: &NormBackward, partial: u64) -> [Argument; 10] {
    [
        pointer(op.dy),
        pointer(op.x),
        pointer(op.statistics),
        pointer(op.weight),
        pointer_or_null(op.residual),
        pointer(op.dx),
        partial.into(),
        size(op.rows),
        size(op.width),
        op.centred.into(),
    ]
}
