//! Launches our flash-attention kernels for the matrix cores of AMD's CDNA GPUs, for 16-bit types and head sizes up to 128.
//!
//! The backward is for bf16 only: MI200 takes subnormal operands in fp16 for zero, and gradients are often subnormal.

use super::portable;
use crate::driver::Grid;
use crate::error::GpuError;
use crate::kernels::{Kernels, MFMA_ATTENTION_BACKWARD, MFMA_ATTENTION_FORWARD, Source, suffix};
use crate::launcher::{PACK, aligned, pointer, pointer_or_null, size};
use crate::stream::Argument;
use kintsugi_tensor::ops::{
    Attention, AttentionBackward, AttentionShape, Columns, SlicedAttention, SlicedAttentionBackward,
};
use kintsugi_tensor::{DType, View};

// Must match the kernels.
const THREADS: u32 = 256;
const BLOCK: usize = 128;
const MAX_HEAD: usize = 128;

/// Whether these kernels can compute the forward.
pub fn does_forward(kernels: &Kernels, op: &Attention) -> bool {
    fits(kernels, op.shape, &[op.qkv, op.out])
}

/// Whether these kernels can compute the backward.
pub fn does_backward(kernels: &Kernels, op: &AttentionBackward) -> bool {
    op.qkv.dtype() == DType::BF16 && fits(kernels, op.shape, &[op.qkv, op.out, op.dout, op.dqkv])
}

/// Whether these kernels can compute the forward of slices.
pub fn does_sliced_forward(kernels: &Kernels, op: &SlicedAttention) -> bool {
    fits(kernels, op.shape, &[op.qkv, op.keys, op.out, op.before.unwrap_or(op.out)])
}

/// Whether these kernels can compute the backward of slices.
pub fn does_sliced_backward(kernels: &Kernels, op: &SlicedAttentionBackward) -> bool {
    let Columns { view, width, first } = op.dqueries;
    op.qkv.dtype() == DType::BF16
        && width.is_multiple_of(PACK)
        && first.is_multiple_of(PACK)
        && fits(kernels, op.shape, &[op.qkv, op.keys, op.dout, op.dkeys, view])
}

fn fits(kernels: &Kernels, shape: AttentionShape, views: &[View]) -> bool {
    matches!(views[0].dtype(), DType::BF16 | DType::F16)
        && shape.head_dim <= MAX_HEAD
        && shape.scores.soft_cap.is_none()
        && aligned(shape.head_dim, views)
        && kernels.stream().properties().mfma
}

/// See [`Attention`].
pub fn forward(kernels: &Kernels, op: &Attention, log_sums: View) -> Result<(), GpuError> {
    let launches =
        Launches { kernels, source: &MFMA_ATTENTION_FORWARD, shape: op.shape, dtype: op.qkv.dtype() };
    let arguments = [pointer(op.qkv), pointer(op.out), pointer(log_sums)];
    launches.whole("mfma_attention_forward", op.shape.heads, op.starts, &arguments)
}

/// See [`AttentionBackward`]. `dots` holds `Σ dout ∘ out` of every query.
pub fn backward(
    kernels: &Kernels,
    op: &AttentionBackward,
    log_sums: View,
    dots: u64,
) -> Result<(), GpuError> {
    let launches =
        Launches { kernels, source: &MFMA_ATTENTION_BACKWARD, shape: op.shape, dtype: op.qkv.dtype() };
    let arguments = [pointer(op.qkv), pointer(op.dout), pointer(log_sums), dots.into(), pointer(op.dqkv)];
    launches.whole("mfma_attention_dkeys_dvalues", op.shape.kv_heads, op.starts, &arguments)?;
    launches.whole("mfma_attention_dqueries", op.shape.heads, op.starts, &arguments)
}

