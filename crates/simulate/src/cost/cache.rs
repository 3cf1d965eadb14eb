//! The costs of many plans of one model and batch. Parts that several plans share are computed once.

use std::cell::OnceCell;
use std::sync::Arc;

use kintsugi_plan::{Mesh, Plan, Recompute, ScheduleKind, Sharding, When};

use super::costs::{BlockCosts, Costs, Messages, UnitCosts};
use super::device::DeviceModel;
use super::links::Links;
use super::trace::PlanTraces;
use crate::memo::Memo;

/// Costs of plans that differ only in their strategy.
pub struct CostCache<'a> {
    device: &'a DeviceModel,
    links: Memo<Mesh, Links>,
    blocks: Memo<BlockKey, Arc<BlockCosts>>,
    units: Memo<UnitKey, Arc<UnitCosts>>,
    messages: Memo<(Mesh, usize, bool), Arc<Messages>>,
}

/// Everything that decides the costs of blocks.
#[derive(PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "a key, not a state")]
struct BlockKey {
    ranks: usize,
    tp: usize,
    one_stage: bool,
    /// Number of stages, if they share cores.
    sharing: Option<usize>,
    micro: usize,
    sequence_parallel: bool,
    overlap_tp: bool,
    recompute: Recompute,
    split: bool,
    accumulates: bool,
    /// What shards of all replicas and parameters are padded to, if every micro-batch starts its gradients anew and clears their
    /// padding.
    fresh: Option<[usize; 2]>,
}

/// Everything that decides the costs of units.
#[derive(PartialEq, Eq, Hash)]
struct UnitKey {
    mesh: Mesh,
    /// Per stage.
    layers: Vec<usize>,
    sharding: Sharding,
    sequence_parallel: bool,
    split: bool,
    accumulates: bool,
}

impl<'a> CostCache<'a> {
    /// Costs on a device.
    pub fn new(device: &'a DeviceModel) -> Self {
        CostCache {
            device,
            links: Memo::default(),
            blocks: Memo::default(),
            units: Memo::default(),
            messages: Memo::default(),
        }
    }

    /// The costs of a plan's ops.
    pub fn of(&self, plan: &Plan) -> Costs {
        let found = OnceCell::new();
        let links = || self.links.get(plan.mesh, || Links::new(&plan.cluster, plan.mesh, &plan.framework));
        let costs = || found.get_or_init(|| Costs::new(plan, &PlanTraces::new(plan), self.device, &links()));
        let message_key = (plan.mesh, plan.batch.micro, plan.sequence_parallel);
        Costs {
            blocks: self.blocks.get(block_key(plan), || Arc::clone(&costs().blocks)),
            units: self.units.get(unit_key(plan), || Arc::clone(&costs().units)),
            messages: self.messages.get(message_key, || Arc::clone(&costs().messages)),
        }
    }
}

/// Whether a micro-batch accumulates into the gradients of the previous one.
fn accumulates(plan: &Plan) -> bool {
    plan.micro_batches() > 1
}

fn split(plan: &Plan) -> bool {
    plan.pipeline.schedule == ScheduleKind::ZeroBubble
}

fn block_key(plan: &Plan) -> BlockKey {
    let Sharding { gradients, reduce, multiple, quantized, .. } = plan.sharding;
    let anew = gradients > 1 && (reduce == When::MicroBatch || !accumulates(plan));
    BlockKey {
        ranks: plan.mesh.ranks(),
        tp: plan.mesh.tp(),
        one_stage: plan.mesh.pp() == 1,
        sharing: plan.cluster.cores.map(|_| plan.mesh.pp()),
        micro: plan.batch.micro,
        sequence_parallel: plan.sequence_parallel,
        overlap_tp: plan.overlap_tp,
        recompute: plan.memory.recompute,
        split: split(plan),
        accumulates: accumulates(plan),
        fresh: anew.then_some([plan.mesh.dp() * multiple, quantized.block()]),
    }
}

fn unit_key(plan: &Plan) -> UnitKey {
    UnitKey {
        mesh: plan.mesh,
        layers: plan.stage_layers(),
        sharding: plan.sharding,
        sequence_parallel: plan.sequence_parallel,
        split: split(plan),
        accumulates: accumulates(plan),
    }
}
