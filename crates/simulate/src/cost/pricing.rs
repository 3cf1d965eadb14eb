//! Prices the kernels and transfers of traces: kernels by the device, transfers by the links.

use std::collections::HashMap;
use std::sync::Arc;

use kintsugi_comm::Collective;
use kintsugi_comm::paper::{Entry, Transfer as PaperTransfer};
use kintsugi_plan::{
    Axis, BackwardPart, Block, Computation, Group, Op, OpKind, Phase, PhaseKind, Plan, Recompute, Span,
    StepOp, Transfer, Unit,
};
use kintsugi_spec::{FrameworkSpec, Level};
use kintsugi_tensor::paper::{Kernel, KernelKind};

use super::costs::{BlockCosts, CostSource, Costs, Messages, UnitCosts, source};
use super::device::DeviceModel;
use super::links::{LinkTime, Links};
use super::op_cost::{OpCost, OpOrder, Segment, Time, TransferCost, picoseconds};
use super::sharing::Sharing;
use super::trace::{OpTrace, PlanTraces, Trace};

impl Costs {
    /// Prices the kernels and transfers of a plan's traces, over the links of its mesh.
    pub(crate) fn new(plan: &Plan, traced: &PlanTraces, device: &DeviceModel, links: &Links) -> Self {
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
        let layers: Vec<usize> = (0..plan.mesh.pp()).map(|stage| plan.trained_layers(stage)).collect();
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
    fn ops(&self, trace: &Trace) -> HashMap<OpKind, OpCost> {
        trace.iter().map(|(&kind, traced)| (kind, self.op(kind.op(), traced))).collect()
    }

    /// The order of the ops on blocks that have transfers inside.
    fn orders<'a>(&'a self, trace: &'a Trace) -> impl Iterator<Item = (OpKind, OpOrder)> + 'a {
        let inside = |(kind, traced): &(&OpKind, &OpTrace)| {
            source(kind.op()) == CostSource::Block && !traced.transfers.is_empty()
        };
        trace.iter().filter(inside).map(|(&kind, traced)| (kind, self.order(traced)))
    }

    /// Seconds of a kernel. The loss may be over the whole vocabulary on every tensor-parallel rank.
    fn seconds(&self, kernel: &Kernel) -> f64 {
        let whole = self.plan.framework.whole_logits && kernel.name == "cross entropy";
        self.device.seconds(kernel) * if whole { self.plan.mesh.tp() as f64 } else { 1.0 }
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
                let time = link_time(transfers[event.transfer], self.links, TransferPurpose::Other);
                let transfer = time.map_or(TransferCost::new(Level::Package, 0), TransferCost::over);
                // A rank that shares its core copies the data itself.
                let copying = self.sharing.and(time).map_or(0.0, |time| time.copying);
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
        if source(op) == CostSource::Block {
            let order = self.order(traced);
            if order.overlaps {
                return order.cost();
            }
        }
        let seconds: f64 = kernels.iter().map(|kernel| self.seconds(kernel)).sum();
        let host = self.host(traced);
        let times =
            || transfers.iter().filter_map(|&entry| link_time(entry, self.links, TransferPurpose::of(op)));
        let mut transfers = times().map(TransferCost::over);
        let cost = if starts_a_collective(op) {
            OpCost { compute: picoseconds(seconds), links: 0, started: transfers.next() }
        } else {
            let inside = transfers.map(TransferCost::duration).fold(0, Time::saturating_add);
            let waiting = (host - seconds - inside as f64 * 1e-12).max(0.0);
            OpCost { compute: picoseconds(seconds + waiting), links: inside, started: None }
        };
        let copying = || picoseconds(times().map(|time| time.copying).sum());
        self.sharing.map_or(cost, |sharing| cost.shared(sharing, copying()))
    }

    /// Seconds of the products in the forward of a layer.
    fn products(&self, trace: &Trace) -> f64 {
        let forward = &trace[&of_layer(Computation::Forward)];
        let products =
            forward.kernels.iter().filter(|kernel| matches!(kernel.kind, KernelKind::Product { .. }));
        products.map(|kernel| self.seconds(kernel)).sum()
    }

    /// How many times longer a rank takes because ranks share cores.
    fn slowdown(&self) -> f64 {
        self.sharing.map_or(1.0, |sharing| sharing.slowdown)
    }

    /// The cost of a transfer beside the kernels of an op. Its ranks share cores while they copy data, but not for the rest, which
    /// is time on emulated links.
    fn beside_kernels(&self, LinkTime { level, seconds, copying, latency }: LinkTime) -> TransferCost {
        let rest = seconds - copying;
        let latency = latency.min(rest);
        let time = copying * self.slowdown() + rest - latency;
        TransferCost { level, time: picoseconds(time), latency: picoseconds(latency) }
    }

    /// A sum of a few numbers over a group.
    fn sum(&self, group: Group) -> TransferCost {
        self.beside_kernels(self.links.collective(group, Collective::AllReduce, 12.0))
    }

    /// Messages of these bytes from each stage to the next one and to the one before.
    fn messages(&self, bytes: f64) -> Messages {
        let scattered = scatters_messages(self.plan);
        let message = |stage, to| self.beside_kernels(self.links.message(stage, to, bytes, scattered));
        let pp = self.plan.mesh.pp();
        (0..pp)
            .map(|stage| [message(stage, (stage + 1) % pp), message(stage, (stage + pp - 1) % pp)])
            .collect()
    }
}

impl TransferCost {
    /// Of a transfer over links.
    fn over(LinkTime { level, seconds, latency, .. }: LinkTime) -> Self {
        let latency = latency.min(seconds);
        TransferCost { level, time: picoseconds(seconds - latency), latency: picoseconds(latency) }
    }
}

/// A computation of any layer.
fn of_layer(computation: Computation) -> OpKind {
    computation.on(Block::Layer(0), 0).kind()
}

/// Whether each tensor-parallel rank sends one part of a message, and the receivers gather them.
pub(crate) fn scatters_messages(plan: &Plan) -> bool {
    plan.framework.scatter_messages && !plan.sequence_parallel && plan.mesh.tp() > 1
}

/// Adds products of the forward that the backward of a layer runs again.
fn repeat_products(ops: &mut HashMap<OpKind, OpCost>, again: Time) {
    for part in [BackwardPart::Both, BackwardPart::Input, BackwardPart::Frozen] {
        if let Some(cost) = ops.get_mut(&of_layer(Computation::Backward(part))) {
            cost.compute = cost.compute.saturating_add(again);
        }
    }
}

/// Seconds of the host for each collective of tp.
fn host_collective(plan: &Plan) -> f64 {
    let staged = plan.mesh.pp() > 1 && plan.cluster.topology.per_node.is_some_and(|n| plan.mesh.ranks() > n);
    let FrameworkSpec { host_collective, host_staged, .. } = plan.framework;
    plan.mesh.tp() as f64 * if staged { host_staged } else { host_collective }
}

/// Whether an op only starts a collective.
fn starts_a_collective(op: Op) -> bool {
    matches!(op, Op::Start(transfer) if transfer.group().is_some())
}

/// What a transfer is for. Frameworks divide sums of gradients into buckets, and gathers of weights into pieces.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TransferPurpose {
    Gradients,
    Weights,
    Other,
}

