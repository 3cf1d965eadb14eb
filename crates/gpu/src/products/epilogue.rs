//! Bias, residual and GELU after a product, for cases in which cuBLASLt has no epilogue or a slower one.

use crate::elementwise;
use crate::error::GpuError;
use crate::kernels::EPILOGUE;
use crate::launcher::{Launcher, aligned, aligned_flat, common_suffix, pointer, pointer_or_null, size};
use crate::stream::Argument;
use kintsugi_tensor::View;
use kintsugi_tensor::ops::{Linear, Residual};

/// Computes the output of [`Linear`] from its plain product.
pub fn finish(launcher: &Launcher, op: &Linear) -> Result<(), GpuError> {
    let Some(residual) = op.residual else {
        return bias_gelu(launcher, op);
    };
    let biases: Vec<View> = op.bias.into_iter().collect();
    let (x, out, rows, width) = (op.out, op.out, op.rows, op.outputs);
    let end = Residual { x, addends: &[residual], biases: &biases, out, rows, width };
    elementwise::residual(launcher, &end)
}

/// Adds the bias to what is there already, if there is one.
pub fn bias(launcher: &Launcher, op: &Linear) -> Result<(), GpuError> {
    if op.bias.is_none() {
        return Ok(());
    }
    bias_gelu(launcher, &Linear { gelu: None, ..*op })
}

fn bias_gelu(launcher: &Launcher, op: &Linear) -> Result<(), GpuError> {
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
    launch(launcher, "bias_gelu", &views, wide, &arguments)
}

/// `dx ∘ GELU'(pre_activation)`, in place.
pub fn gelu_derivative(launcher: &Launcher, pre_activation: View, dx: View) -> Result<(), GpuError> {
    let wide = aligned_flat(&[dx, pre_activation]);
    let arguments = [pointer(dx), pointer(pre_activation), size(dx.len()), wide.into()];
    launch(launcher, "gelu_derivative", &[dx, pre_activation], wide, &arguments)
}

/// Launches an elementwise kernel. It writes the first view.
fn launch(
    launcher: &Launcher,
    name: &str,
    views: &[View],
    wide: bool,
    arguments: &[Argument],
) -> Result<(), GpuError> {
    let name = format!("{name}_{}", common_suffix(views)?);
    let grid = launcher.flat(views[0].len(), wide);
    // SAFETY: the arguments are those of the kernel, and the views were checked against the operation's shape.
    unsafe { launcher.launch(&EPILOGUE, &name, grid, arguments) }
}
