//! Attention of new tokens over a key-value cache.

use super::driver::Grid;
use super::error::GpuError;
use super::kernels::{CACHED_ATTENTION, soft_cap_definition};
use super::launcher::{Launcher, common_suffix, pointer};
use super::stream::Argument;
use kintsugi_tensor::ops::{AttentionShape, CachedAttention};

// As in the kernels.
const THREADS: u32 = 128;
const HEAD_DIM: usize = 256;

/// See [`CachedAttention`]. One kernel appends to the cache, the next one reads it.
pub(super) fn cached_attention(launcher: &Launcher, op: &CachedAttention) -> Result<(), GpuError> {
    let AttentionShape { batch, sequence, heads, kv_heads, head_dim, scores } = op.shape;
    if head_dim > HEAD_DIM {
        return Err(GpuError::Unsupported(format!(
            "attention with heads of {head_dim}: up to {HEAD_DIM} are supported"
        )));
    }
    let suffix = common_suffix(&[op.qkv, op.keys, op.values, op.out])?;
    let sizes = [sequence, heads, kv_heads, head_dim, op.capacity].map(|size| Argument::from(size as u32));
    let cache = [pointer(op.qkv), pointer(op.positions), pointer(op.keys), pointer(op.values)];
    let append = launcher.per_row(op.shape.rows(), kv_heads * head_dim, 256);
    let arguments = [&cache[..], &sizes].concat();
    // SAFETY: as the kernel declares; the operation's shapes were checked.
    unsafe { launcher.launch(&CACHED_ATTENTION, &format!("cache_append_{suffix}"), append, &arguments)? };
    let grid = Grid::new(sequence, THREADS);
    let attend = Grid { blocks: (grid.blocks.0, heads as u32, batch as u32), ..grid };
    // A window of the whole cache masks nothing.
    let window = Argument::from(scores.window.unwrap_or(op.capacity).min(op.capacity) as u32);
    let scale = Argument::from(op.shape.scale() as f32);
    let arguments = [&cache[..], &[pointer(op.out)], &sizes, &[window, scale]].concat();
    let definitions: Vec<String> = soft_cap_definition(scores.soft_cap).into_iter().collect();
    let name = format!("cached_attention_{suffix}");
    // SAFETY: as above.
    unsafe { launcher.launch_defined(&CACHED_ATTENTION, &definitions, &name, attend, &arguments) }
}
