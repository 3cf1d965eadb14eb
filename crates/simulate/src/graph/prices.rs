//! The costs of a plan in the form in which an evaluation looks them up.

use kintsugi_plan::{Axis, MessageKind, Op, StepOp};

use super::compile::Node;
use super::evaluate::Moment;
use super::order::{Graph, Section};
use crate::cost::{Costs, OpCost, OpOrder, Segment, Time, TransferCost};

/// The costs of a plan, indexed by the numbers in the nodes. Times are in units of 2ⁿ picoseconds.
pub(super) struct Prices {
    /// n: 0, unless the step takes months.
    pub unit: u32,
    pub kinds: Vec<OpCost>,
    /// The order of the ops of a kind, if transfers are inside.
    pub orders: Vec<Option<OpOrder>>,
    pub rows: Vec<RowCost>,
    pub step_ops: Vec<[OpCost; StepOp::ALL.len()]>,
    /// The transfer that the ops of a kind start, if any.
    pub transfers: Vec<Option<TransferCost>>,
    pub channels: Vec<TransferCost>,
    /// How much slower kernels are beside a transfer, in 1/1024.
    pub interference: u64,
}

/// The total cost of the ops of a row.
#[derive(Clone, Copy)]
pub(super) struct RowCost {
    pub compute: Time,
    pub links: Time,
    /// Whether transfers inside the ops run beside their kernels.
    pub overlaps: bool,
}

impl Prices {
    pub fn new(graph: &Graph, costs: &Costs, periods: usize) -> Self {
        let bounds = Bounds::new(graph, costs);
        let unit = bounds.unit(graph, periods);
        let coarse = |cost: OpCost| OpCost {
            compute: cost.compute >> unit,
            links: cost.links >> unit,
            started: cost.started.map(|transfer| coarse_transfer(transfer, unit)),
        };
        let kinds: Vec<OpCost> = graph.kinds.iter().map(|kind| coarse(costs.of(0, kind.op()))).collect();
        let coarse_order = |order: &OpOrder| {
            let segment = |&segment: &Segment| match segment {
                Segment::Run(time) => Segment::Run(time >> unit),
                Segment::Start(transfer) => Segment::Start(coarse_transfer(transfer, unit)),
                Segment::Wait(transfer) => Segment::Wait(transfer),
            };
            OpOrder { segments: order.segments.iter().map(segment).collect(), overlaps: order.overlaps }
        };
        let orders: Vec<Option<OpOrder>> =
            graph.kinds.iter().map(|kind| costs.order(kind.op()).map(coarse_order)).collect();
        let row = |row: &Vec<u16>| {
            let costs = || row.iter().map(|&kind| kinds[usize::from(kind)]);
            let overlaps =
                |&kind: &u16| orders[usize::from(kind)].as_ref().is_some_and(|order| order.overlaps);
            RowCost {
                compute: costs().map(|cost| cost.compute).sum(),
                links: costs().map(|cost| cost.links).sum(),
                overlaps: row.iter().any(overlaps),
            }
        };
        let step_ops = |stage| StepOp::ALL.map(|op| coarse(costs.of(stage, Op::Step(op))));
        Prices {
            unit,
            rows: graph.rows.iter().map(row).collect(),
            step_ops: (0..graph.stages).map(step_ops).collect(),
            transfers: kinds.iter().map(|cost| cost.started).collect(),
            channels: channels(graph, costs)
                .into_iter()
                .map(|channel| coarse_transfer(channel, unit))
                .collect(),
            interference: costs.interference(),
            kinds,
            orders,
        }
    }
}

/// A transfer in units of 2ⁿ picoseconds.
fn coarse_transfer(TransferCost { level, time, latency }: TransferCost, unit: u32) -> TransferCost {
    TransferCost { level, time: time >> unit, latency: latency >> unit }
}

/// Upper bounds of the times of nodes, in picoseconds.
struct Bounds {
    rows: Vec<u128>,
    step_ops: [u128; StepOp::ALL.len()],
    transfers: Vec<u128>,
    channels: Vec<u128>,
}

impl Bounds {
    fn new(graph: &Graph, costs: &Costs) -> Self {
        let slowest = 1024 + u128::from(costs.interference());
        let bound = |cost: OpCost| u128::from(cost.compute) * slowest / 1024 + u128::from(cost.links);
        let kinds: Vec<OpCost> = graph.kinds.iter().map(|kind| costs.of(0, kind.op())).collect();
        let row = |row: &Vec<u16>| row.iter().map(|&kind| bound(kinds[usize::from(kind)])).sum();
        let of_stages =
            |op| (0..graph.stages).map(|stage| bound(costs.of(stage, Op::Step(op)))).max().unwrap_or(0);
        Bounds {
            rows: graph.rows.iter().map(row).collect(),
            step_ops: StepOp::ALL.map(of_stages),
            transfers: kinds.iter().map(|cost| cost.started.map_or(0, |of| of.duration().into())).collect(),
            channels: channels(graph, costs).into_iter().map(|channel| channel.duration().into()).collect(),
        }
    }

    /// The n of a unit of 2ⁿ picoseconds in which no clock overflows. No step takes longer than all of its nodes one
    /// after the other.
    fn unit(&self, graph: &Graph, periods: usize) -> u32 {
        let sum = |of: &dyn Fn(&Section) -> u128| -> u128 {
            let times = |section: &Section| if section.repeats { periods as u128 } else { 1 };
            graph.sections.iter().map(|section| times(section) * of(section)).sum()
        };
        let overflow = |most: u128| (u128::BITS - most.leading_zeros()).saturating_sub(Moment::BITS - 1);
        let all = self.rows.iter().chain(&self.step_ops).chain(&self.transfers).chain(&self.channels);
        let longest = all.copied().max().unwrap_or(0);
        // A rough bound is enough for most steps.
        if overflow(sum(&|section| section.steps.len() as u128 * longest)) == 0 {
            return 0;
        }
        overflow(sum(&|section| section.steps.iter().map(|step| self.of(step.node)).sum()))
    }

    fn of(&self, node: Node) -> u128 {
        match node {
            Node::Run(row) => self.rows[usize::from(row)],
            Node::RunStep(op) => self.step_ops[op as usize],
            Node::Start { cost, .. } => self.transfers[usize::from(cost)],
            Node::Send { rendezvous, .. } | Node::Arrive { rendezvous, .. } => {
                self.channels[usize::from(rendezvous.channel)]
            }
            Node::Wait { .. } | Node::Join { .. } => 0,
        }
    }
}

/// The transfer of each channel: activations into every chunk, gradients, the tied table and the sum over stages.
fn channels(graph: &Graph, costs: &Costs) -> Vec<TransferCost> {
    let (chunks, stages) = ((graph.channels - 2) / 2, graph.stages);
    // Chunks are assigned to stages round-robin: activations come from the stage before, gradients from the one after.
    let activations =
        (0..chunks).map(|chunk| costs.message((chunk + stages - 1) % stages, MessageKind::Activation));
    let gradients = (0..chunks).map(|chunk| costs.message((chunk + 1) % stages, MessageKind::Gradient));
    activations.chain(gradients).chain([costs.tied(), costs.sum(Axis::Pipeline)]).collect()
}