/// See [`SlicedAttention`].
pub fn sliced_forward(kernels: &Kernels, op: &SlicedAttention) -> Result<(), GpuError> {
    let launches =
        Launches { kernels, source: &MFMA_ATTENTION_FORWARD, shape: op.shape, dtype: op.qkv.dtype() };
    let tensors = [
        pointer(op.qkv),
        pointer(op.keys),
        pointer_or_null(op.starts),
        pointer_or_null(op.before),
        pointer(op.out),
        is_wide(op.out),
        pointer(op.log_sums),
    ];
    let parts = portable::parts(op.slices, [op.first_owner, op.owners]);
    launches.sliced("mfma_sliced_forward", [1, op.shape.heads], &[&tensors[..], &parts].concat())
}

/// See [`SlicedAttentionBackward`]. `dots` as in [`backward`].
pub fn sliced_backward(kernels: &Kernels, op: &SlicedAttentionBackward, dots: u64) -> Result<(), GpuError> {
    let launches =
        Launches { kernels, source: &MFMA_ATTENTION_BACKWARD, shape: op.shape, dtype: op.qkv.dtype() };
    let starts = pointer_or_null(op.starts);
    let inputs =
        [pointer(op.qkv), pointer(op.keys), starts, pointer(op.dout), pointer(op.log_sums), dots.into()];
    let parts = portable::parts(op.slices, [op.first_owner, op.owners]);
    let to = [pointer(op.dkeys), is_wide(op.dkeys), op.add_keys.into()];
    let arguments = [&inputs[..], &to, &parts].concat();
    launches.sliced("mfma_sliced_dkeys_dvalues", [op.owners, op.shape.kv_heads], &arguments)?;
    let Columns { view, width, first } = op.dqueries;
    let to = [pointer(view), is_wide(view), op.add_queries.into(), size(width), size(first)];
    let arguments = [&inputs[..], &to, &parts].concat();
    launches.sliced("mfma_sliced_dqueries", [1, op.shape.heads], &arguments)
}

/// Whether a kernel writes f32.
fn is_wide(view: View) -> Argument {
    (view.dtype() == DType::F32).into()
}

/// The definitions with which the kernel files are compiled: the head size, the type and the launch configuration.
pub fn definitions(head_dim: usize, dtype: DType) -> Result<Vec<String>, GpuError> {
    Ok(vec![
        format!("HEAD_DIM={head_dim}"),
        format!("ELEMENT={}", suffix(dtype)?),
        format!("LAUNCH_THREADS={THREADS}"),
    ])
}

/// The kernels of one file, for one shape.
struct Launches<'a> {
    kernels: &'a Kernels,
    source: &'static Source,
    shape: AttentionShape,
    dtype: DType,
}

impl Launches<'_> {
    /// Launches a kernel over blocks of queries or keys of `heads` heads.
    fn whole(
        &self,
        name: &str,
        heads: usize,
        starts: Option<View>,
        tensors: &[Argument],
    ) -> Result<(), GpuError> {
        let name = format!("{name}{}", if starts.is_some() { "_masked" } else { "" });
        let starts = starts.map(pointer);
        let arguments: Vec<Argument> = tensors.iter().copied().chain(starts).collect();
        self.launch(&name, [self.shape.sequence.div_ceil(BLOCK), heads], &arguments)
    }

    /// The same over the blocks of a part's slices, `parts` times.
    fn sliced(&self, name: &str, [parts, heads]: [usize; 2], arguments: &[Argument]) -> Result<(), GpuError> {
        let blocks = parts * portable::slice_tiles(self.shape.sequence, BLOCK);
        self.launch(name, [blocks, heads], arguments)
    }

    fn launch(
        &self,
        name: &str,
        [blocks, heads]: [usize; 2],
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        let AttentionShape { batch, sequence, heads: queries, kv_heads, head_dim, .. } = self.shape;
        let definitions = definitions(head_dim, self.dtype)?;
        let blocks = (blocks as u32, heads as u32, batch as u32);
        let grid = Grid { blocks, threads: THREADS, shared: 0 };
        let sizes = [sequence, queries, kv_heads].map(|size| Argument::from(size as u32));
        let arguments = [arguments, &sizes, &[portable::scale(self.shape).into()]].concat();
        // SAFETY: the arguments are those of the kernel, the views were checked against the shape, and there are dots for
        // every query.
        unsafe { self.kernels.launch_defined(self.source, &definitions, name, grid, &[], &arguments) }
    }
}
