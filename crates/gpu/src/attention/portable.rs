//! Launches our portable attention kernels, for packed documents, sliding windows and shapes that cuDNN does not support. They use
//! the tensor cores or AMD's matrix cores if possible, else f32 arithmetic (for f32 inputs, plain attention and soft caps).

use super::{mfma, tensor};
use crate::driver::Grid;
use crate::error::GpuError;
use crate::kernels::{ATTENTION, Kernels, SLICED_ATTENTION, soft_cap_definition, suffix};
use crate::launcher::{pointer, pointer_or_null, size};
use crate::stream::Argument;
use kintsugi_tensor::View;
use kintsugi_tensor::ops::{
    Attention, AttentionBackward, AttentionSaved, AttentionShape, Columns, SlicedAttention,
    SlicedAttentionBackward, Slices,
};

/// Queries and keys of a tile, the largest first. Smaller tiles are for heads whose larger ones do not fit into shared
/// memory; they read keys and values more often.
const TILES: [usize; 2] = [32, 16];

// Must match the kernels.
const THREADS: u32 = 256;
const ROWS_PER_BLOCK: usize = 16;
const HEAD_DIM: usize = 256;

/// See [`Attention`].
pub fn forward(kernels: &Kernels, op: &Attention) -> Result<(), GpuError> {
    if let AttentionSaved::LogSumExp(log_sums) = op.saved {
        if tensor::does_forward(kernels, op) {
            return tensor::forward(kernels, op, log_sums);
        }
        if mfma::does_forward(kernels, op) {
            return mfma::forward(kernels, op, log_sums);
        }
    }
    let tile = Tile::fitting(kernels, op.shape, FORWARD)?;
    let [log_sums, probabilities] = saved(&op.saved);
    let (kind, starts) = starts(op.starts);
    let arguments = [pointer(op.qkv), pointer(op.out), log_sums, probabilities];
    let arguments: Vec<Argument> = arguments.into_iter().chain(starts).collect();
    let name = format!("attention_forward_{kind}{}", suffix(op.qkv.dtype())?);
    let grid = tile.grid(op.shape.heads, FORWARD);
    let arguments = with_shape(&arguments, op.shape);
    // SAFETY: the arguments are those of the kernel, and the views were checked against the shape.
    unsafe { kernels.launch_defined(&ATTENTION, &tile.definitions(), &name, grid, &[], &arguments) }
}

/// See [`AttentionBackward`]. `dots` is scratch: one fp32 number per query.
pub fn backward(kernels: &Kernels, op: &AttentionBackward, dots: u64) -> Result<(), GpuError> {
    if let AttentionSaved::LogSumExp(log_sums) = op.saved
        && tensor::does_backward(kernels, op)
    {
        return tensor::backward(kernels, op, log_sums, dots);
    }
    let tile = Tile::fitting(kernels, op.shape, BY_KEY)?;
    let (shape, suffix) = (op.shape, suffix(op.qkv.dtype())?);
    let rows = shape.rows() * shape.heads;
    let arguments = [pointer(op.out), pointer(op.dout), dots.into(), size(rows)];
    let launch = |name: &str, grid, arguments: &[Argument]| {
        let arguments = with_shape(arguments, shape);
        // SAFETY: as in `forward`; `dots` has room for every query.
        unsafe {
            let name = format!("{name}{suffix}");
            kernels.launch_defined(&ATTENTION, &tile.definitions(), &name, grid, &[], &arguments)
        }
    };
    launch("attention_dots_", Grid::new(rows.div_ceil(ROWS_PER_BLOCK), THREADS), &arguments)?;
    if let AttentionSaved::LogSumExp(log_sums) = op.saved
        && mfma::does_backward(kernels, op)
    {
        return mfma::backward(kernels, op, log_sums, dots);
    }

    let [log_sums, probabilities] = saved(&op.saved);
    let (kind, starts) = starts(op.starts);
    let arguments =
        [pointer(op.qkv), pointer(op.dout), log_sums, probabilities, dots.into(), pointer(op.dqkv)];
    let arguments: Vec<Argument> = arguments.into_iter().chain(starts).collect();
    let by_key = tile.grid(shape.kv_heads, BY_KEY);
    launch(&format!("attention_dkeys_dvalues_{kind}"), by_key, &arguments)?;
    let by_query = tile.grid(shape.heads, BY_QUERY);
    launch(&format!("attention_dqueries_{kind}"), by_query, &arguments)
}

