//! The cost of every op of a plan, in picoseconds: kernels are priced by the device, transfers by the links.

use std::collections::HashMap;
use std::sync::Arc;

use kintsugi_comm::Collective;
use kintsugi_comm::paper::{Entry, Transfer as Movement};
use kintsugi_plan::{Axis, BackwardPart, Block, Group, MessageKind, Op, Phase, PhaseKind, Plan, Unit};
use kintsugi_spec::{FrameworkSpec, Level};

use super::device::DeviceModel;
use super::links::Links;
use super::sharing::Sharing;
use super::trace::{OpTrace, Trace, cut_down, kind, trace};
use crate::graph::StageOp;

/// Picoseconds.
pub type Time = u64;

/// A transfer: the level that it occupies, and its duration.
pub type Transfer = (Level, Time);

/// The cost of an op for the rank that runs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCost {
    /// In kernels, or waiting for a slower host.
    pub compute: Time,
    /// In transfers inside the op, which do not overlap with anything.
    pub links: Time,
    /// The transfer that the op starts without waiting.
    pub started: Option<Transfer>,
}

/// The cost of every op on every stage of a plan. Many plans share the parts.
#[derive(Clone, Debug)]
pub struct Costs {
    pub(super) blocks: Arc<HashMap<Op, OpCost>>,
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
enum Source {
    Block,
    Unit,
    Stage(StageOp),
    /// A sum over an axis that the op only starts.
    Sum(Axis),
    /// The op itself costs nothing: it waits for a transfer, or is one side of a message.
    Nothing,
}

fn source(op: Op) -> Source {
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

/// Converts seconds to picoseconds.
pub fn picoseconds(seconds: f64) -> Time {
    (seconds * 1e12).round() as Time
}

impl OpCost {
    fn plus(self, other: OpCost) -> OpCost {
        OpCost {
            compute: self.compute.saturating_add(other.compute),
            links: self.links.saturating_add(other.links),
            started: None,
        }
    }

    fn minus(self, other: OpCost) -> OpCost {
        OpCost {
            compute: self.compute.saturating_sub(other.compute),
            links: self.links.saturating_sub(other.links),
            started: None,
        }
    }

    /// The cost for a rank that shares its core and copies what it sends itself.
    fn shared(self, sharing: Sharing) -> OpCost {
        let slowed = |time: Time| (time as f64 * sharing.slowdown).round() as Time;
        let copied = self.started.map_or(0, |(_, time)| time);
        OpCost {
            compute: slowed(self.compute.saturating_add(copied)),
            links: slowed(self.links),
            started: None,
        }
    }

    fn times(self, n: u64) -> OpCost {
        OpCost { compute: self.compute.saturating_mul(n), links: self.links.saturating_mul(n), started: None }
    }
}

impl Costs {
    /// The cost of an op on a stage.
    pub fn of(&self, stage: usize, op: Op) -> OpCost {
        let known = |costs: &HashMap<Op, OpCost>| {
            *costs.get(&kind(op)).unwrap_or_else(|| panic!("no trace has \"{op}\""))
        };
        match source(op) {
            Source::Block => known(&self.blocks),
            Source::Unit => known(&self.units.ops),
            Source::Stage(op) => self.units.stage_ops[stage][op as usize],
            Source::Sum(axis) => OpCost { started: Some(self.sum(axis)), ..OpCost::default() },
            Source::Nothing => OpCost::default(),
        }
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
        for op in (0..plan.mesh.pp).flat_map(|stage| plan.program(stage).ops) {
            let cost = OpCost { compute: compute(op), links: 0, started: None };
            match source(op) {
                Source::Block => _ = blocks.insert(kind(op), cost),
                Source::Unit => _ = units.insert(kind(op), cost),
                Source::Stage(_) | Source::Sum(_) | Source::Nothing => {}
            }
        }
        let at_once = (Level::Package, 0);
        let units = UnitCosts {
            ops: units,
            stage_ops: vec![Default::default(); plan.mesh.pp],
            sums: [at_once; 3],
            tied: at_once,
            interference: 0,
            fixed: 0,
        };
        Costs {
            blocks: Arc::new(blocks),
            units: Arc::new(units),
            messages: Arc::new(vec![[at_once; 2]; plan.mesh.pp]),
        }
    }

    /// Traces a plan and prices its kernels and transfers, over the links of its mesh.
    pub(super) fn new(plan: &Plan, device: &DeviceModel, links: &Links) -> Self {
        let pricing = Pricing {
            plan,
            device,
            links,
            host_collective: host_collective(plan),
            sharing: Sharing::of(plan),
        };
        let small = cut_down(plan, 3);
        let traces = [0, 1, 2].map(|stage| trace(&small, stage));
        let [first, layer, last] = traces.each_ref().map(|trace| pricing.ops(trace));
        // A single stage has both ends of the model, but a tied table only once.
        let (ops, ends) = if plan.mesh.pp == 1 {
            let one = pricing.ops(&trace(&cut_down(plan, 1), 0));
            (one.clone(), vec![one])
        } else {
            let mut ops = first.clone();
            ops.extend(&layer);
            ops.extend(&last);
            if plan.framework.recompute_whole {
                let block = Block::Layer(0);
                let forward = ops[&Op::Forward { block, micro: 0 }];
                ops.insert(Op::Recompute { block, micro: 0 }, forward);
            }
            (ops, vec![first, last])
        };
        let layers = plan.stage_layers();
        let stage_op = |stage: usize, op: Op| {
            let mut cost = layer[&op].times(layers[stage] as u64);
            if stage == 0 {
                cost = cost.plus(ends[0][&op].minus(layer[&op]));
            }
            if stage > 0 && stage + 1 == plan.mesh.pp {
                cost = cost.plus(ends[1][&op].minus(layer[&op]));
            }
            cost
        };
        let phase = Phase { over: Group::Tied, kind: PhaseKind::Sum };
        let tied = ops.get(&Op::ReduceStart { unit: Unit::Table, phase });
        let part =
            |wanted| ops.iter().filter(move |(op, _)| source(**op) == wanted).map(|(&op, &cost)| (op, cost));
        let units = UnitCosts {
            stage_ops: (0..plan.mesh.pp)
                .map(|stage| StageOp::ALL.map(|(_, op)| stage_op(stage, op)))
                .collect(),
            sums: [Group::PIPELINE, Group::DATA, Group::TENSOR].map(|group| pricing.sum(group)),
            tied: tied.and_then(|cost| cost.started).unwrap_or((Level::Node, 0)),
            interference: (plan.framework.interference * 1024.0) as u64,
            fixed: picoseconds(plan.framework.step),
            ops: part(Source::Unit).collect(),
        };
        Costs {
            blocks: Arc::new(part(Source::Block).collect()),
            units: Arc::new(units),
            messages: Arc::new(pricing.messages(message_bytes(&traces[0]))),
        }
    }
}

/// Computes costs from traces.
struct Pricing<'a> {
    plan: &'a Plan,
    device: &'a DeviceModel,
    links: &'a Links,
    /// Seconds of the host for each collective of tp.
    host_collective: f64,
    sharing: Option<Sharing>,
}

impl Pricing<'_> {
    fn ops(&self, trace: &Trace) -> HashMap<Op, OpCost> {
        trace.iter().map(|(&op, traced)| (op, self.op(op, traced))).collect()
    }

