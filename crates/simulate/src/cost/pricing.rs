//! Prices the kernels and transfers of traces: kernels by the device, transfers by the links.

use std::collections::HashMap;

use kintsugi_comm::Collective;
use kintsugi_comm::paper::{Entry, Transfer as PaperTransfer};
use kintsugi_plan::{BackwardPart, Block, Computation, Group, Op, OpKind, Plan, Transfer, Unit};
use kintsugi_spec::{FrameworkSpec, Level};
use kintsugi_tensor::paper::{Kernel, KernelKind};

use super::costs::{CostSource, Messages, source};
use super::device::DeviceModel;
use super::links::Links;
use super::op_cost::{OpCost, OpOrder, Segment, Time, TransferCost, picoseconds};
use super::sharing::Sharing;
use super::trace::{OpTrace, Trace};

/// Computes costs from traces.
pub(super) struct Pricing<'a> {
    pub(super) plan: &'a Plan,
    pub(super) device: &'a DeviceModel,
    pub(super) links: &'a Links,
    /// Seconds of the host for each collective of tp.
    pub(super) host_collective: f64,
    pub(super) sharing: Option<Sharing>,
}

impl Pricing<'_> {
    pub(super) fn ops(&self, trace: &Trace) -> HashMap<OpKind, OpCost> {
        trace.iter().map(|(&kind, traced)| (kind, self.op(kind.op(), traced))).collect()
    }

    /// The order of the ops on blocks that have transfers inside.
    pub(super) fn orders<'a>(&'a self, trace: &'a Trace) -> impl Iterator<Item = (OpKind, OpOrder)> + 'a {
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
                let entry = transfers[event.transfer];
                let at_once = TransferCost::new(Level::Package, 0);
                let transfer = collective(entry, self.links, TransferPurpose::Other).unwrap_or(at_once);
                // A rank that shares its core copies the data itself.
                let copying = self
                    .sharing
                    .and_then(|_| copying(entry, self.links, TransferPurpose::Other))
                    .unwrap_or(0.0);
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
        let purpose = TransferPurpose::of(op);
        let copying = transfers.iter().filter_map(|&entry| copying(entry, self.links, purpose)).sum();
        let mut transfers = transfers.iter().filter_map(|&entry| collective(entry, self.links, purpose));
        let cost = if starts_a_collective(op) {
            OpCost { compute: picoseconds(seconds), links: 0, started: transfers.next() }
        } else {
            let inside = transfers.map(TransferCost::duration).fold(0, Time::saturating_add);
            let waiting = (host - seconds - inside as f64 * 1e-12).max(0.0);
            OpCost { compute: picoseconds(seconds + waiting), links: inside, started: None }
        };
        self.sharing.map_or(cost, |sharing| cost.shared(sharing, picoseconds(copying)))
    }

    /// Seconds of the products in the forward of a layer.
    pub(super) fn products(&self, trace: &Trace) -> f64 {
        let forward = &trace[&of_layer(Computation::Forward)];
        let products =
            forward.kernels.iter().filter(|kernel| matches!(kernel.kind, KernelKind::Product { .. }));
        products.map(|kernel| self.seconds(kernel)).sum()
    }

    /// How many times longer a rank takes because ranks share cores.
    fn slowdown(&self) -> f64 {
        self.sharing.map_or(1.0, |sharing| sharing.slowdown)
    }

    /// A transfer of which the ranks copy data for `copying` seconds. They share cores for that, but not for the rest, which is
    /// time on emulated links and ends with `latency`.
    fn beside_copies(&self, (level, seconds): (Level, f64), copying: f64, latency: f64) -> TransferCost {
        let rest = seconds - copying;
        let latency = latency.min(rest);
        let time = copying * self.slowdown() + rest - latency;
        TransferCost { level, time: picoseconds(time), latency: picoseconds(latency) }
    }

    pub(super) fn sum(&self, group: Group) -> TransferCost {
        let (all, bytes) = (Collective::AllReduce, 12.0);
        let copying = self.links.copying(group, all, bytes).1;
        let latency = self.links.emulated_latency(group, all, bytes);
        self.beside_copies(self.links.collective(group, all, bytes), copying, latency)
    }

    pub(super) fn messages(&self, bytes: f64) -> Messages {
        let scattered = scatters_messages(self.plan);
        let message = |stage: usize, to: usize| {
            let copying = self.links.copying_message(stage, to, bytes, scattered).1;
            let latency = self.links.emulated_latency_of_message(stage, to, bytes, scattered);
            self.beside_copies(self.links.message(stage, to, bytes, scattered), copying, latency)
        };
        let pp = self.plan.mesh.pp();
        (0..pp)
            .map(|stage| [message(stage, (stage + 1) % pp), message(stage, (stage + pp - 1) % pp)])
            .collect()
    }
}

