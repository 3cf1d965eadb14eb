//! The cost of every op of a plan, in picoseconds: kernels are priced by the device, transfers by the links.

use std::collections::HashMap;
use std::sync::Arc;

use kintsugi_comm::Collective;
use kintsugi_comm::paper::{Entry, Transfer as Movement};
use kintsugi_plan::{
    Axis, BackwardPart, Block, Group, MessageKind, Op, Phase, PhaseKind, Plan, Recompute, Unit,
};
use kintsugi_spec::{FrameworkSpec, Level};
use kintsugi_tensor::paper::{Kernel, KernelKind};

use super::device::DeviceModel;
use super::links::Links;
use super::sharing::Sharing;
use super::trace::{OpTrace, PlanTraces, Trace, kind};
use crate::graph::StageOp;

/// Picoseconds.
pub type Time = u64;

/// A transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The level that it occupies.
    pub level: Level,
    /// How long it occupies the level.
    pub time: Time,
    /// How much later it arrives, while the level is free for the next transfer: the latency of emulated links. A library's
    /// transfers follow each other on a stream, so their latency is part of `time`.
    pub latency: Time,
}

impl Transfer {
    /// A transfer that has arrived when its level is free again.
    pub fn new(level: Level, time: Time) -> Self {
        Transfer { level, time, latency: 0 }
    }

    /// The rest of it if its ranks copied data for the first part of this length. The latency is its end.
    fn without(self, copying: Time) -> Self {
        let rest = self.duration().saturating_sub(copying);
        let latency = self.latency.min(rest);
        Transfer { time: rest - latency, latency, ..self }
    }

    /// From its start to its arrival.
    pub fn duration(self) -> Time {
        self.time.saturating_add(self.latency)
    }
}

/// The cost of an op for the rank that runs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCost {
    /// In kernels, or waiting for a slower host.
    pub compute: Time,
    /// In transfers inside the op. They block, unless its [`OpOrder`] overlaps them with kernels.
    pub links: Time,
    /// The transfer that the op starts without waiting.
    pub started: Option<Transfer>,
}

/// The kernels and transfers of an op in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpOrder {
    /// What happens one after the other on the stream of the kernels.
    pub segments: Vec<Segment>,
    /// Whether kernels run between the start of a transfer and its wait.
    pub overlaps: bool,
}

/// A part of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Runs kernels, or waits for a slower host.
    Run(Time),
    /// Starts a transfer. Those over one level follow each other.
    Start(Transfer),
    /// Waits for the transfer with this number, counted from the op's first.
    Wait(usize),
}

impl OpOrder {
    /// The total times of its kernels and of its transfers.
    fn cost(&self) -> OpCost {
        let mut cost = OpCost::default();
        for &segment in &self.segments {
            match segment {
                Segment::Run(time) => cost.compute = cost.compute.saturating_add(time),
                Segment::Start(transfer) => cost.links = cost.links.saturating_add(transfer.duration()),
                Segment::Wait(_) => {}
            }
        }
        cost
    }

    /// Calls `transfer` with the number, start and end of each transfer of an op that took from `start` to `end`. Other
    /// transfers may have made it slower than it is alone, evenly from its start to its end.
    pub(crate) fn place(&self, start: Time, end: Time, mut transfer: impl FnMut(usize, Time, Time)) {
        let alone = self.duration().max(1);
        let at =
            |moment: Time| start + (u128::from(moment) * u128::from(end - start) / u128::from(alone)) as Time;
        self.play(|number, begin, end| transfer(number, at(begin), at(end)));
    }

    /// The time of the op with nothing beside it.
    pub fn duration(&self) -> Time {
        self.play(|_, _, _| {})
    }

