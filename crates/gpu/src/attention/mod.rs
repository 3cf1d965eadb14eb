//! Causal self-attention on a GPU. Our Hopper kernels run if they support the shape, else cuDNN's fused kernels if they
//! do. Our portable kernels do everything else, such as packed documents that must not attend to each other, sliding windows and
//! soft caps.
//!
//! All of them save the same log-sum-exp, so any forward works with any backward.

mod mfma;
pub(crate) mod portable;
mod tensor;

pub(crate) use mfma::definitions as mfma_attention_definitions;
pub(crate) use tensor::MIN_CAPABILITY as TENSOR_CORES;
pub(crate) use tensor::definitions as tensor_attention_definitions;

use std::rc::Rc;

use crate::column_sum::column_sum;
use crate::cuda::cudnn::{Cudnn, Role};
use crate::cuda::hopper_attention::{self as hopper, BiasSums};
use crate::error::GpuError;
use crate::kernels::Kernels;
use crate::launcher::{Launcher, device_address};
use crate::notice_handler::NoticeHandler;
use crate::stream::Stream;
use kintsugi_tensor::device::{AttentionPass, AttentionScratch, asks_library, fits_library};
use kintsugi_tensor::ops::{
    Attention, AttentionBackward, AttentionSaved, AttentionShape, ColumnSum, SlicedAttention,
    SlicedAttentionBackward,
};
use kintsugi_tensor::{Buffer, Category, DType, Memory, View};

/// The attention kernels of one stream.
#[derive(Debug)]
pub(crate) struct Attentions {
    kernels: Kernels,
    deterministic: bool,
    /// What the plan has room for.
    scratch: AttentionScratch,
    /// Whether our Hopper kernels may run.
    hopper: bool,
    /// `None` if cuDNN is missing or too old, and on AMD GPUs.
    cudnn: Option<Cudnn>,
    notices: NoticeHandler,
}

impl Attentions {
    /// Attention on a stream. With `deterministic` the backward adds in the same order every time.
    pub(crate) fn new(
        stream: &Stream,
        kernels: &Kernels,
        deterministic: bool,
        scratch: AttentionScratch,
        notices: &NoticeHandler,
    ) -> Result<Self, GpuError> {
        let cudnn = if scratch == AttentionScratch::Portable { None } else { Cudnn::find(stream)? };
        let (kernels, notices) = (kernels.clone(), notices.clone());
        Ok(Attentions { kernels, deterministic, scratch, hopper: true, cudnn, notices })
    }

    /// Uses our own kernels for everything.
    pub(crate) fn disable_cudnn(&mut self) {
        self.cudnn = None;
    }

    /// Disables our Hopper kernels.
    pub(crate) fn disable_hopper(&mut self) {
        self.hopper = false;
    }

    /// See [`Attention`]. Scratch memory is allocated from `memory` and released before this returns. That is sound
    /// because its next user is enqueued later on the same stream.
    pub(crate) fn forward(&self, op: &Attention, memory: &Rc<dyn Memory>) -> Result<(), GpuError> {
        let planned = self.plans_cudnn(op.shape, &op.saved, op.starts);
        let scratch = self.take_scratch(op.shape, op.qkv.dtype(), planned, false, memory);
        let (true, None, AttentionSaved::LogSumExp(log_sums)) = (planned, op.starts, op.saved) else {
            return portable::forward(&self.kernels, op);
        };
        if self.prefers_hopper(op.shape, AttentionPass::Forward, &[op.qkv, op.out, log_sums]) {
            return hopper::forward(&self.kernels, op, log_sums, scratch.addresses[2]);
        }
        let [query, key, value] = heads(op.shape, device_address(op.qkv), op.qkv.dtype());
        let address = |role| match role {
            Role::Query => query,
            Role::Key => key,
            Role::Value => value,
            Role::Out => device_address(op.out),
            Role::LogSumExp => device_address(log_sums),
            role => unreachable!("{role:?} in the forward"),
        };
        let done = self.run_library(op.shape, op.qkv.dtype(), AttentionPass::Forward, &scratch, address)?;
        if done { Ok(()) } else { portable::forward(&self.kernels, op) }
    }

    /// See [`AttentionBackward`]. Scratch as in [`Attentions::forward`], except for the sums of the bias gradient.
    pub(crate) fn backward(
        &self,
        op: &AttentionBackward,
        memory: &Rc<dyn Memory>,
        launcher: &Launcher,
    ) -> Result<(), GpuError> {
        let pass = AttentionPass::Backward { deterministic: self.deterministic };
        let planned = self.plans_cudnn(op.shape, &op.saved, op.starts);
        let scratch = self.take_scratch(op.shape, op.qkv.dtype(), planned, true, memory);
        let [row_dots, dquery_sums, _] = scratch.addresses;
        let (true, None, AttentionSaved::LogSumExp(log_sums)) = (planned, op.starts, op.saved) else {
            portable::backward(&self.kernels, op, row_dots)?;
            return sum_bias(launcher, op);
        };
        let tensors = [op.qkv, op.out, op.dout, op.dqkv, log_sums];
        if !self.deterministic && self.prefers_hopper(op.shape, pass, &tensors) {
            let sums = BiasSums::new(launcher, &self.kernels, op);
            hopper::backward(&self.kernels, op, log_sums, scratch.addresses, sums.as_ref())?;
            return match (sums, op.dbias) {
                (Some(sums), Some(dbias)) => sums.finish(launcher, dbias),
                _ => sum_bias(launcher, op),
            };
        }
        let [query, key, value] = heads(op.shape, device_address(op.qkv), op.qkv.dtype());
        let [dquery, dkey, dvalue] = heads(op.shape, device_address(op.dqkv), op.qkv.dtype());
        let address = |role| match role {
            Role::Query => query,
            Role::Key => key,
            Role::Value => value,
            Role::Out => device_address(op.out),
            Role::DOut => device_address(op.dout),
            Role::LogSumExp => device_address(log_sums),
            Role::RowDots => row_dots,
            Role::DQuerySums => dquery_sums,
            Role::DQuery => dquery,
            Role::DKey => dkey,
            Role::DValue => dvalue,
            Role::Scalar(scalar) => unreachable!("{scalar:?} is passed by value"),
        };
        if !self.run_library(op.shape, op.qkv.dtype(), pass, &scratch, address)? {
            portable::backward(&self.kernels, op, row_dots)?;
        }
        sum_bias(launcher, op)
    }