/// See [`SlicedAttention`].
pub fn sliced_forward(kernels: &Kernels, op: &SlicedAttention) -> Result<(), GpuError> {
    if mfma::does_sliced_forward(kernels, op) {
        return mfma::sliced_forward(kernels, op);
    }
    let tile = Tile::fitting(kernels, op.shape, FORWARD)?;
    let starts = pointer_or_null(op.starts);
    let before = pointer_or_null(op.before);
    let tensors = [pointer(op.qkv), pointer(op.keys), starts, before, pointer(op.out), pointer(op.log_sums)];
    let arguments = with_parts(&tensors, op.slices, [op.first_owner, op.owners], op.shape);
    let name = format!("sliced_forward_{}", result_suffix(op.qkv, op.out)?);
    let grid = tile.sliced_grid(1, op.shape.heads, FORWARD);
    // SAFETY: the arguments are those of the kernel, and the views were checked against the shape.
    unsafe { kernels.launch_defined(&SLICED_ATTENTION, &tile.definitions(), &name, grid, &[], &arguments) }
}

/// See [`SlicedAttentionBackward`]. `dots` is scratch: one fp32 number per query.
pub fn sliced_backward(kernels: &Kernels, op: &SlicedAttentionBackward, dots: u64) -> Result<(), GpuError> {
    let tile = Tile::fitting(kernels, op.shape, BY_KEY)?;
    let rows = op.shape.rows() * op.shape.heads;
    let arguments = with_shape(&[pointer(op.out), pointer(op.dout), dots.into(), size(rows)], op.shape);
    let grid = Grid::new(rows.div_ceil(ROWS_PER_BLOCK), THREADS);
    let name = format!("attention_dots_{}", suffix(op.qkv.dtype())?);
    // SAFETY: as in `sliced_forward`; `dots` has room for every query.
    unsafe { kernels.launch_defined(&ATTENTION, &tile.definitions(), &name, grid, &[], &arguments)? };
    if mfma::does_sliced_backward(kernels, op) {
        return mfma::sliced_backward(kernels, op, dots);
    }

    let starts = pointer_or_null(op.starts);
    let inputs =
        [pointer(op.qkv), pointer(op.keys), starts, pointer(op.dout), pointer(op.log_sums), dots.into()];
    let launch = |name: String, grid, outputs: &[Argument]| {
        let tensors = [&inputs, outputs].concat();
        let arguments = with_parts(&tensors, op.slices, [op.first_owner, op.owners], op.shape);
        // SAFETY: as above.
        unsafe {
            kernels.launch_defined(&SLICED_ATTENTION, &tile.definitions(), &name, grid, &[], &arguments)
        }
    };
    let by_key = tile.sliced_grid(op.owners, op.shape.kv_heads, BY_KEY);
    let name = format!("sliced_dkeys_{}", result_suffix(op.qkv, op.dkeys)?);
    launch(name, by_key, &[pointer(op.dkeys), op.add_keys.into()])?;
    let Columns { view, width, first } = op.dqueries;
    let by_query = tile.sliced_grid(1, op.shape.heads, BY_QUERY);
    let name = format!("sliced_dqueries_{}", result_suffix(op.qkv, view)?);
    launch(name, by_query, &[pointer(view), size(width), size(first), op.add_queries.into()])
}

/// The suffix of a kernel whose result has the type of its inputs or is in f32.
fn result_suffix(input: View, result: View) -> Result<String, GpuError> {
    let sums = if result.dtype() == input.dtype() { "" } else { "sums_" };
    Ok(format!("{sums}{}", suffix(input.dtype())?))
}

/// The infix of the kernel's name, and the `starts` argument that only masked kernels take.
fn starts(starts: Option<View>) -> (&'static str, Option<Argument>) {
    if let Some(starts) = starts { ("masked_", Some(pointer(starts))) } else { ("", None) }
}

