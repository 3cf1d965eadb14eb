//! The cost of every op of a plan, in picoseconds.

use std::collections::HashMap;
use std::sync::Arc;

use kintsugi_plan::{
    Axis, BackwardPart, Block, Group, MessageKind, Op, Phase, PhaseKind, Plan, Recompute, Unit,
};
use kintsugi_spec::Level;

use super::device::DeviceModel;
use super::links::Links;
use super::op_cost::{OpCost, OpOrder, Time, Transfer, picoseconds};
use super::pricing::{Pricing, host_collective, message_bytes, repeat_products};
use super::sharing::Sharing;
use super::trace::{PlanTraces, kind};
use crate::graph::StageOp;

/// The costs of ops on blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockCosts {
    ops: HashMap<Op, OpCost>,
    /// Of the ops with transfers inside.
    orders: HashMap<Op, OpOrder>,
}

/// The cost of every op on every stage of a plan. Many plans share the parts.
#[derive(Clone, Debug)]
pub struct Costs {
    pub(super) blocks: Arc<BlockCosts>,
    pub(super) units: Arc<UnitCosts>,
    pub(super) messages: Arc<Messages>,
}

/// The messages of each stage: to the next stage, and to the previous one.
pub(super) type Messages = Vec<[Transfer; 2]>;

/// Costs that follow from the mesh and the sharding: ops on units, and ops that run once a step.
#[derive(Clone, Debug)]
pub(super) struct UnitCosts {
    ops: HashMap<Op, OpCost>,
    /// For each stage, in the order of [`StageOp::ALL`].
    stage_ops: Vec<[OpCost; StageOp::ALL.len()]>,
    /// A sum of a few numbers over each axis.
    sums: [Transfer; 3],
    /// The sum of the two copies of a tied table.
    tied: Transfer,
    /// How much slower kernels run beside a transfer, in 1/1024.
    interference: u64,
    /// Time at the end of every step.
    fixed: Time,
}

/// The part of [`Costs`] that contains an op's cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Block,
    Unit,
    Stage(StageOp),
    /// A sum over an axis that the op only starts.
    Sum(Axis),
    /// The op itself costs nothing: it waits for a transfer, or is one side of a message.
    Nothing,
}

pub(super) fn source(op: Op) -> Source {
    match op {
        Op::Begin => Source::Stage(StageOp::Begin),
        Op::Measure => Source::Stage(StageOp::Measure),
        Op::Clip => Source::Stage(StageOp::Clip),
        Op::Step => Source::Stage(StageOp::Step),
        Op::Load { .. } | Op::Forward { .. } | Op::Recompute { .. } | Op::Backward { .. } => Source::Block,
        Op::GatherStart { .. }
        | Op::GatherWait { .. }
        | Op::Release { .. }
        | Op::Discard { .. }
        | Op::ReduceStart { .. }
        | Op::ReduceWait { .. }
        | Op::RefreshStart { .. }
        | Op::RefreshWait { .. } => Source::Unit,
        Op::SendStart { .. }
        | Op::SendWait { .. }
        | Op::ReceiveStart { .. }
        | Op::ReceiveWait { .. }
        | Op::NormWait { .. } => Source::Nothing,
        Op::NormStart { axis } => Source::Sum(axis),
        Op::Evaluate { .. }
        | Op::Feed { .. }
        | Op::Decode { .. }
        | Op::Choose { .. }
        | Op::ShareStart
        | Op::ShareWait => unreachable!("a training step has no \"{op}\""),
    }
}

impl Costs {
    /// The cost of an op on a stage.
    pub fn of(&self, stage: usize, op: Op) -> OpCost {
        let known = |costs: &HashMap<Op, OpCost>| {
            *costs.get(&kind(op)).unwrap_or_else(|| panic!("no trace has \"{op}\""))
        };
        match source(op) {
            Source::Block => known(&self.blocks.ops),
            Source::Unit => known(&self.units.ops),
            Source::Stage(op) => self.units.stage_ops[stage][op as usize],
            Source::Sum(axis) => OpCost { started: Some(self.sum(axis)), ..OpCost::default() },
            Source::Nothing => OpCost::default(),
        }
    }

