//! Launches our attention kernels for compute capability 9.0. The backward adds the queries' gradients in any order.

use cudarc::driver::sys::CUtensorMap;

use super::tensor_map::{self, CHUNK};
use crate::attention::portable;
use crate::column_sum::sum_partials;
use crate::driver::Grid;
use crate::error::GpuError;
use crate::kernels::{HOPPER_ATTENTION_BACKWARD, HOPPER_ATTENTION_FORWARD, Kernels, Source};
use crate::launcher::{Launcher, aligned_flat, pointer};
use crate::stream::{Argument, Table};
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionShape, Gradient};
use kintsugi_tensor::{DType, View};

// Must match the kernels.
const GROUP: u32 = 128;
const GROUPS: u32 = 3;
const BLOCK: usize = 128;
const QUERIES: usize = 64;
const MAX_HEAD: usize = 128;

/// Bands of heads whose sums of queries' gradients fit into scratch. A band's sums are rounded to the output by the
/// band that comes half a ring later.
const RING: usize = 4;

/// Whether these kernels support attention of this shape on these tensors. The first tensor is `qkv`.
pub fn can(kernels: &Kernels, shape: AttentionShape, tensors: &[View]) -> bool {
    kernels.stream().properties().capability == Some((9, 0))
        && tensors[0].dtype() == DType::BF16
        && shape.head_dim.is_multiple_of(8)
        && shape.head_dim <= MAX_HEAD
        && shape.sequence.is_multiple_of(BLOCK)
        && aligned_flat(tensors)
}

/// See [`Attention`]. Scratch: one counter.
pub fn forward(kernels: &Kernels, op: &Attention, log_sums: View, counter: u64) -> Result<(), GpuError> {
    let AttentionShape { heads, kv_heads, head_dim, .. } = op.shape;
    // SAFETY: scratch has room for a counter.
    unsafe { kernels.stream().clear(counter, size_of::<u32>())? };
    let columns = (heads + 2 * kv_heads) * head_dim;
    let qkv = tensor_map::encode(op.qkv, [columns, op.shape.rows()], [CHUNK, BLOCK])?;
    let maps = [qkv, by_head(op.out, op.shape, heads)?];
    let arguments = [&[pointer(log_sums), counter.into()], &sizes(op.shape)[..]].concat();
    let grid = persistent(kernels, Tiles::new(head_dim).out_shared());
    let launch = Launch { kernels, source: &HOPPER_ATTENTION_FORWARD, head_dim };
    launch.run("hopper_attention_forward", grid, &tensor_map::table(&maps), &arguments)
}

/// See [`AttentionBackward`], without the bias gradient. Scratch: one number per query, up to one per element of the
/// output, and counters. `sums` is where the kernels leave partial sums of the bias gradient.
pub fn backward(
    kernels: &Kernels,
    op: &AttentionBackward,
    log_sums: View,
    [dots, dquery_sums, counters]: [u64; 3],
    sums: Option<&BiasSums>,
) -> Result<(), GpuError> {
    let AttentionShape { heads, kv_heads, head_dim, .. } = op.shape;
    let sizes = sizes(op.shape);
    let grid = persistent(kernels, Tiles::new(head_dim).gradients_shared());
    let (dots, dquery_sums, counters) = (dots.into(), dquery_sums.into(), counters.into());
    let launch = Launch { kernels, source: &HOPPER_ATTENTION_BACKWARD, head_dim };

    let chunks = prepare_chunks(kernels, op.shape) as u32;
    let blocks = (heads.div_ceil(heads_prepared(head_dim)) as u32, chunks, 1);
    let by_chunk = Grid { blocks, threads: GROUP, shared: 0 };
    let dout_sums = sums.map_or(0, |sums| sums.of_dout).into();
    let arguments = [pointer(op.out), pointer(op.dout), dots, dquery_sums, dout_sums, counters];
    let arguments = [&arguments[..], &sizes[..4], &[grid.blocks.0.into()]].concat();
    launch.run("hopper_attention_prepare", by_chunk, &[], &arguments)?;

    let all_heads = heads + 2 * kv_heads;
    let [qkv, dqkv] = [op.qkv, op.dqkv].map(|view| by_head(view, op.shape, all_heads));
    let maps = [qkv?, by_head(op.dout, op.shape, heads)?, dqkv?];
    let partials = sums.map_or(0, |sums| sums.of_dqueries).into();
    let arguments = [&[pointer(log_sums), dots, dquery_sums, partials, counters], &sizes[..]].concat();
    launch.run("hopper_attention_gradients", grid, &tensor_map::table(&maps), &arguments)
}

/// Partial sums of the gradient of the `qkv` bias, for attention without grouped heads.
pub struct BiasSums {
    /// Partial sums of the output's gradient, and their number.
    of_dout: u64,
    chunks: usize,
    /// Partial sums of the queries' gradients, two per tile.
    of_dqueries: u64,
    shape: AttentionShape,
}

impl BiasSums {
    /// Places the partial sums in the launcher's scratch buffer. `None` if they are not needed or do not fit.
    pub fn new(launcher: &Launcher, kernels: &Kernels, op: &AttentionBackward) -> Option<Self> {
        let (shape, chunks) = (op.shape, prepare_chunks(kernels, op.shape));
        if op.dbias.is_none() || shape.heads != shape.kv_heads {
            return None;
        }
        let part = shape.heads * shape.head_dim * DType::F32.bytes();
        let scratch = launcher.scratch((chunks + Self::parts_of_dqueries(shape)) * part).ok()?;
        Some(BiasSums { of_dout: scratch, chunks, of_dqueries: scratch + (chunks * part) as u64, shape })
    }

    fn parts_of_dqueries(shape: AttentionShape) -> usize {
        2 * shape.rows() / QUERIES
    }

