//! Our own products with GELU or its derivative as epilogue, for compute capability 9.0. The tensor cores start the
//! next tile while GELU is applied to the last one, and the kernels also sum the bias gradients.

use cudarc::driver::sys::CUtensorMap;

use super::tensor_map::{self, CHUNK};
use crate::column_sum::sum_partials;
use crate::driver::Grid;
use crate::error::GpuError;
use crate::kernels::HOPPER_PRODUCT;
use crate::launcher::{Launcher, aligned_flat, pointer_or_null};
use crate::stream::Argument;
use kintsugi_tensor::ops::{Linear, LinearBackwardInput};
use kintsugi_tensor::{DType, View};

/// Rows and columns of a tile (`TILE` of `hopper_product.cu`).
const TILE: usize = 128;

/// Length along `k` that is loaded at once (`SLICE`).
const SLICE: usize = 64;

/// Blocks per cluster (`CLUSTER`), which load the weights of a tile together.
const CLUSTER: usize = 2;

/// Threads per block.
const THREADS: u32 = 384;

/// Shared memory per block (the kernel's `Shared`).
const SHARED_BYTES: u32 = 229_472;

/// TMA requires widths that are multiples of this many elements.
const UNIT: usize = 8;

/// Whether there is a kernel for this product with GELU.
pub fn has_gelu(launcher: &Launcher, op: &Linear) -> bool {
    let Some(pre_activation) = op.gelu else { return false };
    let views: Vec<View> = [op.x, op.weight, op.out, pre_activation].into_iter().chain(op.bias).collect();
    fits(launcher, &views, [op.outputs, op.inputs])
}

/// Whether there is a kernel for this product with GELU's derivative.
pub fn has_gelu_derivative(launcher: &Launcher, op: &LinearBackwardInput, pre_activation: View) -> bool {
    let views = [op.dy, op.weight, op.dx, pre_activation];
    fits(launcher, &views, [op.inputs, op.outputs])
        && partial_bytes(op.rows, op.inputs) <= launcher.scratch_bytes()
}

fn fits(launcher: &Launcher, views: &[View], widths: [usize; 2]) -> bool {
    launcher.properties().capability == Some((9, 0))
        && views.iter().all(|view| view.dtype() == DType::BF16)
        && aligned_flat(views)
        && widths.iter().all(|width| width.is_multiple_of(UNIT))
}

/// See [`Linear`], with GELU.
pub fn gelu(launcher: &Launcher, op: &Linear) -> Result<(), GpuError> {
    let pre_activation = op.gelu.expect("a product with GELU keeps what it is applied to");
    let matrices = [
        matrix(op.x, op.inputs, TILE)?,
        matrix(op.weight, op.inputs, TILE / CLUSTER)?,
        matrix(pre_activation, op.outputs, TILE)?,
        matrix(op.out, op.outputs, TILE)?,
    ];
    let pointers = [pointer_or_null(op.bias), 0_u64.into()];
    launch(launcher, "product_gelu", &matrices, pointers, [op.rows, op.outputs, op.inputs])
}

/// See [`LinearBackwardInput`], with GELU's derivative.
pub fn gelu_derivative(
    launcher: &Launcher,
    op: &LinearBackwardInput,
    pre_activation: View,
) -> Result<(), GpuError> {
    let matrices = [
        matrix(op.dy, op.outputs, TILE)?,
        matrix(op.weight, op.inputs, SLICE)?,
        matrix(pre_activation, op.inputs, TILE)?,
        matrix(op.dx, op.inputs, TILE)?,
    ];
    let partial = launcher.scratch(partial_bytes(op.rows, op.inputs))?;
    let pointers = [0_u64.into(), partial.into()];
    launch(launcher, "product_derivative", &matrices, pointers, [op.rows, op.inputs, op.outputs])?;
    match op.dbias {
        Some(dbias) => sum_partials(launcher, partial, op.rows.div_ceil(TILE), op.inputs, &[dbias]),
        None => Ok(()),
    }
}

/// Bytes of the partial bias gradients: one row of sums per row of tiles.
fn partial_bytes(rows: usize, width: usize) -> usize {
    rows.div_ceil(TILE) * width * size_of::<f32>()
}

fn launch(
    launcher: &Launcher,
    name: &str,
    matrices: &[CUtensorMap; 4],
    pointers: [Argument; 2],
    size: [usize; 3],
) -> Result<(), GpuError> {
    let size =
        size.map(|length| Argument::from(i32::try_from(length).expect("a side below 2³¹").cast_unsigned()));
    let arguments: Vec<Argument> = pointers.into_iter().chain(size).collect();
    let blocks = launcher.properties().multiprocessors / CLUSTER * CLUSTER;
    let grid = Grid { shared: SHARED_BYTES, ..Grid::new(blocks, THREADS) };
    // SAFETY: as the kernel declares; the matrices are the operation's, whose shapes were checked, and the partial sums
    // fit into the scratch.
    unsafe {
        launcher.launch_with_table(&HOPPER_PRODUCT, name, grid, &tensor_map::table(matrices), &arguments)
    }
}

/// The tensor map of a row-major matrix, moved in boxes of [`CHUNK`] columns and `rows` rows.
fn matrix(view: View, width: usize, rows: usize) -> Result<CUtensorMap, GpuError> {
    tensor_map::encode(view, [width, view.len() / width], [CHUNK, rows])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_has_the_sizes_that_are_launched() {
        for size in [
            format!("constexpr int TILE = {TILE};"),
            format!("constexpr int SLICE = {SLICE};"),
            format!("constexpr int CLUSTER = {CLUSTER};"),
            format!("static_assert(sizeof(Shared) == {SHARED_BYTES},"),
            format!("__launch_bounds__({} * GROUP, 1)", THREADS / 128),
        ] {
            assert!(HOPPER_PRODUCT.text.contains(&size), "{size}");
        }
    }
}
