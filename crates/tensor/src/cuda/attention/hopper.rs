//! Launches of our backward for compute capability 9.0, whose sums of the queries' gradients are taken in any order.

use super::own;
use crate::cuda::error::CudaError;
use crate::cuda::kernels::{HOPPER_ATTENTION_BACKWARD, Kernels};
use crate::cuda::launcher::{aligned_flat, pointer};
use crate::cuda::stream::{Argument, Grid, Table};
use crate::cuda::tensor_map;
use crate::ops::{AttentionBackward, AttentionShape};
use crate::{DType, View};

// As in the kernels.
const GROUP: u32 = 128;
const GROUPS: u32 = 3;
const KEYS: usize = 128;
const QUERIES: usize = 64;
const ROWS: usize = 8;
const LARGEST_HEAD: usize = 128;

/// Whether these kernels can compute it.
pub fn does_backward(kernels: &Kernels, op: &AttentionBackward, log_sums: View) -> bool {
    kernels.stream().capability() == (9, 0)
        && op.qkv.dtype() == DType::BF16
        && op.shape.head_dim.is_multiple_of(8)
        && op.shape.head_dim <= LARGEST_HEAD
        && op.shape.sequence.is_multiple_of(KEYS)
        && aligned_flat(&[op.qkv, op.out, op.dout, op.dqkv, log_sums])
}

/// See [`AttentionBackward`]. Scratch: a number for every query, another for every element of the output, and a counter.
pub fn backward(
    kernels: &Kernels,
    op: &AttentionBackward,
    log_sums: View,
    [dots, dquery_sums, counter]: [u64; 3],
) -> Result<(), CudaError> {
    let AttentionShape { batch, sequence, heads, kv_heads, head_dim } = op.shape;
    let [batch_size, sequence_size, heads_size, kv_heads_size] =
        [batch, sequence, heads, kv_heads].map(|size| Argument::from(size as u32));
    let (dots, dquery_sums, counter) = (dots.into(), dquery_sums.into(), counter.into());
    let scale = Argument::from(own::scale(op.shape));
    let definitions = definitions(head_dim);
    let launch = |name, grid, table: Table, arguments: &[Argument]| {
        // SAFETY: the arguments are those of the kernel, the views were checked against the shape, and scratch is as large
        // as it says.
        unsafe {
            kernels.launch_defined(&HOPPER_ATTENTION_BACKWARD, &definitions, name, grid, table, arguments)
        }
    };

    let by_row = Grid::new((op.shape.rows() * heads).div_ceil(ROWS), GROUP);
    let arguments = [pointer(op.out), pointer(op.dout), dots, dquery_sums, counter];
    let sizes = [batch_size, sequence_size, heads_size];
    launch("hopper_attention_prepare", by_row, &[], &[&arguments[..], &sizes].concat())?;

    let tensor = |view, heads| {
        let lengths = [head_dim, heads, op.shape.rows()];
        tensor_map::encode(view, lengths, [Tiles::new(head_dim).chunk, 1, QUERIES])
    };
    let all_heads = heads + 2 * kv_heads;
    let maps = [tensor(op.qkv, all_heads)?, tensor(op.dout, heads)?, tensor(op.dqkv, all_heads)?];
    let blocks = Grid::new(kernels.stream().multiprocessors(), GROUPS * GROUP);
    let blocks = Grid { shared: Tiles::new(head_dim).shared_bytes(), ..blocks };
    let arguments = [pointer(log_sums), dots, dquery_sums, counter];
    let sizes = [batch_size, sequence_size, heads_size, kv_heads_size, scale];
    launch(
        "hopper_attention_gradients",
        blocks,
        &tensor_map::table(&maps),
        &[&arguments[..], &sizes].concat(),
    )?;

    let blocks = ((sequence / QUERIES) as u32, heads as u32, batch as u32);
    let by_tile = Grid { blocks, threads: GROUP, shared: 0 };
    let arguments = [dquery_sums, pointer(op.dqkv), sequence_size, heads_size, kv_heads_size, scale];
    launch("hopper_attention_dqueries", by_tile, &[], &arguments)
}

/// What the kernel file is compiled with: the head, and how it will be launched.
pub fn definitions(head_dim: usize) -> Vec<String> {
    vec![
        format!("HEAD_DIM={head_dim}"),
        format!("LAUNCH_GROUP={GROUP}"),
        format!("LAUNCH_ROWS={ROWS}"),
        format!("LAUNCH_GRADIENTS_SHARED={}", Tiles::new(head_dim).shared_bytes()),
    ]
}

/// What a launch has to know of the kernels' tiles; they assert that it is so.
struct Tiles {
    padded: usize,
    chunk: usize,
    keys_held: usize,
    queries_held: usize,
}

impl Tiles {
    fn new(head_dim: usize) -> Self {
        match head_dim {
            0..=64 => Tiles { padded: 64, chunk: 64, keys_held: 2, queries_held: 3 },
            65..=96 => Tiles { padded: 96, chunk: 32, keys_held: 2, queries_held: 2 },
            _ => Tiles { padded: 128, chunk: 64, keys_held: 1, queries_held: 2 },
        }
    }

    /// The kernel's `Shared`.
    fn shared_bytes(&self) -> u32 {
        let Tiles { padded, keys_held, queries_held, .. } = *self;
        let (number, barrier, slots) = (DType::F32.bytes(), size_of::<u64>(), 3);
        let vectors = |count: usize| count * padded * DType::BF16.bytes();
        // Keys and values, queries and their gradients, dscores, and what is on its way out.
        let tensors =
            vectors(2 * keys_held * KEYS + 2 * queries_held * QUERIES + KEYS) + slots * KEYS * QUERIES * 2;
        let numbers = 2 * queries_held * QUERIES * number;
        let rings = 2 * (keys_held + queries_held + slots) * barrier + keys_held * number;
        (tensors + numbers + rings).next_multiple_of(barrier) as u32
    }
}
