//! The cost of every op of a plan, in picoseconds.

use std::collections::HashMap;
use std::sync::Arc;

use kintsugi_plan::{
    Axis, BackwardPart, Block, Computation, Group, MessageKind, Op, OpKind, Phase, PhaseKind, Plan,
    Recompute, Span, StepOp, Transfer, Unit,
};
use kintsugi_spec::{ByAxis, Level};

use super::device::DeviceModel;
use super::links::Links;
use super::op_cost::{OpCost, OpOrder, Time, TransferCost, picoseconds};
use super::pricing::{Pricing, host_collective, message_bytes, of_layer, repeat_products};
use super::sharing::Sharing;
use super::trace::PlanTraces;

/// The costs of ops on blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockCosts {
    ops: HashMap<OpKind, OpCost>,
    /// Of the ops with transfers inside.
    orders: HashMap<OpKind, OpOrder>,
}

/// The cost of every op on every stage of a plan. Many plans share the parts.
#[derive(Clone, Debug)]
pub struct Costs {
    pub(super) blocks: Arc<BlockCosts>,
    pub(super) units: Arc<UnitCosts>,
    pub(super) messages: Arc<Messages>,
}

/// The messages of each stage: to the next stage, and to the previous one.
pub(super) type Messages = Vec<[TransferCost; 2]>;

/// Costs that follow from the mesh and the sharding: ops on units, and ops that run once a step.
#[derive(Clone, Debug)]
pub(super) struct UnitCosts {
    ops: HashMap<OpKind, OpCost>,
    /// For each stage, in the order of [`StepOp::ALL`].
    step_ops: Vec<[OpCost; StepOp::ALL.len()]>,
    /// A sum of a few numbers over each axis.
    sums: ByAxis<TransferCost>,
    /// The sum of the two copies of a tied table.
    tied: TransferCost,
    /// How much slower kernels run beside a transfer, in 1/1024.
    interference: u64,
    /// Time at the end of every step.
    fixed: Time,
}

/// The part of [`Costs`] that contains an op's cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CostSource {
    Block,
    Unit,
    Step(StepOp),
    /// A sum over an axis that the op only starts.
    Sum(Axis),
    /// The op itself costs nothing: it waits for a transfer, or is one side of a message.
    Nothing,
}

pub(super) fn source(op: Op) -> CostSource {
    match op {
        Op::Step(op) => CostSource::Step(op),
        Op::Load { .. } => CostSource::Block,
        Op::Compute { kind, .. } => match kind {
            Computation::Forward | Computation::Recompute | Computation::Backward(_) => CostSource::Block,
            Computation::Evaluate | Computation::Decode => unreachable!("a training step has no \"{op}\""),
        },
        Op::Matrices { .. } | Op::Release { .. } | Op::Discard { .. } => CostSource::Unit,
        Op::Start(transfer) | Op::Wait(transfer) => match transfer {
            Transfer::Gather { .. }
            | Transfer::Reduce { .. }
            | Transfer::Refresh { .. }
            | Transfer::Exchange { .. } => CostSource::Unit,
            Transfer::Norm { axis } if op == Op::Start(transfer) => CostSource::Sum(axis),
            Transfer::Norm { .. } | Transfer::Send(_) | Transfer::Receive(_) => CostSource::Nothing,
            Transfer::Share => unreachable!("a training step has no \"{op}\""),
        },
        Op::Feed { .. } | Op::Choose { .. } => unreachable!("a training step has no \"{op}\""),
    }
}

impl BlockCosts {
    /// The time of an op on a block with nothing beside it; 0 if the plan has no such op.
    pub(super) fn duration(&self, op: Op) -> Time {
        let overlapping = self.orders.get(&op.kind()).filter(|order| order.overlaps);
        let one_by_one =
            || self.ops.get(&op.kind()).map_or(0, |cost| cost.compute.saturating_add(cost.links));
        overlapping.map_or_else(one_by_one, OpOrder::duration)
    }

    /// The time of its kernels.
    pub(super) fn kernels(&self, op: Op) -> Time {
        self.ops.get(&op.kind()).map_or(0, |cost| cost.compute)
    }
}

impl UnitCosts {
    /// The cost of an op on a unit, if the plan has it.
    pub(super) fn op(&self, op: Op) -> Option<OpCost> {
        self.ops.get(&op.kind()).copied()
    }

    /// The cost of an op that runs once a step.
    pub(super) fn step_op(&self, stage: usize, op: StepOp) -> OpCost {
        self.step_ops[stage][op as usize]
    }

    /// A sum of a few numbers over an axis.
    pub(super) fn sum(&self, axis: Axis) -> TransferCost {
        self.sums[axis]
    }
}

impl Costs {
    /// The cost of an op on a stage.
    pub fn of(&self, stage: usize, op: Op) -> OpCost {
        let known = |costs: &HashMap<OpKind, OpCost>| {
            *costs.get(&op.kind()).unwrap_or_else(|| panic!("no trace has \"{op}\""))
        };
        match source(op) {
            CostSource::Block => known(&self.blocks.ops),
            CostSource::Unit => known(&self.units.ops),
            CostSource::Step(op) => self.units.step_op(stage, op),
            CostSource::Sum(axis) => OpCost { started: Some(self.sum(axis)), ..OpCost::default() },
            CostSource::Nothing => OpCost::default(),
        }
    }

