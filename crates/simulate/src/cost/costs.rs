//! The cost of every op of a plan, in picoseconds.

use std::collections::HashMap;
use std::sync::Arc;

use kintsugi_plan::{
    Axis, BackwardPart, Block, Computation, MessageKind, Op, OpKind, Plan, StepOp, Transfer,
};
use kintsugi_spec::{ByAxis, Level};

use super::op_cost::{OpCost, OpOrder, Time, TransferCost};

/// The costs of ops on blocks.
#[derive(Clone, Debug, Default)]
pub struct BlockCosts {
    pub(super) ops: HashMap<OpKind, OpCost>,
    /// Of the ops with transfers inside.
    pub(super) orders: HashMap<OpKind, OpOrder>,
}

/// The cost of every op on every stage of a plan. Many plans share the parts.
#[derive(Clone, Debug)]
pub struct Costs {
    pub(crate) blocks: Arc<BlockCosts>,
    pub(crate) units: Arc<UnitCosts>,
    pub(crate) messages: Arc<Messages>,
}

/// The messages of each stage: to the next stage, and to the previous one.
pub type Messages = Vec<[TransferCost; 2]>;

/// Costs that follow from the mesh and the sharding: ops on units, and ops that run once a step.
#[derive(Clone, Debug)]
pub struct UnitCosts {
    pub(super) ops: HashMap<OpKind, OpCost>,
    /// For each stage, in the order of [`StepOp::ALL`].
    pub(super) step_ops: Vec<[OpCost; StepOp::ALL.len()]>,
    /// A sum of a few numbers over each axis.
    pub(super) sums: ByAxis<TransferCost>,
    /// The sum of the two copies of a tied table.
    pub(super) tied: TransferCost,
    /// How much slower kernels run beside a transfer, in 1/1024.
    pub(super) interference: u64,
    /// Time at the end of every step.
    pub(super) fixed: Time,
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
            Computation::Forward
            | Computation::Evaluate
            | Computation::Recompute
            | Computation::Backward(_) => CostSource::Block,
            Computation::Decode => unreachable!("a training step has no \"{op}\""),
        },
        Op::Matrices { .. } | Op::Release { .. } | Op::Discard { .. } => CostSource::Unit,
        Op::Start(transfer) | Op::Wait(transfer) => match transfer {
            Transfer::Gather { .. }
            | Transfer::Reduce { .. }
            | Transfer::Refresh { .. }
            | Transfer::Exchange { .. } => CostSource::Unit,
            Transfer::Norm { axis } if op == Op::Start(transfer) => CostSource::Sum(axis),
            Transfer::Norm { .. } | Transfer::Send(_) | Transfer::Receive(_) => CostSource::Nothing,
            Transfer::Share | Transfer::Replicate { .. } => {
                unreachable!("a training step has no \"{op}\"")
            }
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
                Computation::Backward(BackwardPart::Input | BackwardPart::Frozen) => backward_input,
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
}