    /// The order of an op's kernels and transfers, if there are transfers inside.
    pub fn order(&self, op: Op) -> Option<&OpOrder> {
        self.blocks.orders.get(&kind(op))
    }

    /// A message from a stage.
    pub fn message(&self, stage: usize, kind: MessageKind) -> Transfer {
        self.messages[stage][match kind {
            MessageKind::Activation => 0,
            MessageKind::Gradient => 1,
        }]
    }

    /// The sum of the norm over an axis.
    pub fn sum(&self, axis: Axis) -> Transfer {
        self.units.sums[axis_number(axis)]
    }

    /// The sum of the two copies of a tied table.
    pub fn tied(&self) -> Transfer {
        self.units.tied
    }

    /// How much slower kernels run beside a transfer, in 1/1024.
    pub fn interference(&self) -> u64 {
        self.units.interference
    }

    /// The framework's time per step.
    pub fn fixed(&self) -> Time {
        self.units.fixed
    }

    /// Costs without a device: a layer's forward, its input gradient and its weight gradients take these times, and
    /// everything else takes no time.
    pub fn of_layers(plan: &Plan, forward: Time, backward_input: Time, backward_weight: Time) -> Self {
        let compute = |op: Op| match op {
            Op::Forward { block: Block::Layer(_), .. } | Op::Recompute { .. } => forward,
            Op::Backward { block: Block::Layer(_), part, .. } => match part {
                BackwardPart::Both => backward_input + backward_weight,
                BackwardPart::Input => backward_input,
                BackwardPart::Weight => backward_weight,
            },
            Op::Forward { .. }
            | Op::Backward { .. }
            | Op::Load { .. }
            | Op::Begin
            | Op::Evaluate { .. }
            | Op::Feed { .. }
            | Op::Decode { .. }
            | Op::Choose { .. }
            | Op::ShareStart
            | Op::ShareWait
            | Op::GatherStart { .. }
            | Op::GatherWait { .. }
            | Op::Release { .. }
            | Op::Discard { .. }
            | Op::ReduceStart { .. }
            | Op::ReduceWait { .. }
            | Op::SendStart { .. }
            | Op::SendWait { .. }
            | Op::ReceiveStart { .. }
            | Op::ReceiveWait { .. }
            | Op::Measure
            | Op::NormStart { .. }
            | Op::NormWait { .. }
            | Op::Clip
            | Op::Step
            | Op::RefreshStart { .. }
            | Op::RefreshWait { .. } => 0,
        };
        let (mut blocks, mut units) = (HashMap::new(), HashMap::new());
        for op in (0..plan.mesh.pp()).flat_map(|stage| plan.program(stage).ops) {
            let cost = OpCost { compute: compute(op), links: 0, started: None };
            match source(op) {
                Source::Block => _ = blocks.insert(kind(op), cost),
                Source::Unit => _ = units.insert(kind(op), cost),
                Source::Stage(_) | Source::Sum(_) | Source::Nothing => {}
            }
        }
        let at_once = Transfer::new(Level::Package, 0);
        let units = UnitCosts {
            ops: units,
            stage_ops: vec![Default::default(); plan.mesh.pp()],
            sums: [at_once; 3],
            tied: at_once,
            interference: 0,
            fixed: 0,
        };
        Costs {
            blocks: Arc::new(BlockCosts { ops: blocks, orders: HashMap::new() }),
            units: Arc::new(units),
            messages: Arc::new(vec![[at_once; 2]; plan.mesh.pp()]),
        }
    }

    /// Prices the kernels and transfers of a plan's traces.
    pub fn of_traces(plan: &Plan, traced: &PlanTraces, device: &DeviceModel) -> Self {
        Costs::new(plan, traced, device, &Links::new(&plan.cluster, plan.mesh, &plan.framework))
    }

