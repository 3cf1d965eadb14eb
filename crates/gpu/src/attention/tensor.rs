//! Launches our flash-attention kernels for the tensor cores, for 16-bit types and head sizes up to 128.

use super::portable;
use crate::driver::Grid;
use crate::error::GpuError;
use crate::kernels::{Kernels, Source, TENSOR_ATTENTION_BACKWARD, TENSOR_ATTENTION_FORWARD, suffix};
use crate::launcher::{aligned, pointer, size};
use crate::stream::Argument;
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionShape};
use kintsugi_tensor::{DType, View};

/// Queries or keys per block, as in the kernels.
const BLOCK: usize = 128;
const QUERY_THREADS: u32 = 128;
const ROWS_PER_BLOCK: usize = 8;
const MAX_HEAD: usize = 128;

/// The oldest compute capability with the required instructions.
pub const MIN_CAPABILITY: (i32, i32) = (8, 0);

/// Whether these kernels can compute the forward.
pub fn does_forward(kernels: &Kernels, op: &Attention) -> bool {
    fits(kernels, op.shape, &[op.qkv, op.out], Tiles::new(op.shape.head_dim).forward_shared)
}

/// Whether these kernels can compute the backward.
pub fn does_backward(kernels: &Kernels, op: &AttentionBackward) -> bool {
    let tiles = Tiles::new(op.shape.head_dim);
    let shared = tiles.dkeys_shared.max(tiles.dqueries_shared);
    fits(kernels, op.shape, &[op.qkv, op.out, op.dout, op.dqkv], shared)
}

fn fits(kernels: &Kernels, shape: AttentionShape, views: &[View], shared: u32) -> bool {
    matches!(views[0].dtype(), DType::BF16 | DType::F16)
        && shape.head_dim <= MAX_HEAD
        && shape.scores.soft_cap.is_none()
        && aligned(shape.head_dim, views)
        && kernels.stream().properties().capability >= Some(MIN_CAPABILITY)
        && kernels.stream().properties().shared_bytes >= shared as usize
}

/// See [`Attention`].
pub fn forward(kernels: &Kernels, op: &Attention, log_sums: View) -> Result<(), GpuError> {
    let launches = Launches { kernels, source: &TENSOR_ATTENTION_FORWARD, shape: op.shape, view: op.qkv };
    let arguments = [pointer(op.qkv), pointer(op.out), pointer(log_sums)];
    let grid = grid(op.shape, op.shape.heads, QUERY_THREADS, Tiles::new(op.shape.head_dim).forward_shared);
    launches.launch("tensor_attention_forward", op.starts, grid, &arguments)
}

/// See [`AttentionBackward`]. `dots` is scratch: one fp32 number per query.
pub fn backward(
    kernels: &Kernels,
    op: &AttentionBackward,
    log_sums: View,
    dots: u64,
) -> Result<(), GpuError> {
    let (shape, tiles) = (op.shape, Tiles::new(op.shape.head_dim));
    let launches = Launches { kernels, source: &TENSOR_ATTENTION_BACKWARD, shape, view: op.qkv };
    let rows = shape.rows() * shape.heads;
    let arguments = [pointer(op.out), pointer(op.dout), dots.into(), size(rows)];
    let by_row = Grid::new(rows.div_ceil(ROWS_PER_BLOCK), QUERY_THREADS);
    launches.launch("tensor_attention_dots", None, by_row, &arguments)?;

    let arguments = [pointer(op.qkv), pointer(op.dout), pointer(log_sums), dots.into(), pointer(op.dqkv)];
    let by_key = grid(shape, shape.kv_heads, tiles.key_threads, tiles.dkeys_shared);
    launches.launch("tensor_attention_dkeys_dvalues", op.starts, by_key, &arguments)?;
    let by_query = grid(shape, shape.heads, QUERY_THREADS, tiles.dqueries_shared);
    launches.launch("tensor_attention_dqueries", op.starts, by_query, &arguments)
}

/// The definitions with which the kernel files are compiled: the head size, the type and the launch configuration.
pub fn definitions(head_dim: usize, dtype: DType) -> Result<Vec<String>, GpuError> {
    let tiles = Tiles::new(head_dim);
    Ok(vec![
        format!("HEAD_DIM={head_dim}"),
        format!("ELEMENT={}", suffix(dtype)?),
        format!("LAUNCH_QUERY_THREADS={QUERY_THREADS}"),
        format!("LAUNCH_KEY_THREADS={}", tiles.key_threads),
        format!("LAUNCH_FORWARD_SHARED={}", tiles.forward_shared),
        format!("LAUNCH_DKEYS_SHARED={}", tiles.dkeys_shared),
        format!("LAUNCH_DQUERIES_SHARED={}", tiles.dqueries_shared),
    ])
}

/// Sizes of the kernels' tiles that a launch needs. The kernels assert that they match.
struct Tiles {
    /// Threads per block of keys.
    key_threads: u32,
    forward_shared: u32,
    dkeys_shared: u32,
    dqueries_shared: u32,
}

impl Tiles {
    fn new(head_dim: usize) -> Self {
        let padded = head_dim.next_multiple_of(16);
        let narrow = padded <= 64;
        // Rows per streamed tile: keys in the forward, queries in the backward by key, keys in the backward by query.
        let (keys, queries, dquery_keys) = if narrow { (64, 32, 64) } else { (64, 64, 32) };
        let vectors = |count: usize| count * (padded + 8) * DType::BF16.bytes();
        // Per query: two numbers, and the first token that it attends to.
        let statistics = queries * 3 * DType::F32.bytes();
        Tiles {
            key_threads: if narrow { 128 } else { 256 },
            forward_shared: vectors(BLOCK + 2 * keys) as u32,
            dkeys_shared: (vectors(2 * BLOCK + 4 * queries) + 2 * statistics) as u32,
            dqueries_shared: vectors(2 * BLOCK + 4 * dquery_keys) as u32,
        }
    }
}

/// The kernels of one file, compiled for one type and head size.
struct Launches<'a> {
    kernels: &'a Kernels,
    source: &'static Source,
    shape: AttentionShape,
    view: View<'a>,
}

impl Launches<'_> {
    fn launch(
        &self,
        name: &str,
        starts: Option<View>,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        let AttentionShape { sequence, heads, kv_heads, head_dim, .. } = self.shape;
        let definitions = definitions(head_dim, self.view.dtype())?;
        let name = format!("{name}{}", if starts.is_some() { "_masked" } else { "" });
        let sizes = [sequence, heads, kv_heads].map(|size| Argument::from(size as u32));
        let scale = Argument::from(portable::scale(self.shape));
        let arguments: Vec<Argument> =
            arguments.iter().copied().chain(starts.map(pointer)).chain(sizes).chain([scale]).collect();
        // SAFETY: the arguments are those of the kernel, the views were checked against the shape, and scratch is as
        // large as every query needs.
        unsafe { self.kernels.launch_defined(self.source, &definitions, &name, grid, &[], &arguments) }
    }
}

fn grid(shape: AttentionShape, heads: usize, threads: u32, shared: u32) -> Grid {
    let blocks = (shape.sequence.div_ceil(BLOCK) as u32, heads as u32, shape.batch as u32);
    Grid { blocks, threads, shared }
}
