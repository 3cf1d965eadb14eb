//! What every kind of op costs under a plan, put together from parts that many plans share.

use std::cell::OnceCell;
use std::sync::Arc;

use kintsugi_plan::{Axis, Block, Mesh, Message, MessageKind, Plan, Recompute, ScheduleKind, Sharding, When};
use kintsugi_spec::Level;

use super::code::{KINDS, UNIT_KINDS, WHOLE, representatives};
use crate::kept::Kept;
use crate::time::{Costs, DeviceModel, Links, Spent, Time};

/// A transfer: the level it keeps busy, and for how long.
pub(super) type Transfer = (Level, Time);

/// The costs of a plan's ops.
pub(super) struct Table {
    pub kinds: [Spent; KINDS],
    pub units: Arc<Units>,
    /// Of each stage: to the next one, and to the one before.
    pub messages: Arc<Vec<[Transfer; 2]>>,
}

/// What follows from the mesh and the sharding.
pub(super) struct Units {
    kinds: Vec<Spent>,
    /// Of each stage, in the order of [`WHOLE`].
    pub whole: Vec<[Spent; 4]>,
    /// Over each axis that has several ranks.
    sums: [Option<Transfer>; 3],
    pub tied: Transfer,
    pub interference: u64,
    pub fixed: Time,
}

/// Tables that have parts in common.
pub(super) struct Tables<'a> {
    model: &'a DeviceModel,
    links: Kept<Mesh, Links>,
    blocks: Kept<BlockKey, Vec<Spent>>,
    units: Kept<UnitKey, Units>,
    messages: Kept<(Mesh, usize, bool), Vec<[Transfer; 2]>>,
}

/// All that decides what blocks cost.
#[derive(PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "a key, not a state")]
struct BlockKey {
    ranks: usize,
    tp: usize,
    one_stage: bool,
    /// Stages, where they share cores.
    sharing: Option<usize>,
    micro: usize,
    sequence_parallel: bool,
    recompute: Recompute,
    split: bool,
    accumulates: bool,
    /// Replicas, where every micro-batch begins its gradients anew: their padding is cleared.
    fresh: Option<usize>,
}

/// All that decides what units cost.
#[derive(PartialEq, Eq, Hash)]
struct UnitKey {
    mesh: Mesh,
    last_layers: usize,
    sharded: [usize; 3],
    when: [When; 2],
    sequence_parallel: bool,
    split: bool,
    accumulates: bool,
}

impl<'a> Tables<'a> {
    pub(super) fn new(model: &'a DeviceModel) -> Self {
        Tables {
            model,
            links: Kept::default(),
            blocks: Kept::default(),
            units: Kept::default(),
            messages: Kept::default(),
        }
    }

    /// The costs of a plan's ops.
    pub(super) fn of(&self, plan: &Plan) -> Table {
        let found = OnceCell::new();
        let links = || self.links.get(plan.mesh, || Links::new(&plan.cluster, plan.mesh, &plan.framework));
        let costs = || found.get_or_init(|| Costs::over(&links(), plan, self.model));
        let blocks = self.blocks.get(block_key(plan), || {
            representatives()[..UNIT_KINDS].iter().map(|&op| costs().of(0, op)).collect()
        });
        let units = self.units.get(unit_key(plan), || Units::new(plan, costs()));
        let key = (plan.mesh, plan.batch.micro, plan.sequence_parallel);
        let messages = self.messages.get(key, || messages(plan, costs()));
        let mut kinds = [Spent::default(); KINDS];
        kinds[..UNIT_KINDS].copy_from_slice(&blocks);
        kinds[UNIT_KINDS..].copy_from_slice(&units.kinds);
        Table { kinds, units, messages }
    }
}

impl Table {
    /// A kind of transfer, if there is one.
    pub(super) fn transfer(&self, kind: usize) -> Option<Transfer> {
        match kind.checked_sub(KINDS) {
            None => self.kinds[kind].started,
            Some(axis) => self.units.sums[axis],
        }
    }
}

impl Units {
    fn new(plan: &Plan, costs: &Costs) -> Self {
        Units {
            kinds: representatives()[UNIT_KINDS..].iter().map(|&op| costs.of(0, op)).collect(),
            whole: (0..plan.mesh.pp).map(|stage| WHOLE.map(|op| costs.of(stage, op))).collect(),
            sums: [Axis::Pipeline, Axis::Data, Axis::Tensor]
                .map(|axis| (plan.mesh.size(axis) > 1).then(|| costs.sum(axis))),
            tied: costs.tied(),
            interference: costs.interference,
            fixed: costs.fixed,
        }
    }
}

fn messages(plan: &Plan, costs: &Costs) -> Vec<[Transfer; 2]> {
    let block = Block::Layer(0);
    let to_both = |stage| {
        [MessageKind::Activation, MessageKind::Gradient]
            .map(|kind| costs.message(stage, Message { kind, block, micro: 0, peer: 0 }))
    };
    (0..plan.mesh.pp).map(to_both).collect()
}

/// Whether a micro-batch adds to the gradients of the one before.
fn accumulates(plan: &Plan) -> bool {
    plan.micro_batches() > 1
}

fn split(plan: &Plan) -> bool {
    plan.pipeline.schedule == ScheduleKind::ZeroBubble
}

fn block_key(plan: &Plan) -> BlockKey {
    let Sharding { gradients, reduce, .. } = plan.sharding;
    let anew = gradients > 1 && (reduce == When::MicroBatch || !accumulates(plan));
    BlockKey {
        ranks: plan.mesh.ranks(),
        tp: plan.mesh.tp,
        one_stage: plan.mesh.pp == 1,
        sharing: plan.cluster.cores.map(|_| plan.mesh.pp),
        micro: plan.batch.micro,
        sequence_parallel: plan.sequence_parallel,
        recompute: plan.memory.recompute,
        split: split(plan),
        accumulates: accumulates(plan),
        fresh: anew.then_some(plan.mesh.dp),
    }
}

fn unit_key(plan: &Plan) -> UnitKey {
    let Sharding { weights, gradients, states, gather, reduce } = plan.sharding;
    UnitKey {
        mesh: plan.mesh,
        last_layers: plan.last_layers(),
        sharded: [weights, gradients, states],
        when: [gather, reduce],
        sequence_parallel: plan.sequence_parallel,
        split: split(plan),
        accumulates: accumulates(plan),
    }
}
