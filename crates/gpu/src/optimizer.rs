//! The end of a step: the norm of the gradients, the step's control values, and the update of the parameters.

use super::driver::Grid;
use super::error::GpuError;
use super::kernels::{OPTIMIZER, suffix};
use super::launcher::{
    Launcher, aligned_flat, common_suffix, device_address, pointer, pointer_or_null, size,
};
use super::stream::Argument;
use kintsugi_tensor::ops::{
    LossScaler, Momentum, Normalize, Parameters, ScaledSum, Segment, Squares, SumsOfSquares, Update,
    UpdateControl, UpdateRule,
};
use kintsugi_tensor::{DType, View};

/// Elements that one block squares and sums (`SQUARES_CHUNK` of `optimizer.cu`).
const SQUARES_CHUNK: usize = 16384;

/// Most parts of one launch (`SQUARES_PARTS`), and words per part in the table.
const SQUARES_PARTS: usize = 96;
const SQUARES_WORDS: usize = 4;

/// Elements that one block updates (`UPDATE_CHUNK`).
const UPDATE_CHUNK: usize = 4096;

/// Most segments of one launch (`UPDATE_SEGMENTS`), and words per segment in the table.
const UPDATE_SEGMENTS: usize = 56;
const UPDATE_WORDS: usize = 8;

/// Threads per block, and of the single block that finishes a sum.
const THREADS: u32 = 256;
const END_THREADS: u32 = 1024;

/// See [`SumsOfSquares`]. One launch per [`SQUARES_PARTS`] parts, each followed by a small one that finishes the sums.
pub(super) fn sums_of_squares(launcher: &Launcher, op: &SumsOfSquares) -> Result<(), GpuError> {
    for view in op.parts.iter().filter_map(|part| part.own).chain(op.total) {
        expect_f32("a sum of squares", view)?;
    }
    op.parts.chunks(SQUARES_PARTS).try_for_each(|parts| some_squares(launcher, parts, op.total))
}

fn some_squares(launcher: &Launcher, parts: &[Squares], total: Option<View>) -> Result<(), GpuError> {
    let name = format!("squares_{}", suffix(parts[0].from.dtype())?);
    let (mut table, mut blocks) = ([0; SQUARES_PARTS * SQUARES_WORDS], 0);
    for (words, part) in table.as_chunks_mut::<SQUARES_WORDS>().0.iter_mut().zip(parts) {
        let own = part.own.map_or(0, device_address);
        *words =
            [device_address(part.from), own, part.from.len() as u64, block_and_flag(blocks, part.counts)];
        blocks += part.from.len().div_ceil(SQUARES_CHUNK);
    }
    let partial = launcher.scratch(blocks * size_of::<f64>())?;
    let count = (parts.len() as u32).into();
    let arguments = [count, partial.into()];
    let grid = Grid::new(blocks, THREADS);
    // SAFETY: as the kernel declares; the scratch has room for a sum of every block.
    unsafe { launcher.launch_with_table(&OPTIMIZER, &name, grid, &table, &arguments)? };
    let arguments = [count, (blocks as u32).into(), partial.into(), pointer_or_null(total)];
    let grid = Grid::new(1, END_THREADS);
    // SAFETY: as the kernel declares; the partial sums were written just before.
    unsafe { launcher.launch_with_table(&OPTIMIZER, "squares_end", grid, &table, &arguments) }
}

/// A table entry: the number of the first block, with a flag in the high bits.
fn block_and_flag(block: usize, flag: bool) -> u64 {
    block as u64 | u64::from(flag) << 32
}

/// See [`UpdateControl`].
pub(super) fn update_control(launcher: &Launcher, op: &UpdateControl) -> Result<(), GpuError> {
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
        (op.rate.decay_start as f64).into(),
        (op.rate.decay_steps as f64).into(),
        (op.rate.curve as u32).into(),
        op.betas.0.into(),
        op.betas.1.into(),
        (scaler.window as f64).into(),
        scaler.largest.into(),
    ];
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&OPTIMIZER, "update_control", Grid::new(1, 1), &arguments) }
}

/// See [`Update`]. One launch per [`UPDATE_SEGMENTS`] segments, over all parameters.
pub(super) fn update(launcher: &Launcher, op: &Update) -> Result<(), GpuError> {
    expect_f32("the control of a step", op.control)?;
    let Some(first) = op.parameters.first() else { return Ok(()) };
    expect_f32("master weights", first.master)?;
    // Without states or a copy of the weights any type will do.
    let states = first.states[0].map_or(DType::F32, |state| state.dtype());
    let weights = first.weights.map_or(DType::BF16, |weights| weights.dtype());
    let rule = op.rule.name();
    if !matches!(states, DType::F32 | DType::BF16) || !matches!(weights, DType::BF16 | DType::F16) {
        let sentence = format!("{rule} has no kernel for states in {states:?} and weights in {weights:?}");
        return Err(GpuError::Unsupported(sentence));
    }
    let name = format!("{rule}_{}_{}_{}", suffix(first.gradient.dtype())?, suffix(states)?, suffix(weights)?);
    let segments: Vec<(Parameters, Segment)> =
        op.parameters.iter().flat_map(|of| of.segments.iter().map(|segment| (*of, *segment))).collect();
    segments.chunks(UPDATE_SEGMENTS).try_for_each(|some| some_segments(launcher, op, some, &name))
}

