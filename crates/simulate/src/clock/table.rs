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
    /// Of each stage.
    layers: Vec<usize>,
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
    /// The same in units of 2ⁿ picoseconds, and n: 0, unless a step is so long that its picoseconds, or those that all
    /// stages wait, could be more than the clocks count.
    pub(super) fn scaled(self, plan: &Plan) -> (Table, u32) {
        let most = self.at_most(plan) * plan.mesh.pp as f64;
        let n = (most.log2().ceil() as u32).saturating_sub(62);
        if n == 0 {
            return (self, 0);
        }
        let transfer = |(level, time): Transfer| (level, time >> n);
        let spent = |spent: Spent| Spent {
            compute: spent.compute >> n,
            links: spent.links >> n,
            started: spent.started.map(transfer),
        };
        let units = Units {
            kinds: Vec::new(),
            whole: self.units.whole.iter().map(|stage| stage.map(spent)).collect(),
            sums: self.units.sums.map(|sum| sum.map(transfer)),
            tied: transfer(self.units.tied),
            ..*self.units
        };
        let messages = self.messages.iter().map(|to_both| to_both.map(transfer)).collect();
        let table =
            Table { kinds: self.kinds.map(spent), units: Arc::new(units), messages: Arc::new(messages) };
        (table, n)
    }

    /// Picoseconds that no clock of the plan goes past: those of everything that any stage does, one after the other.
    fn at_most(&self, plan: &Plan) -> f64 {
        let all = |spent: &Spent| {
            let started = spent.started.map_or(0.0, |(_, time)| time as f64);
            spent.compute as f64 + spent.links as f64 + started
        };
        let (micro_batches, layers) = (plan.micro_batches() as f64, plan.model.layers as f64);
        let blocks: f64 = self.kinds.iter().map(all).sum::<f64>() * layers * micro_batches;
        let stages: f64 = self.units.whole.iter().flatten().map(all).sum();
        let messages: f64 = self.messages.iter().flatten().map(|&(_, time)| time as f64).sum();
        let sums: f64 = self.units.sums.iter().flatten().map(|&(_, time)| time as f64).sum();
        let interference = 1.0 + self.units.interference as f64 / 1024.0;
        let chunks = plan.pipeline.virtual_stages as f64;
        interference * (blocks + stages) + messages * micro_batches * chunks + sums + self.units.tied.1 as f64
    }

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
        layers: plan.stage_layers(),
        sharded: [weights, gradients, states],
        when: [gather, reduce],
        sequence_parallel: plan.sequence_parallel,
        split: split(plan),
        accumulates: accumulates(plan),
    }
}
