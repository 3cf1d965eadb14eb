//! Launches our flash-attention kernels for the matrix cores of AMD's CDNA GPUs, for 16-bit types and head sizes up to 128.
//!
//! The backward is for bf16 only: MI200 takes subnormal operands in fp16 for zero, and gradients are often subnormal.

use super::portable;
use crate::driver::Grid;
use crate::error::GpuError;
use crate::kernels::{Kernels, MFMA_ATTENTION_BACKWARD, MFMA_ATTENTION_FORWARD, Source, suffix};
use crate::launcher::{aligned, pointer};
use crate::stream::Argument;
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionShape};
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

fn fits(kernels: &Kernels, shape: AttentionShape, views: &[View]) -> bool {
    matches!(views[0].dtype(), DType::BF16 | DType::F16)
        && shape.head_dim <= MAX_HEAD
        && aligned(shape.head_dim, views)
        && kernels.stream().properties().mfma
}

/// See [`Attention`].
pub fn forward(kernels: &Kernels, op: &Attention, log_sums: View) -> Result<(), GpuError> {
    let launches = Launches { kernels, source: &MFMA_ATTENTION_FORWARD, shape: op.shape, starts: op.starts };
    let arguments = [pointer(op.qkv), pointer(op.out), pointer(log_sums)];
    launches.launch("mfma_attention_forward", op.shape.heads, op.qkv.dtype(), &arguments)
}

/// See [`AttentionBackward`]. `dots` holds `Σ dout ∘ out` of every query.
pub fn backward(
    kernels: &Kernels,
    op: &AttentionBackward,
    log_sums: View,
    dots: u64,
) -> Result<(), GpuError> {
    let launches = Launches { kernels, source: &MFMA_ATTENTION_BACKWARD, shape: op.shape, starts: op.starts };
    let arguments = [pointer(op.qkv), pointer(op.dout), pointer(log_sums), dots.into(), pointer(op.dqkv)];
    let dtype = op.qkv.dtype();
    launches.launch("mfma_attention_dkeys_dvalues", op.shape.kv_heads, dtype, &arguments)?;
    launches.launch("mfma_attention_dqueries", op.shape.heads, dtype, &arguments)
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
    starts: Option<View<'a>>,
}

impl Launches<'_> {
    /// Launches a kernel over blocks of queries or keys of `heads` heads.
    fn launch(&self, name: &str, heads: usize, dtype: DType, tensors: &[Argument]) -> Result<(), GpuError> {
        let AttentionShape { batch, sequence, heads: queries, kv_heads, head_dim, .. } = self.shape;
        let definitions = definitions(head_dim, dtype)?;
        let name = format!("{name}{}", if self.starts.is_some() { "_masked" } else { "" });
        let blocks = (sequence.div_ceil(BLOCK) as u32, heads as u32, batch as u32);
        let grid = Grid { blocks, threads: THREADS, shared: 0 };
        let sizes = [sequence, queries, kv_heads].map(|size| Argument::from(size as u32));
        let scale = Argument::from(portable::scale(self.shape));
        let starts = self.starts.map(pointer);
        let arguments: Vec<Argument> =
            tensors.iter().copied().chain(starts).chain(sizes).chain([scale]).collect();
        // SAFETY: the arguments are those of the kernel, the views were checked against the shape, and there are dots for
        // every query.
        unsafe { self.kernels.launch_defined(self.source, &definitions, &name, grid, &[], &arguments) }
    }
}