    /// Runs the op alone. Calls `transfer` with the number, start and end of each transfer, and returns the op's end.
    fn play(&self, mut transfer: impl FnMut(usize, Time, Time)) -> Time {
        let (mut now, mut stream, mut ends) = (0, [0; 3], Vec::new());
        for &segment in &self.segments {
            match segment {
                Segment::Run(time) => now = Time::saturating_add(now, time),
                Segment::Start(started) => {
                    let free = &mut stream[started.level as usize];
                    let begin = now.max(*free);
                    *free = begin.saturating_add(started.time);
                    let end = free.saturating_add(started.latency);
                    transfer(ends.len(), begin, end);
                    ends.push(end);
                }
                Segment::Wait(number) => now = now.max(ends[number]),
            }
        }
        now
    }
}

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

    /// The cost for a rank that shares its core. It copies the data of its transfers itself, which takes `copying`. The rest of
    /// a transfer is time on emulated links.
    fn shared(self, sharing: Sharing, copying: Time) -> OpCost {
        let slowed = |time: Time| (time as f64 * sharing.slowdown).round() as Time;
        match self.started {
            Some(transfer) => OpCost {
                compute: slowed(self.compute.saturating_add(copying)),
                links: slowed(self.links),
                started: Some(transfer.without(copying)).filter(|transfer| transfer.duration() > 0),
            },
            None => OpCost {
                compute: slowed(self.compute),
                links: slowed(copying).saturating_add(self.links.saturating_sub(copying)),
                started: None,
            },
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
        for op in (0..plan.mesh.pp).flat_map(|stage| plan.program(stage).ops) {
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
            stage_ops: vec![Default::default(); plan.mesh.pp],
            sums: [at_once; 3],
            tied: at_once,
            interference: 0,
            fixed: 0,
        };
        Costs {
            blocks: Arc::new(BlockCosts { ops: blocks, orders: HashMap::new() }),
            units: Arc::new(units),
            messages: Arc::new(vec![[at_once; 2]; plan.mesh.pp]),
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
            if stage > 0 && stage + 1 == plan.mesh.pp {
                cost = cost.plus(ends[1][&op].minus(layer[&op]));
            }
            cost
        };
        let phase = Phase::plain(Group::Tied, PhaseKind::Sum);
        let tied = ops.get(&Op::ReduceStart { unit: Unit::Table, phase });
        let part =
            |wanted| ops.iter().filter(move |(op, _)| source(**op) == wanted).map(|(&op, &cost)| (op, cost));
        let units = UnitCosts {
            stage_ops: (0..plan.mesh.pp)
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

    /// The order of the ops on blocks that have transfers inside.
    fn orders<'a>(&'a self, trace: &'a Trace) -> impl Iterator<Item = (Op, OpOrder)> + 'a {
        let inside =
            |(op, traced): &(&Op, &OpTrace)| source(**op) == Source::Block && !traced.transfers.is_empty();
        trace.iter().filter(inside).map(|(&op, traced)| (op, self.order(traced)))
    }

    /// Seconds of a kernel. The loss may be over the whole vocabulary on every tensor-parallel rank.
    fn seconds(&self, kernel: &Kernel) -> f64 {
        let whole = self.plan.framework.whole_logits && kernel.name == "cross entropy";
        self.device.seconds(kernel) * if whole { self.plan.mesh.tp as f64 } else { 1.0 }
    }

    /// Seconds that the host needs to launch an op.
    fn host(&self, traced: &OpTrace) -> f64 {
        let launches: f64 = traced.kernels.iter().map(|kernel| self.device.host_seconds(kernel)).sum();
        launches + traced.transfers.len() as f64 * self.host_collective
    }

    fn order(&self, traced: &OpTrace) -> OpOrder {
        let OpTrace { kernels, transfers, events } = traced;
        let slowdown = self.slowdown();
        let mut order = OpOrder::default();
        // Kernels so far, and their number when each transfer started.
        let (mut done, mut started) = (0, vec![0; transfers.len()]);
        let run = |order: &mut OpOrder, kernels: &[Kernel]| {
            let seconds: f64 = kernels.iter().map(|kernel| self.seconds(kernel)).sum();
            order.segments.extend((seconds > 0.0).then(|| Segment::Run(picoseconds(seconds * slowdown))));
        };
        for event in events {
            run(&mut order, &kernels[done..event.kernels]);
            done = event.kernels;
            if event.waits {
                order.overlaps |= done > started[event.transfer];
                order.segments.push(Segment::Wait(event.transfer));
            } else {
                started[event.transfer] = done;
                let entry = transfers[event.transfer];
                let at_once = Transfer::new(Level::Package, 0);
                let transfer = collective(entry, self.links, Purpose::Other).unwrap_or(at_once);
                // A rank that shares its core copies the data itself.
                let copying =
                    self.sharing.and_then(|_| copying(entry, self.links, Purpose::Other)).unwrap_or(0.0);
                let copy = (copying > 0.0).then(|| Segment::Run(picoseconds(copying * slowdown)));
                order.segments.extend(copy);
                order.segments.push(Segment::Start(transfer.without(picoseconds(copying))));
            }
        }
        run(&mut order, &kernels[done..]);
        if order.overlaps {
            let waiting = picoseconds(self.host(traced)).saturating_sub(order.duration());
            order.segments.insert(0, Segment::Run(waiting));
        }
        order
    }

    fn op(&self, op: Op, traced: &OpTrace) -> OpCost {
        let OpTrace { kernels, transfers, .. } = traced;
        if source(op) == Source::Block {
            let order = self.order(traced);
            if order.overlaps {
                return order.cost();
            }
        }
        let seconds: f64 = kernels.iter().map(|kernel| self.seconds(kernel)).sum();
        let host = self.host(traced);
        let purpose = Purpose::of(op);
        let copying = transfers.iter().filter_map(|&entry| copying(entry, self.links, purpose)).sum();
        let mut transfers = transfers.iter().filter_map(|&entry| collective(entry, self.links, purpose));
        let cost = if starts_a_transfer(op) {
            OpCost { compute: picoseconds(seconds), links: 0, started: transfers.next() }
        } else {
            let inside = transfers.map(Transfer::duration).fold(0, Time::saturating_add);
            let waiting = (host - seconds - inside as f64 * 1e-12).max(0.0);
            OpCost { compute: picoseconds(seconds + waiting), links: inside, started: None }
        };
        self.sharing.map_or(cost, |sharing| cost.shared(sharing, picoseconds(copying)))
    }

    /// Seconds of the products in the forward of a layer.
    fn products(&self, trace: &Trace) -> f64 {
        let forward = &trace[&Op::Forward { block: Block::Layer(0), micro: 0 }];
        let products =
            forward.kernels.iter().filter(|kernel| matches!(kernel.kind, KernelKind::Product { .. }));
        products.map(|kernel| self.seconds(kernel)).sum()
    }

    /// How many times longer a transfer takes because ranks share cores.
    fn slowdown(&self) -> f64 {
        self.sharing.map_or(1.0, |sharing| sharing.slowdown)
    }

    fn sum(&self, group: Group) -> Transfer {
        let (level, seconds) = self.links.collective(group, Collective::AllReduce, 12.0);
        Transfer::new(level, picoseconds(seconds * self.slowdown()))
    }

    fn messages(&self, bytes: f64) -> Messages {
        let scattered = scatters_messages(self.plan);
        let message = |stage: usize, to: usize| {
            let (level, seconds) = self.links.message(stage, to, bytes, scattered);
            Transfer::new(level, picoseconds(seconds * self.slowdown()))
        };
        let pp = self.plan.mesh.pp;
        (0..pp)
            .map(|stage| [message(stage, (stage + 1) % pp), message(stage, (stage + pp - 1) % pp)])
            .collect()
    }
}

/// Whether each tensor-parallel rank sends one part of a message, and the receivers gather them.
pub(crate) fn scatters_messages(plan: &Plan) -> bool {
    plan.framework.scatter_messages && !plan.sequence_parallel && plan.mesh.tp > 1
}

/// Adds products of the forward that the backward of a layer runs again.
fn repeat_products(ops: &mut HashMap<Op, OpCost>, again: Time) {
    for part in [BackwardPart::Both, BackwardPart::Input] {
        let backward = Op::Backward { block: Block::Layer(0), micro: 0, part };
        if let Some(cost) = ops.get_mut(&backward) {
            cost.compute = cost.compute.saturating_add(again);
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

/// What a transfer is for. Frameworks divide sums of gradients into buckets, and gathers of weights into pieces.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Gradients,
    Weights,
    Other,
}

impl Purpose {
    fn of(op: Op) -> Self {
        match op {
            Op::ReduceStart { .. } => Purpose::Gradients,
            Op::GatherStart { unit: Unit::Layer(_), .. } => Purpose::Weights,
            _ => Purpose::Other,
        }
    }
}

/// The transfer of a collective. Sums of gradients may be made whole, so that every rank gets more than its shard.
fn collective(entry: Entry, links: &Links, purpose: Purpose) -> Option<Transfer> {
    let (collective, bytes) = collective_bytes(entry, links, purpose)?;
    let (level, seconds) = match purpose {
        Purpose::Gradients => links.reduction(entry.group, collective, bytes),
        Purpose::Weights => links.gather(entry.group, collective, bytes),
        Purpose::Other => links.collective(entry.group, collective, bytes),
    };
    let latency = links.emulated_latency(entry.group, collective, bytes).min(seconds);
    Some(Transfer { level, time: picoseconds(seconds - latency), latency: picoseconds(latency) })
}

/// Seconds of a collective without emulated links.
fn copying(entry: Entry, links: &Links, purpose: Purpose) -> Option<f64> {
    let (collective, bytes) = collective_bytes(entry, links, purpose)?;
    Some(links.copying(entry.group, collective, bytes).1)
}

fn collective_bytes(entry: Entry, links: &Links, purpose: Purpose) -> Option<(Collective, f64)> {
    let Movement::Collective(collective) = entry.transfer else { return None };
    let whole = purpose == Purpose::Gradients && collective.sums() && links.whole_sums();
    let collective = if whole { Collective::AllReduce } else { collective };
    let wide = purpose == Purpose::Gradients && links.fp32_sums();
    let width = if wide { entry.dtype.bytes().max(4) } else { entry.dtype.bytes() };
    Some((collective, (entry.len * width) as f64))
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
            let phase = Phase::plain(Group::DATA, PhaseKind::Scatter);
            let op = Op::ReduceStart { unit: Unit::Layer(0), phase };
            CostCache::new(&device).of(&plan).of(0, op).started.expect("it starts a transfer").time
        };
        let (whole, shard) = (sum(true), sum(false));
        assert!(whole > shard && whole <= 2 * shard, "{whole} {shard}");
    }
}