    /// Adds the partial sums, after [`backward`] was enqueued. The sum of the keys' gradients is zero.
    pub fn finish(&self, launcher: &Launcher, dbias: Gradient) -> Result<(), GpuError> {
        let width = self.shape.heads * self.shape.head_dim;
        let part = |i: usize| Gradient { view: dbias.view.slice(i * width..(i + 1) * width), ..dbias };
        sum_partials(launcher, self.of_dqueries, Self::parts_of_dqueries(self.shape), width, &[part(0)])?;
        if !dbias.accumulate {
            // With zero parts the result is zero.
            sum_partials(launcher, self.of_dout, 0, width, &[part(1)])?;
        }
        sum_partials(launcher, self.of_dout, self.chunks, width, &[part(2)])
    }
}

/// Number of chunks of tokens that fill the GPU.
fn prepare_chunks(kernels: &Kernels, shape: AttentionShape) -> usize {
    const BLOCKS_PER_MULTIPROCESSOR: usize = 8;
    let heads = shape.heads.div_ceil(heads_prepared(shape.head_dim));
    (kernels.stream().properties().multiprocessors * BLOCKS_PER_MULTIPROCESSOR)
        .div_ceil(heads)
        .clamp(1, shape.rows())
}

fn sizes(shape: AttentionShape) -> [Argument; 5] {
    let AttentionShape { batch, sequence, heads, kv_heads, .. } = shape;
    let size = |size: usize| Argument::from(size as u32);
    [size(batch), size(sequence), size(heads), size(kv_heads), portable::scale(shape).into()]
}

/// The tensor map of boxes with 64 vectors of one head. Columns beyond the head size are zeros.
fn by_head(view: View, shape: AttentionShape, heads: usize) -> Result<CUtensorMap, GpuError> {
    tensor_map::encode(view, [shape.head_dim, heads, shape.rows()], [CHUNK, 1, QUERIES])
}

/// As many blocks as run at once. Each block takes work items until none is left.
fn persistent(kernels: &Kernels, shared: u32) -> Grid {
    Grid { shared, ..Grid::new(kernels.stream().properties().multiprocessors, GROUPS * GROUP) }
}

struct Launch<'a> {
    kernels: &'a Kernels,
    source: &'static Source,
    head_dim: usize,
}

impl Launch<'_> {
    fn run(&self, name: &str, grid: Grid, table: Table, arguments: &[Argument]) -> Result<(), GpuError> {
        // SAFETY: the arguments are those of the kernel, the views were checked against the shape, and scratch is as large
        // as it says.
        unsafe {
            self.kernels.launch_defined(
                self.source,
                &definitions(self.head_dim),
                name,
                grid,
                table,
                arguments,
            )
        }
    }
}

/// The definitions with which the kernel files are compiled: the head size and the launch configuration.
pub fn definitions(head_dim: usize) -> Vec<String> {
    let tiles = Tiles::new(head_dim);
    vec![
        format!("HEAD_DIM={head_dim}"),
        format!("LAUNCH_GROUP={GROUP}"),
        format!("LAUNCH_HEADS={}", heads_prepared(head_dim)),
        format!("LAUNCH_RING={RING}"),
        format!("LAUNCH_OUT_SHARED={}", tiles.out_shared()),
        format!("LAUNCH_GRADIENTS_SHARED={}", tiles.gradients_shared()),
    ]
}

/// Heads per block of `hopper_attention_prepare`, which has 8 or 16 threads per head.
fn heads_prepared(head_dim: usize) -> usize {
    if head_dim <= 64 { 16 } else { 8 }
}

/// Sizes of the kernels' tiles that a launch needs. The kernels assert that they match.
struct Tiles {
    /// Bytes of a vector in shared memory.
    vector_bytes: usize,
    /// Streamed tiles in shared memory: in use or being loaded.
    passing: usize,
    /// Blocks of keys in shared memory in the backward: in use or being loaded.
    keys_held: usize,
}

impl Tiles {
    fn new(head_dim: usize) -> Self {
        let vector_bytes = head_dim.next_multiple_of(CHUNK) * DType::BF16.bytes();
        let (passing, keys_held) = if head_dim <= 64 { (3, 2) } else { (2, 1) };
        Tiles { vector_bytes, passing, keys_held }
    }

    /// Shared memory of the forward (`Shared`): queries, keys and values.
    fn out_shared(&self) -> u32 {
        let (blocks, passing) = (2, 2 * self.passing);
        shared_bytes((blocks + passing) * BLOCK * self.vector_bytes, 2 * (blocks + passing), ITEM * blocks)
    }

    /// Shared memory of the backward: keys and values, queries and their gradients with two numbers each, the gradients
    /// of the scores, and outputs waiting to be stored.
    fn gradients_shared(&self) -> u32 {
        let Tiles { vector_bytes, passing: tiles, keys_held: blocks } = *self;
        let (slots, over) = (3, 2);
        let vectors = 2 * blocks * BLOCK + 2 * tiles * QUERIES + BLOCK;
        let numbers = 2 * tiles * QUERIES * DType::F32.bytes();
        let dscores = slots * BLOCK * QUERIES * DType::BF16.bytes();
        let barriers = 2 * (blocks + tiles + slots + over) + blocks;
        shared_bytes(vectors * vector_bytes + dscores + numbers, barriers, ITEM * blocks + over)
    }
}

/// Numbers per work item.
const ITEM: usize = 6;

/// Shared memory with this many barriers and integers.
fn shared_bytes(tensors: usize, barriers: usize, numbers: usize) -> u32 {
    let barrier = size_of::<u64>();
    (tensors + barriers * barrier + numbers * size_of::<u32>()).next_multiple_of(barrier) as u32
}
