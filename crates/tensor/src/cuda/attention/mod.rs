//! Causal self-attention on the card: ours for Hopper where they can, else cuDNN's fused kernels where they can, and our own
//! everywhere else, as for documents that do not see each other.
//!
//! All keep the same log-sum-exp, so a forward of the one and a backward of another go together.

mod backward;
mod descriptor;
mod forward;
mod graph;
mod hopper;
mod own;
mod plan;
mod tensor;
#[cfg(test)]
mod tests;
mod workspace;

#[cfg(test)]
pub use hopper::definitions as hopper_attention_definitions;
#[cfg(test)]
pub use tensor::definitions as tensor_attention_definitions;
pub use workspace::{Pass, asks_cudnn, workspace_bytes};

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use cudarc::cudnn::sys::cudnnDataType_t;

use super::column_sum::column_sum;
use super::error::CudaError;
use super::kernels::Kernels;
use super::launcher::{Launcher, device_address};
use super::libraries;
use super::listener::Listener;
use super::stream::Stream;
use crate::ops::{Attention, AttentionBackward, AttentionSaved, AttentionShape, ColumnSum};
use crate::{Buffer, Category, DType, Memory, Notice, View};
use descriptor::Handle;
use graph::Role;
use hopper::BiasSums;
use plan::Plan;
use workspace::{Workspace, fits_library};

/// 9.10.2: the two before it are known to be wrong, and those before 9.6 want sums that are cleared beforehand.
const OLDEST_VERSION: usize = 91_002;

/// The attentions of one stream.
#[derive(Debug)]
pub(crate) struct Attentions {
    kernels: Kernels,
    deterministic: bool,
    /// Whether our kernels for Hopper may run.
    hopper: bool,
    /// `None` where there is no cuDNN, or too old a one.
    library: Option<Library>,
    listener: Listener,
}

/// cuDNN, and what it has compiled so far; `None` for what it refused.
#[derive(Debug)]
struct Library {
    plans: RefCell<HashMap<Key, Option<Plan>>>,
    handle: Handle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    shape: [usize; 5],
    dtype: DType,
    pass: Pass,
}

impl Attentions {
    /// Attention on a stream. With `deterministic` the backward takes sums in the same order every time.
    pub(crate) fn new(
        stream: &Stream,
        kernels: &Kernels,
        deterministic: bool,
        listener: &Listener,
    ) -> Result<Self, CudaError> {
        let usable = libraries::CUDNN.require().is_ok() && descriptor::version() >= OLDEST_VERSION;
        let handle = usable.then(|| Handle::new(stream.handle())).transpose()?;
        let library = handle.map(|handle| Library { plans: RefCell::default(), handle });
        let (kernels, listener) = (kernels.clone(), listener.clone());
        Ok(Attentions { kernels, deterministic, hopper: true, library, listener })
    }

    /// Leaves everything to our own kernels.
    pub(crate) fn forget_cudnn(&mut self) {
        self.library = None;
    }

    /// Does without our kernels for Hopper.
    pub(crate) fn forget_hopper(&mut self) {
        self.hopper = false;
    }

