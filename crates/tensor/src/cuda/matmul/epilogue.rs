//! Bias and GELU after a product, where cuBLASLt has no epilogue for them.

use crate::View;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::{EPILOGUE, suffix};
use crate::cuda::launcher::{Launcher, aligned, aligned_flat, pointer, pointer_or_null, size};
use crate::cuda::stream::Argument;
use crate::ops::{Linear, LinearBackwardInput};

/// Makes the output of [`Linear`] of its product.
pub fn bias_gelu(launcher: &Launcher, op: &Linear) -> Result<(), CudaError> {
    let views: Vec<View> = [Some(op.out), op.bias, op.gelu].into_iter().flatten().collect();
    let wide = aligned(op.outputs, &views);
    let arguments = [
        pointer(op.out),
        pointer_or_null(op.bias),
        pointer_or_null(op.gelu),
        size(op.out.len()),
        size(op.outputs),
        wide.into(),
    ];
    launch(launcher, "bias_gelu", op.out, wide, &arguments)
}

/// Makes the output of [`LinearBackwardInput`] of its product.
pub fn gelu_derivative(launcher: &Launcher, op: &LinearBackwardInput) -> Result<(), CudaError> {
    let Some(kept) = op.gelu else {
        return Ok(());
    };
    let wide = aligned_flat(&[op.dx, kept]);
    let arguments = [pointer(op.dx), pointer(kept), size(op.dx.len()), wide.into()];
    launch(launcher, "gelu_derivative", op.dx, wide, &arguments)
}

fn launch(
    launcher: &Launcher,
    name: &str,
    to: View,
    wide: bool,
    arguments: &[Argument],
) -> Result<(), CudaError> {
    let name = format!("{name}_{}", suffix(to.dtype())?);
    // SAFETY: the arguments are those of the kernel, and the views were checked against the operation's shape.
    unsafe { launcher.launch(&EPILOGUE, &name, launcher.flat(to.len(), wide), arguments) }
}