/// A computation of any layer.
pub(super) fn of_layer(computation: Computation) -> OpKind {
    computation.on(Block::Layer(0), 0).kind()
}

/// Whether each tensor-parallel rank sends one part of a message, and the receivers gather them.
pub(crate) fn scatters_messages(plan: &Plan) -> bool {
    plan.framework.scatter_messages && !plan.sequence_parallel && plan.mesh.tp() > 1
}

/// Adds products of the forward that the backward of a layer runs again.
pub(super) fn repeat_products(ops: &mut HashMap<OpKind, OpCost>, again: Time) {
    for part in [BackwardPart::Both, BackwardPart::Input] {
        if let Some(cost) = ops.get_mut(&of_layer(Computation::Backward(part))) {
            cost.compute = cost.compute.saturating_add(again);
        }
    }
}

/// Seconds of the host for each collective of tp.
pub(super) fn host_collective(plan: &Plan) -> f64 {
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

/// The transfer of a collective. Sums of gradients may be made whole, so that every rank gets more than its shard.
fn collective(entry: Entry, links: &Links, purpose: TransferPurpose) -> Option<TransferCost> {
    if let Some(bytes) = shift_bytes(entry) {
        let (level, seconds) = links.shift(entry.group, bytes);
        let latency = links.emulated_latency_of_shift(entry.group, bytes);
        return Some(TransferCost {
            level,
            time: picoseconds(seconds - latency),
            latency: picoseconds(latency),
        });
    }
    let (collective, bytes) = collective_bytes(entry, links, purpose)?;
    let (level, seconds) = match purpose {
        TransferPurpose::Gradients => links.reduction(entry.group, collective, bytes),
        TransferPurpose::Weights => links.gather(entry.group, collective, bytes),
        TransferPurpose::Other => links.collective(entry.group, collective, bytes),
    };
    let latency = links.emulated_latency(entry.group, collective, bytes).min(seconds);
    Some(TransferCost { level, time: picoseconds(seconds - latency), latency: picoseconds(latency) })
}

/// Seconds of a collective without emulated links.
fn copying(entry: Entry, links: &Links, purpose: TransferPurpose) -> Option<f64> {
    if let Some(bytes) = shift_bytes(entry) {
        return Some(links.copying_shift(entry.group, bytes).1);
    }
    let (collective, bytes) = collective_bytes(entry, links, purpose)?;
    Some(links.copying(entry.group, collective, bytes).1)
}

/// Bytes of a message inside a block: keys, or their gradients, that pass around the ranks of cp.
fn shift_bytes(entry: Entry) -> Option<f64> {
    let inside = entry.group == Group::CONTEXT && matches!(entry.transfer, PaperTransfer::Send { .. });
    inside.then(|| (entry.len * entry.dtype.bytes()) as f64)
}

fn collective_bytes(entry: Entry, links: &Links, purpose: TransferPurpose) -> Option<(Collective, f64)> {
    let PaperTransfer::Collective(collective) = entry.transfer else { return None };
    let whole = purpose == TransferPurpose::Gradients && collective.sums() && links.whole_sums();
    let collective = if whole { Collective::AllReduce } else { collective };
    let wide = purpose == TransferPurpose::Gradients && links.fp32_sums();
    let width = if wide { entry.dtype.bytes().max(4) } else { entry.dtype.bytes() };
    Some((collective, (entry.len * width) as f64))
}

/// Bytes of a message between stages, as the first stage sends it.
pub(super) fn message_bytes(first: &Trace) -> f64 {
    let sends = first.iter().filter(|(kind, _)| matches!(kind.op(), Op::Start(Transfer::Send(_))));
    let entries = sends.flat_map(|(_, traced)| &traced.transfers);
    entries.map(|entry| (entry.len * entry.dtype.bytes()) as f64).fold(0.0, f64::max)
}