impl TransferPurpose {
    fn of(op: Op) -> Self {
        match op {
            Op::Start(Transfer::Reduce { .. }) => TransferPurpose::Gradients,
            Op::Start(Transfer::Gather { unit: Unit::Layer(_), .. }) => TransferPurpose::Weights,
            _ => TransferPurpose::Other,
        }
    }
}

/// The time of a transfer inside an op, or that an op starts; `None` for messages between stages. Sums of gradients may be made
/// whole, so that every rank gets more than its shard, and in fp32.
fn link_time(entry: Entry, links: &Links, purpose: TransferPurpose) -> Option<LinkTime> {
    let (group, width) = (entry.group, entry.dtype.bytes());
    let collective = match entry.transfer {
        PaperTransfer::Collective(collective) => collective,
        // Keys, or their gradients, that pass around the ranks of cp.
        PaperTransfer::Send { .. } if group == Group::CONTEXT => {
            return Some(links.shift(group, (entry.len * width) as f64));
        }
        PaperTransfer::Send { .. } | PaperTransfer::Receive { .. } => return None,
    };
    let bytes = |width: usize| (entry.len * width) as f64;
    Some(match purpose {
        TransferPurpose::Gradients => {
            let whole = collective.sums() && links.whole_sums;
            let collective = if whole { Collective::AllReduce } else { collective };
            links.reduction(group, collective, bytes(if links.fp32_sums { width.max(4) } else { width }))
        }
        TransferPurpose::Weights => links.gather(group, collective, bytes(width)),
        TransferPurpose::Other => links.collective(group, collective, bytes(width)),
    })
}

/// Bytes of a message between stages, as the first stage sends it.
fn message_bytes(first: &Trace) -> f64 {
    let sends = first.iter().filter(|(kind, _)| matches!(kind.op(), Op::Start(Transfer::Send(_))));
    let entries = sends.flat_map(|(_, traced)| &traced.transfers);
    entries.map(|entry| (entry.len * entry.dtype.bytes()) as f64).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;
    use crate::StepTimer;

    #[test]
    fn a_whole_sum_takes_up_to_twice_a_shard_of_it() {
        let file = "[model]\npreset = \"demo\"\n[cluster]\npreset = \"h100\"\n\
                    [parallel]\ndp = 16\n[batch]\nglobal = 16\nmicro = 1\n[sharding]\nzero = 1";
        let sum = |whole: bool| {
            let plan = ConfigSource::text(file).set(format!("framework.whole_sums={whole}")).plan().unwrap();
            let device = DeviceModel::new(&plan.cluster.device, &plan.framework).unwrap();
            let phase = Phase::plain(Group::DATA, PhaseKind::Scatter);
            let op = Op::Start(Transfer::Reduce { unit: Unit::Layer(0), phase });
            StepTimer::new(&device).costs(&plan).of(0, op).started.expect("it starts a transfer").time
        };
        let (whole, shard) = (sum(true), sum(false));
        assert!(whole > shard && whole <= 2 * shard, "{whole} {shard}");
    }
}
