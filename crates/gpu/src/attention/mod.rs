//! Causal self-attention on a GPU. Our Hopper kernels run if they support the shape, else cuDNN's fused kernels if they
//! do. Our portable kernels do everything else, such as packed documents that must not attend to each other.
//!
//! All of them save the same log-sum-exp, so any forward works with any backward.

mod backward;
mod descriptor;
mod forward;
mod graph;
mod hopper;
mod plan;
mod portable;
mod tensor;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub use hopper::definitions as hopper_attention_definitions;
#[cfg(test)]
pub use tensor::definitions as tensor_attention_definitions;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use cudarc::cudnn::sys::cudnnDataType_t;

use super::column_sum::column_sum;
use super::error::CudaError;
use super::kernels::Kernels;
use super::launcher::{Launcher, device_address};
use super::libraries;
use super::notice_handler::NoticeHandler;
use super::stream::Stream;
use descriptor::Handle;
use graph::Role;
use hopper::BiasSums;
use kintsugi_tensor::device::{AttentionPass, AttentionWorkspace, asks_library, fits_library};
use kintsugi_tensor::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape, ColumnSum};
use kintsugi_tensor::{Buffer, Category, DType, Memory, Notice, View};
use plan::Plan;

/// 9.10.2. The two versions before it have known errors, and versions before 9.6 need sums that are cleared beforehand.
const OLDEST_VERSION: usize = 91_002;

/// The attention kernels of one stream.
#[derive(Debug)]
pub(crate) struct Attentions {
    kernels: Kernels,
    deterministic: bool,
    /// Whether our Hopper kernels may run.
    hopper: bool,
    /// `None` if cuDNN is missing or too old.
    library: Option<Library>,
    notices: NoticeHandler,
}

/// cuDNN and its compiled plans; `None` for a shape that it refused.
#[derive(Debug)]
struct Library {
    plans: RefCell<HashMap<Key, Option<Plan>>>,
    handle: Handle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    shape: [usize; 5],
    dtype: DType,
    pass: AttentionPass,
}

impl Attentions {
    /// Attention on a stream. With `deterministic` the backward adds in the same order every time.
    pub(crate) fn new(
        stream: &Stream,
        kernels: &Kernels,
        deterministic: bool,
        notices: &NoticeHandler,
    ) -> Result<Self, CudaError> {
        let usable = libraries::CUDNN.require().is_ok() && descriptor::version() >= OLDEST_VERSION;
        let handle = usable.then(|| Handle::new(stream.handle())).transpose()?;
        let library = handle.map(|handle| Library { plans: RefCell::default(), handle });
        let (kernels, notices) = (kernels.clone(), notices.clone());
        Ok(Attentions { kernels, deterministic, hopper: true, library, notices })
    }

    /// Uses our own kernels for everything.
    pub(crate) fn disable_cudnn(&mut self) {
        self.library = None;
    }

    /// Disables our Hopper kernels.
    pub(crate) fn disable_hopper(&mut self) {
        self.hopper = false;
    }

    /// See [`Attention`]. Scratch memory is allocated from `memory` and released before this returns. That is sound
    /// because its next user is enqueued later on the same stream.
    pub(crate) fn forward(&self, op: &Attention, memory: &Rc<dyn Memory>) -> Result<(), CudaError> {
        let cudnn = asks_library(&op.saved, op.starts);
        let scratch = Scratch::new(op.shape, op.qkv.dtype(), cudnn, AttentionPass::Forward, memory);
        let (true, AttentionSaved::LogSumExp(log_sums)) = (cudnn, op.saved) else {
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
    ) -> Result<(), CudaError> {
        let pass = AttentionPass::Backward { deterministic: self.deterministic };
        let cudnn = asks_library(&op.saved, op.starts);
        let scratch = Scratch::new(op.shape, op.qkv.dtype(), cudnn, pass, memory);
        let [row_dots, dquery_sums, _] = scratch.addresses;
        let (true, AttentionSaved::LogSumExp(log_sums)) = (cudnn, op.saved) else {
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
    ) -> Result<bool, CudaError> {
        let Some(library) = self.library.as_ref().filter(|_| fits_library(shape, dtype, pass)) else {
            return Ok(false);
        };
        let AttentionShape { batch, sequence, heads, kv_heads, head_dim } = shape;
        let key = Key { shape: [batch, sequence, heads, kv_heads, head_dim], dtype, pass };
        let (mut plans, stream) = (library.plans.borrow_mut(), self.kernels.stream());
        let plan = plans.entry(key).or_insert_with(|| {
            stream.mark_not_repeatable();
            let plan = compile(&library.handle, shape, dtype, pass, scratch.library_bytes);
            plan.map_err(|error| {
                self.notices.notify(Notice::LibraryReplaced(format!("attention by {error}")));
            })
            .ok()
        });
        let Some(plan) = plan else {
            return Ok(false);
        };
        stream.add_hash_to_digest(&key);
        let address = |role| {
            let address = address(role);
            stream.add_to_digest([address]);
            address
        };
        stream.launching(
            || format!("cuDNN attention, {pass:?}"),
            || {
                // SAFETY: the views were checked against the shape, the scratch is as large as the plan was allowed, and a
                // rank's memory outlives what is enqueued on its stream.
                unsafe { plan.run(&library.handle, scratch.addresses[2], address) }
            },
        )?;
        Ok(true)
    }
}

/// Adds the gradient of the `qkv` bias, if the operation has one.
fn sum_bias(launcher: &Launcher, op: &AttentionBackward) -> Result<(), CudaError> {
    let (rows, width) = (op.shape.rows(), op.shape.qkv_width());
    op.dbias.map_or(Ok(()), |out| column_sum(launcher, &ColumnSum { x: op.dqkv, out, rows, width }))
}

fn compile(
    handle: &Handle,
    shape: AttentionShape,
    dtype: DType,
    pass: AttentionPass,
    workspace_bytes: u64,
) -> Result<Plan, CudaError> {
    let compute = match dtype {
        DType::F16 => cudnnDataType_t::CUDNN_DATA_HALF,
        _ => cudnnDataType_t::CUDNN_DATA_BFLOAT16,
    };
    let graph = match pass {
        AttentionPass::Forward => forward::forward(shape, compute)?,
        AttentionPass::Backward { deterministic } => backward::backward(shape, compute, deterministic)?,
    };
    Plan::new(handle, graph, portable::scale(shape), workspace_bytes)
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

impl Scratch {
    fn new(
        shape: AttentionShape,
        dtype: DType,
        cudnn: bool,
        pass: AttentionPass,
        memory: &Rc<dyn Memory>,
    ) -> Self {
        let workspace = AttentionWorkspace::new(shape, dtype, cudnn, pass);
        let elements = workspace.bytes() as usize / DType::F32.bytes();
        let buffer = (elements > 0).then(|| Buffer::new(memory, elements, DType::F32, Category::Workspace));
        let base = buffer.as_ref().map_or(0, Buffer::address);
        Scratch { addresses: workspace.addresses(base), library_bytes: workspace.library, _buffer: buffer }
    }
}