    /// Prices the kernels and transfers of a plan's traces, over the links of its mesh.
    pub(super) fn new(plan: &Plan, traced: &PlanTraces, device: &DeviceModel, links: &Links) -> Self {
        let pricing = Pricing {
            plan,
            device,
            links,
            host_collective: host_collective(plan),
            sharing: Sharing::of(plan),
        };
        let traces = &traced.stages;
        let [first, layer, last] = traces.each_ref().map(|trace| pricing.ops(trace));
        let (mut ops, mut orders, ends) = if let Some(traced) = &traced.single {
            let one = pricing.ops(traced);
            (one.clone(), pricing.orders(traced).collect(), vec![one])
        } else {
            let mut ops = first.clone();
            ops.extend(&layer);
            ops.extend(&last);
            let orders: HashMap<Op, OpOrder> =
                traces.iter().flat_map(|trace| pricing.orders(trace)).collect();
            (ops, orders, vec![first, last])
        };
        let again = Op::Recompute { block: Block::Layer(0), micro: 0 };
        if plan.framework.recompute_whole && ops.contains_key(&again) {
            let forward = Op::Forward { block: Block::Layer(0), micro: 0 };
            ops.insert(again, ops[&forward]);
            orders.extend(orders.get(&forward).cloned().map(|order| (again, order)));
        }
        if plan.framework.products_again > 0.0 && plan.memory.recompute == Recompute::Selective {
            let again = plan.framework.products_again * pricing.products(&traces[1]);
            repeat_products(&mut ops, picoseconds(again));
        }
        let layers = plan.stage_layers();
        let stage_op = |stage: usize, op: Op| {
            let mut cost = layer[&op].times(layers[stage] as u64);
            if stage == 0 {
                cost = cost.plus(ends[0][&op].minus(layer[&op]));
            }
            if stage > 0 && stage + 1 == plan.mesh.pp() {
                cost = cost.plus(ends[1][&op].minus(layer[&op]));
            }
            cost
        };
        let phase = Phase::plain(Group::Tied, PhaseKind::Sum);
        let tied = ops.get(&Op::ReduceStart { unit: Unit::Table, phase });
        let part =
            |wanted| ops.iter().filter(move |(op, _)| source(**op) == wanted).map(|(&op, &cost)| (op, cost));
        let units = UnitCosts {
            stage_ops: (0..plan.mesh.pp())
                .map(|stage| StageOp::ALL.map(|(_, op)| stage_op(stage, op)))
                .collect(),
            sums: [Group::PIPELINE, Group::DATA, Group::TENSOR].map(|group| pricing.sum(group)),
            tied: tied.and_then(|cost| cost.started).unwrap_or(Transfer::new(Level::Node, 0)),
            interference: (plan.framework.interference * 1024.0) as u64,
            fixed: picoseconds(plan.framework.step),
            ops: part(Source::Unit).collect(),
        };
        Costs {
            blocks: Arc::new(BlockCosts { ops: part(Source::Block).collect(), orders }),
            units: Arc::new(units),
            messages: Arc::new(pricing.messages(message_bytes(&traces[0]))),
        }
    }
}

fn axis_number(axis: Axis) -> usize {
    match axis {
        Axis::Pipeline => 0,
        Axis::Data => 1,
        Axis::Tensor => 2,
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;
    use crate::cost::CostCache;

    #[test]
    fn a_whole_sum_takes_up_to_twice_a_shard_of_it() {
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"h100\"\n\
                    [parallel]\ndp = 16\n[batch]\nglobal = 16\nmicro = 1\n[sharding]\nzero = 1";
        let sum = |whole: bool| {
            let plan = ConfigSource::text(file).set(format!("framework.whole_sums={whole}")).plan().unwrap();
            let device = DeviceModel::new(&plan.cluster.device, &plan.framework).unwrap();
            let phase = Phase::plain(Group::DATA, PhaseKind::Scatter);
            let op = Op::ReduceStart { unit: Unit::Layer(0), phase };
            CostCache::new(&device).of(&plan).of(0, op).started.expect("it starts a transfer").time
        };
        let (whole, shard) = (sum(true), sum(false));
        assert!(whole > shard && whole <= 2 * shard, "{whole} {shard}");
    }
}