fn some_segments(
    launcher: &Launcher,
    op: &Update,
    segments: &[(Parameters, Segment)],
    name: &str,
) -> Result<(), GpuError> {
    let (mut table, mut blocks) = ([0; UPDATE_SEGMENTS * UPDATE_WORDS], 0);
    for (words, (of, segment)) in table.as_chunks_mut::<UPDATE_WORDS>().0.iter_mut().zip(segments) {
        let run = |view: View| device_address(view) + (segment.start * view.dtype().bytes()) as u64;
        let [gradient, master] = [of.gradient, of.master].map(run);
        let [first, second, weights] =
            [of.states[0], of.states[1], of.weights].map(|view| view.map_or(0, run));
        let numbers = [segment.rate_factor, segment.decay].map(|number| u64::from((number as f32).to_bits()));
        let numbers = numbers[0] | numbers[1] << 32;
        *words = [gradient, master, first, second, weights, segment.len as u64, blocks as u64, numbers];
        blocks += segment.len.div_ceil(UPDATE_CHUNK);
    }
    let mut arguments: Vec<Argument> = vec![(segments.len() as u32).into(), pointer(op.control)];
    let number = |number: f64| Argument::from(number as f32);
    match op.rule {
        UpdateRule::AdamW { betas, epsilon } => arguments.extend([betas.0, betas.1, epsilon].map(number)),
        UpdateRule::Lion { betas } => arguments.extend([betas.0, betas.1].map(number)),
        UpdateRule::Sgd { momentum, nesterov } => {
            arguments.extend([number(momentum), u32::from(nesterov).into()]);
        }
        UpdateRule::Direction => {}
    }
    // SAFETY: as the kernel declares; every segment lies in its views.
    unsafe { launcher.launch_with_table(&OPTIMIZER, name, Grid::new(blocks, THREADS), &table, &arguments) }
}

/// See [`Momentum`]: a table with one entry.
pub(super) fn momentum(launcher: &Launcher, op: &Momentum) -> Result<(), GpuError> {
    expect_f32("the control of a step", op.control)?;
    let [gradient, momentum, out] = [op.gradient, op.momentum, op.out];
    let [of_gradient, of_momentum, of_out] = [gradient, momentum, out].map(|view| suffix(view.dtype()));
    let name = format!("momentum_{}_{}_{}", of_gradient?, of_momentum?, of_out?);
    let mut table = [0; UPDATE_SEGMENTS * UPDATE_WORDS];
    let [gradient, momentum] = [gradient, momentum].map(device_address);
    table[..UPDATE_WORDS].copy_from_slice(&[
        gradient,
        0,
        momentum,
        0,
        device_address(out),
        out.len() as u64,
        0,
        0,
    ]);
    let arguments =
        [1_u32.into(), pointer(op.control), (op.beta as f32).into(), u32::from(op.nesterov).into()];
    let grid = Grid::new(out.len().div_ceil(UPDATE_CHUNK), THREADS);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch_with_table(&OPTIMIZER, &name, grid, &table, &arguments) }
}

/// See [`Normalize`].
pub(super) fn normalize(launcher: &Launcher, op: &Normalize) -> Result<(), GpuError> {
    expect_f32("a sum of squares", op.sum_of_squares)?;
    let wide = aligned_flat(&[op.x]);
    let (x, epsilon) = (op.x, op.epsilon as f32);
    let arguments = [pointer(x), pointer(op.sum_of_squares), size(x.len()), epsilon.into(), wide.into()];
    let name = format!("normalize_{}", suffix(x.dtype())?);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&OPTIMIZER, &name, launcher.flat(x.len(), wide), &arguments) }
}

/// See [`ScaledSum`].
pub(super) fn scaled_sum(launcher: &Launcher, op: &ScaledSum) -> Result<(), GpuError> {
    let views = [op.x, op.y];
    let (wide, elements) = (aligned_flat(&views), op.x.len());
    let (a, b) = (op.factors.0 as f32, op.factors.1 as f32);
    let arguments = [pointer(op.x), pointer(op.y), size(elements), a.into(), b.into(), wide.into()];
    let name = format!("scaled_sum_{}", common_suffix(&views)?);
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&OPTIMIZER, &name, launcher.flat(elements, wide), &arguments) }
}

fn expect_f32(what: &str, view: View) -> Result<(), GpuError> {
    if view.dtype() == DType::F32 {
        return Ok(());
    }
    Err(GpuError::Unsupported(format!("{what} is kept in f32 on CUDA, not in {:?}", view.dtype())))
}
