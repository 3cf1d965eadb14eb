//! Attention by cuDNN: its graphs, and the plans that are compiled from them.

mod backward;
mod descriptor;
mod forward;
mod graph;
mod plan;
#[cfg(test)]
mod tests;

pub(crate) use graph::Role;

use std::cell::RefCell;
use std::collections::HashMap;

use cudarc::cudnn::sys::cudnnDataType_t;
use kintsugi_tensor::device::AttentionPass;
use kintsugi_tensor::ops::AttentionShape;
use kintsugi_tensor::{DType, Notice};

use super::libraries;
use crate::attention::portable;
use crate::error::GpuError;
use crate::notice_handler::NoticeHandler;
use crate::stream::Stream;
use descriptor::Handle;
use plan::Plan;

/// 9.10.2. The two versions before it have known errors, and versions before 9.6 need sums that are cleared beforehand.
const MIN_VERSION: usize = 91_002;

/// cuDNN and its compiled plans; `None` for a shape that it refused.
#[derive(Debug)]
pub(crate) struct Cudnn {
    plans: RefCell<HashMap<Key, Option<Plan>>>,
    handle: Handle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    shape: [usize; 6],
    dtype: DType,
    pass: AttentionPass,
}

impl Cudnn {
    /// cuDNN on a stream. `None` if it is missing or too old.
    pub(crate) fn find(stream: &Stream) -> Result<Option<Self>, GpuError> {
        let usable = libraries::CUDNN.require().is_ok() && descriptor::version() >= MIN_VERSION;
        let handle = usable.then(|| Handle::new(stream.handle().cast())).transpose()?;
        Ok(handle.map(|handle| Cudnn { plans: RefCell::default(), handle }))
    }

    /// Enqueues a kernel, with scratch at an address and its bytes. Returns `false` if cuDNN has none.
    pub(crate) fn run(
        &self,
        stream: &Stream,
        notices: &NoticeHandler,
        (shape, dtype, pass): (AttentionShape, DType, AttentionPass),
        (scratch, scratch_bytes): (u64, u64),
        address: impl Fn(Role) -> u64,
    ) -> Result<bool, GpuError> {
        let AttentionShape { batch, sequence, heads, kv_heads, head_dim, scores } = shape;
        let width = scores.width.unwrap_or(head_dim);
        let key = Key { shape: [batch, sequence, heads, kv_heads, head_dim, width], dtype, pass };
        let mut plans = self.plans.borrow_mut();
        let plan = plans.entry(key).or_insert_with(|| {
            stream.mark_not_repeatable();
            let plan = compile(&self.handle, shape, dtype, pass, scratch_bytes);
            plan.map_err(|error| {
                notices.notify(Notice::LibraryReplaced(format!("attention by {error}")));
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
                unsafe { plan.run(&self.handle, scratch, address) }
            },
        )?;
        Ok(true)
    }
}

fn compile(
    handle: &Handle,
    shape: AttentionShape,
    dtype: DType,
    pass: AttentionPass,
    workspace_bytes: u64,
) -> Result<Plan, GpuError> {
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
