//! What a step ends with: the norm of the gradients, the decision what the step does, and `AdamW`.

use super::error::CudaError;
use super::kernels::{OPTIMIZER, suffix};
use super::launcher::{Launcher, aligned_flat, pointer, pointer_or_null, size};
use super::stream::Grid;
use crate::ops::{AdamW, LossScaler, Segment, UpdateControl};
use crate::{DType, View};

/// `to[0] += Σ from²`.
pub(super) fn sum_of_squares(launcher: &Launcher, from: View, to: View) -> Result<(), CudaError> {
    expect_f32("a sum of squares", to)?;
    let wide = aligned_flat(&[from]);
    let grid = launcher.flat(from.len(), wide);
    let parts = grid.blocks.0;
    let partial = launcher.scratch(parts as usize * size_of::<f64>())?;
    let name = format!("sum_of_squares_{}", suffix(from.dtype())?);
    let arguments = [pointer(from), partial.into(), size(from.len()), wide.into()];
    // SAFETY: as the kernel declares; the scratch has room for a sum of every block.
    unsafe { launcher.launch(&OPTIMIZER, &name, grid, &arguments)? };
    let arguments = [partial.into(), pointer(to), parts.into()];
    // SAFETY: as the kernel declares; the partial sums were written just before.
    unsafe { launcher.launch(&OPTIMIZER, "sum_of_squares_end", Grid::new(1, 1024), &arguments) }
}

/// See [`UpdateControl`].
pub(super) fn update_control(launcher: &Launcher, op: &UpdateControl) -> Result<(), CudaError> {
    for view in [op.control, op.sum_of_squares, op.loss_sum] {
        expect_f32("the control of a step", view)?;
    }
    let scaler = op.scaler.unwrap_or(LossScaler { window: 0, largest: 0.0 });
    let arguments = [
        pointer(op.control),
        pointer(op.sum_of_squares),
        pointer(op.loss_sum),
        op.tokens.into(),
        op.clip.into(),
        op.rate.peak.into(),
        op.rate.floor.into(),
        (op.rate.warmup as f64).into(),
        (op.rate.steps as f64).into(),
        op.rate.cosine.into(),
        op.betas.0.into(),
        op.betas.1.into(),
        (scaler.window as f64).into(),
        scaler.largest.into(),
    ];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&OPTIMIZER, "update_control", Grid::new(1, 1), &arguments) }
}

/// See [`AdamW`].
pub(super) fn adamw(launcher: &Launcher, op: &AdamW) -> Result<(), CudaError> {
    expect_f32("master weights", op.master)?;
    expect_f32("the control of a step", op.control)?;
    let moments = op.first_moment.dtype();
    assert_eq!(moments, op.second_moment.dtype(), "moments of two types");
    let weights = op.weights.map_or(DType::BF16, |weights| weights.dtype());
    if !matches!(moments, DType::F32 | DType::BF16) || !matches!(weights, DType::BF16 | DType::F16) {
        let sentence = format!("AdamW has no kernel for moments in {moments:?} and weights in {weights:?}");
        return Err(CudaError::Unsupported(sentence));
    }
    let name = format!("adamw_{}_{}_{}", suffix(op.gradient.dtype())?, suffix(moments)?, suffix(weights)?);
    op.segments.iter().try_for_each(|segment| adamw_segment(launcher, op, *segment, &name))
}

fn adamw_segment<'a>(
    launcher: &Launcher,
    op: &AdamW<'a>,
    segment: Segment,
    name: &str,
) -> Result<(), CudaError> {
    let end = segment.start + segment.len;
    let run = |view: View<'a>| view.slice(segment.start..end);
    let [gradient, master, first, second] =
        [op.gradient, op.master, op.first_moment, op.second_moment].map(run);
    let weights = op.weights.map(run);
    let mut views = vec![gradient, master, first, second];
    views.extend(weights);
    let wide = aligned_flat(&views);
    let decay = if segment.decay { op.weight_decay } else { 0.0 };
    let arguments = [
        pointer(gradient),
        pointer(master),
        pointer(first),
        pointer(second),
        pointer_or_null(weights),
        pointer(op.control),
        size(segment.len),
        (op.betas.0 as f32).into(),
        (op.betas.1 as f32).into(),
        (op.epsilon as f32).into(),
        (decay as f32).into(),
        wide.into(),
    ];
    // SAFETY: as the kernel declares; every view has the segment's elements.
    unsafe { launcher.launch(&OPTIMIZER, name, launcher.flat(segment.len, wide), &arguments) }
}

fn expect_f32(what: &str, view: View) -> Result<(), CudaError> {
    if view.dtype() == DType::F32 {
        return Ok(());
    }
    Err(CudaError::Unsupported(format!("{what} is kept in f32 on CUDA, not in {:?}", view.dtype())))
}