    /// The order of an op's kernels and transfers, if there are transfers inside.
    pub fn order(&self, op: Op) -> Option<&OpOrder> {
        self.blocks.orders.get(&op.kind())
    }

    /// A message from a stage.
    pub fn message(&self, stage: usize, kind: MessageKind) -> TransferCost {
        self.messages[stage][match kind {
            MessageKind::Activation => 0,
            MessageKind::Gradient => 1,
        }]
    }

    /// The sum of the norm over an axis.
    pub fn sum(&self, axis: Axis) -> TransferCost {
        self.units.sum(axis)
    }

    /// The sum of the two copies of a tied table.
    pub fn tied(&self) -> TransferCost {
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
            Op::Compute { kind, block: Block::Layer(_), .. } => match kind {
                Computation::Forward
                | Computation::Evaluate
                | Computation::Decode
                | Computation::Recompute => forward,
                Computation::Backward(BackwardPart::Both) => backward_input + backward_weight,
                Computation::Backward(BackwardPart::Input) => backward_input,
                Computation::Backward(BackwardPart::Weight) => backward_weight,
            },
            _ => 0,
        };
        let (mut blocks, mut units) = (HashMap::new(), HashMap::new());
        for op in (0..plan.mesh.pp()).flat_map(|stage| plan.program(stage).ops) {
            let cost = OpCost { compute: compute(op), links: 0, started: None };
            match source(op) {
                CostSource::Block => _ = blocks.insert(op.kind(), cost),
                CostSource::Unit => _ = units.insert(op.kind(), cost),
                CostSource::Step(_) | CostSource::Sum(_) | CostSource::Nothing => {}
            }
        }
        let at_once = TransferCost::new(Level::Package, 0);
        let units = UnitCosts {
            ops: units,
            step_ops: vec![Default::default(); plan.mesh.pp()],
            sums: Axis::ALL.map(|_| at_once),
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
            let orders: HashMap<OpKind, OpOrder> =
                traces.iter().flat_map(|trace| pricing.orders(trace)).collect();
            (ops, orders, vec![first, last])
        };
        let again = of_layer(Computation::Recompute);
        if plan.framework.recompute_whole && ops.contains_key(&again) {
            let forward = of_layer(Computation::Forward);
            ops.insert(again, ops[&forward]);
            orders.extend(orders.get(&forward).cloned().map(|order| (again, order)));
        }
        if plan.framework.products_again > 0.0 && plan.memory.recompute == Recompute::Selective {
            let again = plan.framework.products_again * pricing.products(&traces[1]);
            repeat_products(&mut ops, picoseconds(again));
        }
        let layers = plan.stage_layers();
        let step_op = |stage: usize, op: StepOp| {
            let op = Op::Step(op).kind();
            // Not every plan has every op.
            let Some(&of_layer) = layer.get(&op) else { return OpCost::default() };
            let mut cost = of_layer.times(layers[stage] as u64);
            if stage == 0 {
                cost = cost.plus(ends[0][&op].minus(of_layer));
            }
            if stage > 0 && stage + 1 == plan.mesh.pp() {
                cost = cost.plus(ends[1][&op].minus(of_layer));
            }
            cost
        };
        let phase = Phase::plain(Group::Tied, PhaseKind::Sum);
        let tied = ops.get(&Op::Start(Transfer::Reduce { unit: Unit::Table, phase }).kind());
        let part = |wanted| {
            let costs = ops.iter().map(|(&kind, &cost)| (kind, cost));
            costs.filter(move |(kind, _)| source(kind.op()) == wanted)
        };
        let units = UnitCosts {
            step_ops: (0..plan.mesh.pp()).map(|stage| StepOp::ALL.map(|op| step_op(stage, op))).collect(),
            sums: Axis::ALL.map(|axis| pricing.sum(Group::Along(axis, Span::All))),
            tied: tied.and_then(|cost| cost.started).unwrap_or(TransferCost::new(Level::Node, 0)),
            interference: (plan.framework.interference * 1024.0) as u64,
            fixed: picoseconds(plan.framework.step),
            ops: part(CostSource::Unit).collect(),
        };
        Costs {
            blocks: Arc::new(BlockCosts { ops: part(CostSource::Block).collect(), orders }),
            units: Arc::new(units),
            messages: Arc::new(pricing.messages(message_bytes(&traces[0]))),
        }
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
            let op = Op::Start(Transfer::Reduce { unit: Unit::Layer(0), phase });
            CostCache::new(&device).of(&plan).of(0, op).started.expect("it starts a transfer").time
        };
        let (whole, shard) = (sum(true), sum(false));
        assert!(whole > shard && whole <= 2 * shard, "{whole} {shard}");
    }
}