    /// See [`SlicedAttention`]. Only our own kernels have it.
    pub(crate) fn sliced_forward(&self, op: &SlicedAttention) -> Result<(), GpuError> {
        portable::sliced_forward(&self.kernels, op)
    }

    /// See [`SlicedAttentionBackward`]. Scratch as in [`Attentions::forward`].
    pub(crate) fn sliced_backward(
        &self,
        op: &SlicedAttentionBackward,
        memory: &Rc<dyn Memory>,
    ) -> Result<(), GpuError> {
        let scratch = self.take_scratch(op.shape, op.qkv.dtype(), false, true, memory);
        portable::sliced_backward(&self.kernels, op, scratch.addresses[0])
    }

    /// Whether the plan has room for cuDNN's kernels for this kind of attention.
    fn plans_cudnn(&self, shape: AttentionShape, saved: &AttentionSaved, starts: Option<View>) -> bool {
        self.scratch != AttentionScratch::Portable && asks_library(shape, saved, starts)
    }

    fn take_scratch(
        &self,
        shape: AttentionShape,
        dtype: DType,
        planned: bool,
        backward: bool,
        memory: &Rc<dyn Memory>,
    ) -> Scratch {
        let workspace = self.scratch.workspace(shape, dtype, planned, backward);
        let elements = workspace.bytes() as usize / DType::F32.bytes();
        let buffer = (elements > 0).then(|| Buffer::new(memory, elements, DType::F32, Category::Workspace));
        let base = buffer.as_ref().map_or(0, Buffer::address);
        Scratch { addresses: workspace.addresses(base), library_bytes: workspace.library, _buffer: buffer }
    }

    /// Whether our Hopper kernels run instead of cuDNN's: whenever they can, since they were faster at all measured
    /// shapes. They use the scratch that is planned for cuDNN's kernels, so they run only for shapes with that scratch.
    fn prefers_hopper(&self, shape: AttentionShape, pass: AttentionPass, tensors: &[View]) -> bool {
        let planned = fits_library(shape, tensors[0].dtype(), pass);
        self.hopper && planned && hopper::can(&self.kernels, shape, tensors)
    }

    /// Enqueues cuDNN's kernel. Returns `false` if it has none.
    fn run_library(
        &self,
        shape: AttentionShape,
        dtype: DType,
        pass: AttentionPass,
        scratch: &Scratch,
        address: impl Fn(Role) -> u64,
    ) -> Result<bool, GpuError> {
        let Some(library) = self.cudnn.as_ref().filter(|_| fits_library(shape, dtype, pass)) else {
            return Ok(false);
        };
        let place = (scratch.addresses[2], scratch.library_bytes);
        library.run(self.kernels.stream(), &self.notices, (shape, dtype, pass), place, address)
    }
}

/// Adds the gradient of the `qkv` bias, if the operation has one.
fn sum_bias(launcher: &Launcher, op: &AttentionBackward) -> Result<(), GpuError> {
    let (rows, width) = (op.shape.rows(), op.shape.qkv_width());
    op.dbias.map_or(Ok(()), |out| column_sum(launcher, &ColumnSum { x: op.dqkv, out, rows, width }))
}

/// The addresses of the first query, key and value head in an interleaved tensor.
fn heads(shape: AttentionShape, address: u64, dtype: DType) -> [u64; 3] {
    let head = (shape.head_dim * dtype.bytes()) as u64;
    let (queries, keys) = (shape.heads as u64, shape.kv_heads as u64);
    [address, address + queries * head, address + (queries + keys) * head]
}

/// The scratch memory of one pass, released when dropped.
struct Scratch {
    addresses: [u64; 3],
    library_bytes: u64,
    _buffer: Option<Buffer>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use kintsugi_tensor::ops::Scores;

    #[test]
    fn keys_follow_the_queries_and_values_the_keys() {
        let head = 64 * 2;
        let (heads_of, kv_heads, head_dim, scores) = (4, 2, 64, Scores::PLAIN);
        let grouped = AttentionShape { batch: 2, sequence: 256, heads: heads_of, kv_heads, head_dim, scores };
        assert_eq!(heads(grouped, 1024, DType::BF16), [1024, 1024 + 4 * head, 1024 + 6 * head]);
    }
}