/// Tiles of vectors and of scores that a kernel has in shared memory.
type Held = (usize, usize);
const FORWARD: Held = (2, 1);
const BY_KEY: Held = (3, 2);
const BY_QUERY: Held = (3, 1);

/// Queries and keys that a block works on at a time.
struct Tile {
    length: usize,
    shape: AttentionShape,
}

impl Tile {
    /// The largest tile for which the device has enough shared memory.
    fn fitting(kernels: &Kernels, shape: AttentionShape, held: Held) -> Result<Self, GpuError> {
        let most = kernels.stream().properties().shared_bytes;
        let tiles = TILES.map(|length| Tile { length, shape });
        let found = tiles.into_iter().find(|tile| tile.shared_bytes(held) as usize <= most);
        found.filter(|_| shape.head_dim <= HEAD_DIM).ok_or_else(|| {
            let dim = shape.head_dim;
            let room = format!("up to {HEAD_DIM} are supported, if {most} bytes of shared memory suffice");
            GpuError::Unsupported(format!("attention with heads of {dim}: {room}"))
        })
    }

    /// The definitions with which the kernel file is compiled: none for the largest tile without a soft cap.
    fn definitions(&self) -> Vec<String> {
        let tile = (self.length != TILES[0]).then(|| format!("TILE={}", self.length));
        tile.into_iter().chain(soft_cap_definition(self.shape.scores.soft_cap)).collect()
    }

    fn grid(&self, heads: usize, held: Held) -> Grid {
        let tiles = Grid::new(self.shape.sequence.div_ceil(self.length), THREADS);
        let blocks = (tiles.blocks.0, heads as u32, self.shape.batch as u32);
        Grid { blocks, shared: self.shared_bytes(held), ..tiles }
    }

    /// A block for each tile of the two slices of a part, `parts` times.
    fn sliced_grid(&self, parts: usize, heads: usize, held: Held) -> Grid {
        let tiles = slice_tiles(self.shape.sequence, self.length);
        let grid = self.grid(heads, held);
        Grid { blocks: (Grid::new(parts * tiles, THREADS).blocks.0, grid.blocks.1, grid.blocks.2), ..grid }
    }

    fn shared_bytes(&self, (vectors, scores): Held) -> u32 {
        let floats = self.length * (vectors * (self.shape.head_dim + 1) + scores * (self.length + 1));
        (floats * size_of::<f32>()) as u32
    }
}

/// The log-sum-exps and the probabilities; one of the two is null.
fn saved(saved: &AttentionSaved) -> [Argument; 2] {
    match *saved {
        AttentionSaved::LogSumExp(view) => [pointer(view), 0_u64.into()],
        AttentionSaved::Probabilities(view) => [0_u64.into(), pointer(view)],
    }
}

fn with_shape(arguments: &[Argument], shape: AttentionShape) -> Vec<Argument> {
    let sizes = [shape.sequence, shape.heads, shape.kv_heads, shape.head_dim];
    let sizes = sizes.map(|size| Argument::from(size as u32));
    let scale = Argument::from(scale(shape));
    arguments.iter().copied().chain(sizes).chain([scale]).collect()
}

/// The arguments of a kernel for slices: tensors, parts and owners of keys, and the shape.
fn with_parts(
    tensors: &[Argument],
    slices: Slices,
    owners: [usize; 2],
    shape: AttentionShape,
) -> Vec<Argument> {
    with_shape(&[tensors, &parts(slices, owners)].concat(), shape)
}

/// The parts of queries and keys as kernels take them.
pub fn parts(slices: Slices, [first_owner, owners]: [usize; 2]) -> [Argument; 4] {
    [slices.parts, slices.part, first_owner, owners].map(|count| Argument::from(count as u32))
}

/// Tiles of `length` tokens in both slices of `own` tokens.
pub fn slice_tiles(own: usize, length: usize) -> usize {
    let slice = own / 2;
    slice.div_ceil(length) + (own - slice).div_ceil(length)
}

/// The factor of the scores.
pub fn scale(shape: AttentionShape) -> f32 {
    shape.scale() as f32
}