    /// See [`Attention`]. Scratch is taken from `memory` and given back before this returns, which is sound because
    /// whoever gets it next is enqueued later.
    pub(crate) fn forward(&self, op: &Attention, memory: &Rc<dyn Memory>) -> Result<(), CudaError> {
        let cudnn = asks_cudnn(&op.saved, op.starts);
        let scratch = Scratch::new(op.shape, op.qkv.dtype(), cudnn, Pass::Forward, memory);
        let (true, AttentionSaved::LogSumExp(log_sums)) = (cudnn, op.saved) else {
            return own::forward(&self.kernels, op);
        };
        if self.prefers_hopper(op.shape, Pass::Forward, &[op.qkv, op.out, log_sums]) {
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
        let done = self.run_library(op.shape, op.qkv.dtype(), Pass::Forward, &scratch, address)?;
        if done { Ok(()) } else { own::forward(&self.kernels, op) }
    }

    /// See [`AttentionBackward`]. Scratch as in [`Attentions::forward`], but for sums of the bias's gradient.
    pub(crate) fn backward(
        &self,
        op: &AttentionBackward,
        memory: &Rc<dyn Memory>,
        launcher: &Launcher,
    ) -> Result<(), CudaError> {
        let pass = Pass::Backward { deterministic: self.deterministic };
        let cudnn = asks_cudnn(&op.saved, op.starts);
        let scratch = Scratch::new(op.shape, op.qkv.dtype(), cudnn, pass, memory);
        let [row_dots, dquery_sums, _] = scratch.addresses;
        let (true, AttentionSaved::LogSumExp(log_sums)) = (cudnn, op.saved) else {
            own::backward(&self.kernels, op, row_dots)?;
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
            own::backward(&self.kernels, op, row_dots)?;
        }
        sum_bias(launcher, op)
    }

    /// Whether our kernels for Hopper run instead of cuDNN's: wherever they can, since they were faster at all shapes that
    /// were measured. They work in the scratch that is planned for cuDNN's, and so where that is planned for alone.
    fn prefers_hopper(&self, shape: AttentionShape, pass: Pass, tensors: &[View]) -> bool {
        let planned = fits_library(shape, tensors[0].dtype(), pass);
        self.hopper && planned && hopper::can(&self.kernels, shape, tensors)
    }

    /// Enqueues cuDNN's kernel, or answers `false` if it has none.
    fn run_library(
        &self,
        shape: AttentionShape,
        dtype: DType,
        pass: Pass,
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
            stream.novel();
            let plan = compile(&library.handle, shape, dtype, pass, scratch.library_bytes);
            plan.map_err(|error| self.listener.tell(Notice::Replaced(format!("attention by {error}")))).ok()
        });
        let Some(plan) = plan else {
            return Ok(false);
        };
        stream.note_all_of(&key);
        let address = |role| {
            let address = address(role);
            stream.note([address]);
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

/// The gradient of qkv's bias, if it is wanted.
fn sum_bias(launcher: &Launcher, op: &AttentionBackward) -> Result<(), CudaError> {
    let (rows, width) = (op.shape.rows(), op.shape.qkv_width());
    op.dbias.map_or(Ok(()), |out| column_sum(launcher, &ColumnSum { x: op.dqkv, out, rows, width }))
}

fn compile(
    handle: &Handle,
    shape: AttentionShape,
    dtype: DType,
    pass: Pass,
    workspace_bytes: u64,
) -> Result<Plan, CudaError> {
    let compute = match dtype {
        DType::F16 => cudnnDataType_t::CUDNN_DATA_HALF,
        _ => cudnnDataType_t::CUDNN_DATA_BFLOAT16,
    };
    let graph = match pass {
        Pass::Forward => forward::forward(shape, compute)?,
        Pass::Backward { deterministic } => backward::backward(shape, compute, deterministic)?,
    };
    Plan::new(handle, graph, own::scale(shape), workspace_bytes)
}

/// Where the first query, key and value head begin in an interleaved tensor.
fn heads(shape: AttentionShape, address: u64, dtype: DType) -> [u64; 3] {
    let head = (shape.head_dim * dtype.bytes()) as u64;
    let (queries, keys) = (shape.heads as u64, shape.kv_heads as u64);
    [address, address + queries * head, address + (queries + keys) * head]
}

/// The scratch of one pass, given back when dropped.
struct Scratch {
    addresses: [u64; 3],
    library_bytes: u64,
    _buffer: Option<Buffer>,
}

impl Scratch {
    fn new(shape: AttentionShape, dtype: DType, cudnn: bool, pass: Pass, memory: &Rc<dyn Memory>) -> Self {
        let workspace = Workspace::new(shape, dtype, cudnn, pass);
        let elements = workspace.bytes() as usize / DType::F32.bytes();
        let buffer = (elements > 0).then(|| Buffer::new(memory, elements, DType::F32, Category::Workspace));
        let base = buffer.as_ref().map_or(0, Buffer::address);
        Scratch { addresses: workspace.addresses(base), library_bytes: workspace.library, _buffer: buffer }
    }
}