    fn op(&self, op: Op, traced: &OpTrace) -> OpCost {
        let OpTrace { kernels, transfers } = traced;
        let seconds: f64 = kernels.iter().map(|kernel| self.device.seconds(kernel)).sum();
        let host =
            kernels.len() as f64 * self.device.host_seconds() + transfers.len() as f64 * self.host_collective;
        let whole = self.links.whole_sums() && matches!(op, Op::ReduceStart { .. });
        let transfers = transfers.iter().filter_map(|&entry| collective(entry, self.links, whole));
        let cost = if starts_a_transfer(op) {
            let started = transfers.map(|(level, seconds)| (level, picoseconds(seconds))).next();
            OpCost { compute: picoseconds(seconds), links: 0, started }
        } else {
            let inside: f64 = transfers.map(|(_, seconds)| seconds).sum();
            let waiting = (host - seconds - inside).max(0.0);
            OpCost { compute: picoseconds(seconds + waiting), links: picoseconds(inside), started: None }
        };
        self.sharing.map_or(cost, |sharing| cost.shared(sharing))
    }

    /// How many times longer a transfer takes because ranks share cores.
    fn slowdown(&self) -> f64 {
        self.sharing.map_or(1.0, |sharing| sharing.slowdown)
    }

    fn sum(&self, group: Group) -> Transfer {
        let (level, seconds) = self.links.collective(group, Collective::AllReduce, 12.0);
        (level, picoseconds(seconds * self.slowdown()))
    }

