//! Launches our portable attention kernels, for packed documents and for shapes that cuDNN does not support. They use
//! the tensor cores if possible, else f32 arithmetic (for f32 inputs and for plain attention).

use super::tensor;
use crate::error::CudaError;
use crate::kernels::{ATTENTION, Kernels, suffix};
use crate::launcher::{pointer, size};
use crate::stream::{Argument, Grid};
use kintsugi_tensor::View;
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape};

// Must match the kernels.
const TILE: usize = 32;
const THREADS: u32 = 256;
const ROWS_PER_BLOCK: usize = 16;
const HEAD_DIM: usize = 256;

/// See [`Attention`].
pub fn forward(kernels: &Kernels, op: &Attention) -> Result<(), CudaError> {
    if let AttentionSaved::LogSumExp(log_sums) = op.saved
        && tensor::does_forward(kernels, op)
    {
        return tensor::forward(kernels, op, log_sums);
    }
    check(op.shape)?;
    let [log_sums, probabilities] = saved(&op.saved);
    let (kind, starts) = starts(op.starts);
    let arguments = [pointer(op.qkv), pointer(op.out), log_sums, probabilities];
    let arguments: Vec<Argument> = arguments.into_iter().chain(starts).collect();
    let name = format!("attention_forward_{kind}{}", suffix(op.qkv.dtype())?);
    let grid = grid(op.shape, op.shape.heads, shared_bytes(op.shape, 2, 1));
    // SAFETY: the arguments are those of the kernel, and the views were checked against the shape.
    unsafe { kernels.launch(&ATTENTION, &name, grid, &with_shape(&arguments, op.shape)) }
}

/// See [`AttentionBackward`]. `dots` is scratch: one fp32 number per query.
pub fn backward(kernels: &Kernels, op: &AttentionBackward, dots: u64) -> Result<(), CudaError> {
    if let AttentionSaved::LogSumExp(log_sums) = op.saved
        && tensor::does_backward(kernels, op)
    {
        return tensor::backward(kernels, op, log_sums, dots);
    }
    check(op.shape)?;
    let (shape, suffix) = (op.shape, suffix(op.qkv.dtype())?);
    let rows = shape.rows() * shape.heads;
    let arguments = [pointer(op.out), pointer(op.dout), dots.into(), size(rows)];
    let launch = |name: &str, grid, arguments: &[Argument]| {
        let arguments = with_shape(arguments, shape);
        // SAFETY: as in `forward`; `dots` has room for every query.
        unsafe { kernels.launch(&ATTENTION, &format!("{name}{suffix}"), grid, &arguments) }
    };
    launch("attention_dots_", Grid::new(rows.div_ceil(ROWS_PER_BLOCK), THREADS), &arguments)?;

    let [log_sums, probabilities] = saved(&op.saved);
    let (kind, starts) = starts(op.starts);
    let arguments =
        [pointer(op.qkv), pointer(op.dout), log_sums, probabilities, dots.into(), pointer(op.dqkv)];
    let arguments: Vec<Argument> = arguments.into_iter().chain(starts).collect();
    let by_key = grid(shape, shape.kv_heads, shared_bytes(shape, 4, 2));
    launch(&format!("attention_dkeys_dvalues_{kind}"), by_key, &arguments)?;
    let by_query = grid(shape, shape.heads, shared_bytes(shape, 4, 1));
    launch(&format!("attention_dqueries_{kind}"), by_query, &arguments)
}

/// The infix of the kernel's name, and the `starts` argument that only masked kernels take.
fn starts(starts: Option<View>) -> (&'static str, Option<Argument>) {
    if let Some(starts) = starts { ("masked_", Some(pointer(starts))) } else { ("", None) }
}

fn check(shape: AttentionShape) -> Result<(), CudaError> {
    if shape.head_dim <= HEAD_DIM {
        return Ok(());
    }
    let dim = shape.head_dim;
    Err(CudaError::Unsupported(format!("attention with heads of {dim}: up to {HEAD_DIM} are supported")))
}

/// The log-sum-exps and the probabilities; one of the two is null.
fn saved(saved: &AttentionSaved) -> [Argument; 2] {
    match *saved {
        AttentionSaved::LogSumExp(view) => [pointer(view), 0_u64.into()],
        AttentionSaved::Probabilities(view) => [0_u64.into(), pointer(view)],
    }
}

fn grid(shape: AttentionShape, heads: usize, shared: u32) -> Grid {
    let tiles = Grid::new(shape.sequence.div_ceil(TILE), THREADS);
    Grid { blocks: (tiles.blocks.0, heads as u32, shape.batch as u32), shared, ..tiles }
}

/// Bytes of this many tiles of vectors and of scores.
fn shared_bytes(shape: AttentionShape, vectors: usize, scores: usize) -> u32 {
    let floats = TILE * (vectors * (shape.head_dim + 1) + scores * (TILE + 1));
    (floats * size_of::<f32>()) as u32
}

fn with_shape(arguments: &[Argument], shape: AttentionShape) -> Vec<Argument> {
    let sizes = [shape.sequence, shape.heads, shape.kv_heads, shape.head_dim];
    let sizes = sizes.map(|size| Argument::from(size as u32));
    let scale = Argument::from(scale(shape));
    arguments.iter().copied().chain(sizes).chain([scale]).collect()
}

/// The factor of the scores.
pub fn scale(shape: AttentionShape) -> f32 {
    (1.0 / (shape.head_dim as f64).sqrt()) as f32
}