    fn messages(&self, bytes: f64) -> Messages {
        let Plan { framework, mesh, .. } = self.plan;
        let scattered = framework.scatter_messages && !self.plan.sequence_parallel && mesh.tp > 1;
        let message = |stage: usize, to: usize| {
            let (level, seconds) = self.links.message(stage, to, bytes, scattered);
            (level, picoseconds(seconds * self.slowdown()))
        };
        let pp = mesh.pp;
        (0..pp)
            .map(|stage| [message(stage, (stage + 1) % pp), message(stage, (stage + pp - 1) % pp)])
            .collect()
    }
}

fn axis_number(axis: Axis) -> usize {
    match axis {
        Axis::Pipeline => 0,
        Axis::Data => 1,
        Axis::Tensor => 2,
    }
}

/// Seconds of the host for each collective of tp.
fn host_collective(plan: &Plan) -> f64 {
    let staged = plan.mesh.pp > 1 && plan.cluster.topology.per_node.is_some_and(|n| plan.mesh.ranks() > n);
    let FrameworkSpec { host_collective, host_staged, .. } = plan.framework;
    plan.mesh.tp as f64 * if staged { host_staged } else { host_collective }
}

/// Whether an op only starts its transfer.
fn starts_a_transfer(op: Op) -> bool {
    matches!(
        op,
        Op::GatherStart { .. } | Op::ReduceStart { .. } | Op::RefreshStart { .. } | Op::NormStart { .. }
    )
}

/// Seconds of a collective. With `whole`, every rank gets the whole sum instead of a shard.
fn collective(entry: Entry, links: &Links, whole: bool) -> Option<(Level, f64)> {
    let Movement::Collective(collective) = entry.transfer else { return None };
    let collective = if whole { Collective::AllReduce } else { collective };
    Some(links.collective(entry.group, collective, (entry.len * entry.dtype.bytes()) as f64))
}

/// Bytes of a message between stages, as the first stage sends it.
fn message_bytes(first: &Trace) -> f64 {
    let sends = first.iter().filter(|(op, _)| matches!(op, Op::SendStart { .. }));
    let entries = sends.flat_map(|(_, traced)| &traced.transfers);
    entries.map(|entry| (entry.len * entry.dtype.bytes()) as f64).fold(0.0, f64::max)
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
            let phase = Phase { over: Group::DATA, kind: PhaseKind::Scatter };
            let op = Op::ReduceStart { unit: Unit::Layer(0), phase };
            CostCache::new(&device).of(&plan).of(0, op).started.expect("it starts a transfer").1
        };
        let (whole, shard) = (sum(true), sum(false));
        assert!(whole > shard && whole <= 2 * shard, "{whole} {shard}");
    }
}
