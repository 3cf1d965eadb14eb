//! Computes when every node of a graph begins and ends, in whole picoseconds.
//!
//! All ranks of a stage do the same at the same time. So each stage has one clock for its kernels, and one for each
//! level of links that it sends over. A transfer begins when it is started and its level is free. A message begins when
//! both sides are ready and the stage's earlier messages over that level are done. It delays the other transfers over
//! that level, because another stage waits for the message. A joint operation of several stages begins when the last of
//! them is ready.

use std::collections::VecDeque;

use kintsugi_spec::ByLevel;

use super::compile::{Node, Rendezvous, Step};
use super::order::{Graph, Section};
use super::prices::{Prices, RowCost};
use crate::cost::{Costs, OpCost, Segment, Time, TransferCost};

/// The total time of all stages by activity, in picoseconds, and the end of the last stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Account {
    pub end: u128,
    /// In kernels.
    pub compute: u128,
    /// In transfers inside blocks: tensor parallelism.
    pub tensor: u128,
    /// Waiting for transfers of weights and gradients, by level.
    pub exposed: ByLevel<u128>,
    /// Waiting for other stages, and for messages in flight.
    pub idle: u128,
}

impl Account {
    /// This account plus `times` times another.
    pub(crate) fn plus(self, times: usize, other: Account) -> Account {
        let plus = |a: u128, b: u128| a + times as u128 * b;
        Account {
            end: plus(self.end, other.end),
            compute: plus(self.compute, other.compute),
            tensor: plus(self.tensor, other.tensor),
            exposed: std::array::from_fn(|level| plus(self.exposed[level], other.exposed[level])),
            idle: plus(self.idle, other.idle),
        }
    }
}

/// When a transfer ran, in picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeTransfer {
    pub stage: usize,
    /// Number of the op in the stage's program that starts the transfer. For messages and joint operations of several
    /// stages, the op that waits for it.
    pub op: usize,
    /// The number of the transfer in the op.
    pub transfer: usize,
    pub start: u128,
    pub end: u128,
}

/// Records what an evaluation computes.
trait Recorder {
    /// Whether it records anything.
    const ENABLED: bool;
    /// A node ran.
    fn node(&mut self, span: NodeSpan);
    /// A transfer ran.
    fn transfer(&mut self, span: NodeTransfer);
}

/// Records nothing.
struct NoRecord;

impl Recorder for NoRecord {
    const ENABLED: bool = false;

    fn node(&mut self, _: NodeSpan) {}

    fn transfer(&mut self, _: NodeTransfer) {}
}

/// The spans of an evaluation.
#[derive(Default)]
pub(crate) struct Spans {
    pub nodes: Vec<NodeSpan>,
    pub transfers: Vec<NodeTransfer>,
}

impl Recorder for &mut Spans {
    const ENABLED: bool = true;

    fn node(&mut self, span: NodeSpan) {
        self.nodes.push(span);
    }

    fn transfer(&mut self, span: NodeTransfer) {
        self.transfers.push(span);
    }
}

/// When a node of a stage's op ran, in picoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeSpan {
    pub stage: usize,
    /// Number of the op in the stage's program.
    pub op: usize,
    pub start: u128,
    pub end: u128,
}

/// Evaluates a graph for a plan with these costs. Repeated sections run `periods` times.
pub(crate) fn evaluate(graph: &Graph, costs: &Costs, periods: usize) -> Account {
    Evaluation::new(graph, Prices::new(graph, costs, periods), periods, NoRecord).run()
}

/// The same, and records the spans of every node and transfer. `graph` must have a node for every op.
pub(crate) fn spans(graph: &Graph, costs: &Costs) -> (Spans, Account) {
    let mut spans = Spans::default();
    let account = Evaluation::new(graph, Prices::new(graph, costs, 1), 1, &mut spans).run();
    (spans, account)
}

struct Evaluation<'a, R> {
    graph: &'a Graph,
    prices: Prices,
    periods: usize,
    state: State,
    /// Micro-batches by which messages are later than in the short step.
    shift: u32,
    record: R,
}

/// Units of time since the step began.
pub(super) type Moment = u64;

/// The state of an evaluation.
struct State {
    stages: Vec<Clocks>,
    /// The ends of the transfers that stages have started; 0 if there is none.
    transfers: Vec<Moment>,
    /// When the last side of each rendezvous was ready, as a window for each channel; 0 if none is.
    rendezvous: Vec<Moment>,
    spent: Spent,
}

/// The time of all stages so far, by activity. Stages wait at the same time, so the sum of their waits may exceed the
/// sum of all nodes.
#[derive(Clone, Copy, Default)]
struct Spent {
    compute: Moment,
    tensor: Moment,
    exposed: ByLevel<u128>,
}

/// The state at the start of a period.
struct Period {
    begin: Moment,
    spent: Spent,
    relative: Vec<Moment>,
}

/// The clocks of one stage.
#[derive(Clone, Copy, Default)]
struct Clocks {
    now: Moment,
    /// When each level becomes free.
    free: ByLevel<Moment>,
    /// When the last message over each level ends.
    quiet: ByLevel<Moment>,
}

impl<'a, R: Recorder> Evaluation<'a, R> {
    fn new(graph: &'a Graph, prices: Prices, periods: usize, record: R) -> Self {
        let state = State {
            stages: vec![Clocks::default(); graph.stages],
            transfers: vec![0; graph.slots.len()],
            rendezvous: vec![0; graph.channels * graph.window as usize],
            spent: Spent::default(),
        };
        Evaluation { graph, prices, periods, state, shift: 0, record }
    }

    fn run(mut self) -> Account {
        let graph = self.graph;
        for section in &graph.sections {
            if section.repeats {
                self.repeat(section);
            } else {
                self.section(section);
            }
        }
        let State { stages, spent, .. } = self.state;
        let end = u128::from(stages.iter().map(|clocks| clocks.now).max().unwrap_or(0));
        let (compute, tensor) = (u128::from(spent.compute), u128::from(spent.tensor));
        let idle = end * stages.len() as u128 - compute - tensor - spent.exposed.iter().sum::<u128>();
        let in_units = Account { end, compute, tensor, exposed: spent.exposed, idle };
        Account::default().plus(1 << self.prices.unit, in_units)
    }

    /// Runs a section for every period.
    ///
    /// An evaluation only adds durations to times and takes the later of two times. If all times that matter equal
    /// those of an earlier period plus a common shift, everything that follows is shifted by the same amount. So whole
    /// cycles are skipped, exact to the picosecond.
    fn repeat(&mut self, section: &Section) {
        let mut history: VecDeque<Period> = VecDeque::new();
        let mut left = self.periods;
        while left > 0 {
            let period = Period {
                begin: self.state.stages[0].now,
                spent: self.state.spent,
                relative: self.relative(),
            };
            let same = history.iter().rev().position(|earlier| earlier.relative == period.relative);
            if let Some(earlier) = same {
                let length = earlier + 1;
                self.state.skip(&history[history.len() - length], left / length);
                // Less than one cycle remains.
                (0..left % length).for_each(|_| self.period(section));
                break;
            }
            if history.len() == self.graph.cycle {
                history.pop_front();
            }
            history.push_back(period);
            self.period(section);
            left -= 1;
        }
        // The short step contains one period of the section, so its messages keep their numbers after one period.
        self.shift = self.shift.wrapping_sub(self.graph.period);
    }

    fn period(&mut self, section: &Section) {
        self.section(section);
        self.shift = self.shift.wrapping_add(self.graph.period);
    }

    /// All times on which the rest depends, relative to the first stage's clock.
    fn relative(&self) -> Vec<Moment> {
        let State { stages, transfers, rendezvous, .. } = &self.state;
        let base = stages[0].now;
        let mut all = Vec::with_capacity(7 * stages.len() + transfers.len() + rendezvous.len());
        for &Clocks { now, free, quiet } in stages {
            all.push(now.wrapping_sub(base));
            // A level that became free earlier behaves like one that becomes free now.
            all.extend(free.iter().chain(&quiet).map(|&moment| moment.max(now).wrapping_sub(base)));
        }
        let end = |(&end, &stage): (&Moment, &u16)| match end {
            0 => 0,
            end => end.max(stages[usize::from(stage)].now).wrapping_sub(base),
        };
        all.extend(transfers.iter().zip(&self.graph.slots).map(end));
        let window = self.graph.window;
        for channel in rendezvous.chunks(window as usize) {
            let in_order =
                (0..window).map(|micro| channel[(micro.wrapping_add(self.shift) & (window - 1)) as usize]);
            all.extend(in_order.map(|moment| if moment == 0 { 0 } else { moment.wrapping_sub(base) }));
        }
        all
    }

    fn section(&mut self, section: &Section) {
        let mut steps = section.steps.as_slice();
        for &(stage, count) in &section.turns {
            let (turn, others) = steps.split_at(count as usize);
            steps = others;
            let stage = usize::from(stage);
            let mut clocks = self.state.stages[stage];
            for &Step { node, op } in turn {
                let start = clocks.now;
                self.node(stage, &mut clocks, node, op as usize);
                let in_picoseconds = |moment: Moment| u128::from(moment) << self.prices.unit;
                let (start, end) = (in_picoseconds(start), in_picoseconds(clocks.now));
                self.record.node(NodeSpan { stage, op: op as usize, start, end });
            }
            self.state.stages[stage] = clocks;
        }
    }

    fn node(&mut self, stage: usize, clocks: &mut Clocks, node: Node, op: usize) {
        let Evaluation { graph, prices, state, shift, record, .. } = self;
        let mut transfer = |transfer: usize, start: Moment, end: Moment| {
            let [start, end] = [start, end].map(|moment| u128::from(moment) << prices.unit);
            record.transfer(NodeTransfer { stage, op, transfer, start, end });
        };
        let slot = |Rendezvous { channel, micro }: Rendezvous| {
            let in_window = micro.wrapping_add(*shift) & (graph.window - 1);
            usize::from(channel) * graph.window as usize + in_window as usize
        };
        match node {
            Node::Run(row) => {
                let RowCost { compute, links, overlaps } = prices.rows[usize::from(row)];
                let start = clocks.now;
                let kinds = graph.rows[usize::from(row)].iter().map(|&kind| usize::from(kind));
                if !overlaps && ((prices.interference == 0 && links == 0) || !clocks.sends()) {
                    clocks.now += compute + links;
                    state.spent.compute += compute;
                    state.spent.tensor += links;
                } else {
                    for kind in kinds.clone() {
                        match &prices.orders[kind] {
                            Some(order) if order.overlaps => {
                                let segments = &order.segments;
                                clocks.overlap(
                                    segments,
                                    prices.interference,
                                    &mut state.spent,
                                    &mut transfer,
                                );
                            }
                            _ => clocks.run(prices.kinds[kind], prices.interference, &mut state.spent),
                        }
                    }
                }
                if R::ENABLED && !overlaps {
                    let order = kinds.clone().find_map(|kind| prices.orders[kind].as_ref());
                    if let Some(order) = order {
                        order.place(start, clocks.now, &mut transfer);
                    }
                }
            }
            Node::RunStep(op) => {
                clocks.run(prices.step_ops[stage][op as usize], prices.interference, &mut state.spent);
            }
            Node::Start { cost, slot } => {
                if let Some(started) = prices.transfers[usize::from(cost)] {
                    let end = clocks.start(started);
                    state.transfers[slot as usize] = end;
                    transfer(0, end - started.duration(), end);
                }
            }
            Node::Wait { cost, slot } => {
                let end = std::mem::take(&mut state.transfers[slot as usize]);
                if let Some(TransferCost { level, .. }) = prices.transfers[usize::from(cost)] {
                    state.spent.exposed[level] += u128::from(end.saturating_sub(clocks.now));
                    clocks.now = clocks.now.max(end);
                }
            }
            Node::Send { rendezvous, first } => {
                let begin = clocks.send(prices.channels[usize::from(rendezvous.channel)]);
                let ready = &mut state.rendezvous[slot(rendezvous)];
                *ready = if first { begin } else { begin.max(*ready) };
            }
            Node::Join { rendezvous, first } => {
                let ready = &mut state.rendezvous[slot(rendezvous)];
                *ready = if first { clocks.now } else { clocks.now.max(*ready) };
            }
            Node::Arrive { rendezvous, last } => {
                let ready = &mut state.rendezvous[slot(rendezvous)];
                let arrival = *ready + prices.channels[usize::from(rendezvous.channel)].duration();
                transfer(0, *ready, arrival);
                clocks.now = clocks.now.max(arrival);
                if last {
                    *ready = 0;
                }
            }
        }
    }
}

impl Clocks {
    /// Whether a transfer is in flight.
    fn sends(&self) -> bool {
        self.free.iter().any(|&free| free > self.now)
    }

    /// Runs kernels, slower while a transfer is in flight, and the transfers between them.
    fn run(&mut self, cost: OpCost, interference: u64, spent: &mut Spent) {
        let OpCost { mut compute, links, .. } = cost;
        if interference > 0 {
            let busy = self.free.iter().map(|free| free.saturating_sub(self.now)).max().unwrap_or(0);
            compute += (u128::from(compute.min(busy)) * u128::from(interference) / 1024) as Time;
        }
        self.now += compute + links;
        spent.compute += compute;
        spent.tensor += links;
        // The transfers inside the op delay those in flight.
        if links > 0 {
            self.free.iter_mut().filter(|free| **free > self.now).for_each(|free| *free += links);
        }
    }

    /// Runs an op whose transfers run beside its kernels. They have a stream of their own and delay those in flight on
    /// their level. Calls `transfer` with the number, start and end of each.
    fn overlap(
        &mut self,
        segments: &[Segment],
        interference: u64,
        spent: &mut Spent,
        mut transfer: impl FnMut(usize, Moment, Moment),
    ) {
        let mut stream: ByLevel<Moment> = ByLevel::default();
        let mut ends: Vec<Moment> = Vec::new();
        for &segment in segments {
            match segment {
                Segment::Run(time) => {
                    let until = self.free.iter().chain(&stream).copied().max().unwrap_or(0);
                    let busy = until.saturating_sub(self.now);
                    let slower = u128::from(time.min(busy)) * u128::from(interference) / 1024;
                    self.now += time + slower as Time;
                    spent.compute += time + slower as Time;
                }
                Segment::Start(TransferCost { level, time, latency }) => {
                    let (stream, free) = (&mut stream[level], &mut self.free[level]);
                    let begin = self.now.max(*stream);
                    *stream = begin + time;
                    if *free > self.now {
                        *free += time;
                    }
                    transfer(ends.len(), begin, *stream + latency);
                    ends.push(*stream + latency);
                }
                Segment::Wait(number) => {
                    spent.tensor += ends[number].saturating_sub(self.now);
                    self.now = self.now.max(ends[number]);
                }
            }
        }
    }

    /// Starts a transfer as soon as its level is free. Returns when it arrives.
    fn start(&mut self, TransferCost { level, time, latency }: TransferCost) -> Moment {
        let free = &mut self.free[level];
        *free = self.now.max(*free) + time;
        *free + latency
    }

    /// Starts a message ahead of waiting transfers and beside one in flight. Returns its start.
    fn send(&mut self, TransferCost { level, time, .. }: TransferCost) -> Moment {
        let (free, quiet) = (&mut self.free[level], &mut self.quiet[level]);
        let begin = self.now.max(*quiet);
        *quiet = begin + time;
        *free = begin.max(*free) + time;
        begin
    }
}

impl State {
    /// Advances by `cycles` times the change since `earlier`.
    fn skip(&mut self, earlier: &Period, cycles: usize) {
        let later = cycles as Moment * (self.stages[0].now - earlier.begin);
        for Clocks { now, free, quiet } in &mut self.stages {
            std::iter::once(now).chain(free).chain(quiet).for_each(|moment| *moment += later);
        }
        let pending = self.transfers.iter_mut().chain(&mut self.rendezvous);
        pending.filter(|moment| **moment > 0).for_each(|moment| *moment += later);
        let (now, then) = (&mut self.spent, earlier.spent);
        now.compute += cycles as Moment * (now.compute - then.compute);
        now.tensor += cycles as Moment * (now.tensor - then.tensor);
        for (now, then) in now.exposed.iter_mut().zip(then.exposed) {
            *now += cycles as u128 * (*now - then);
        }
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::StepOp;
    use kintsugi_spec::Level;

    use super::*;

    /// One stage whose only op runs a product in two halves. The sum over each half starts after it, and both are
    /// awaited at the end.
    #[test]
    fn transfers_inside_a_block_run_beside_its_kernels() {
        let nodes = [
            Node::Run(0),
            Node::Start { cost: 0, slot: 0 },
            Node::Run(0),
            Node::Start { cost: 0, slot: 1 },
            Node::Wait { cost: 0, slot: 0 },
            Node::Wait { cost: 0, slot: 1 },
        ];
        let steps: Vec<Step> = nodes.iter().map(|&node| Step { node, op: 0 }).collect();
        let turns = vec![(0, steps.len() as u32)];
        let graph = Graph {
            sections: vec![Section { steps, turns, repeats: false }],
            kinds: Vec::new(),
            rows: vec![vec![0]],
            stages: 1,
            slots: vec![0, 0],
            channels: 0,
            window: 1,
            period: 1,
            cycle: 1,
        };
        let (half, sum) = (10, 7);
        let prices = Prices {
            unit: 0,
            kinds: vec![OpCost { compute: half, links: 0, started: None }],
            orders: vec![None],
            rows: vec![RowCost { compute: half, links: 0, overlaps: false }],
            step_ops: vec![[OpCost::default(); StepOp::ALL.len()]],
            transfers: vec![Some(TransferCost::new(Level::Node, sum))],
            channels: Vec::new(),
            interference: 0,
        };
        let mut spans = Spans::default();
        let account = Evaluation::new(&graph, prices, 1, &mut spans).run();
        let spans: Vec<_> = spans.nodes.iter().map(|span| (span.start, span.end)).collect();
        // The first sum ends before the second half, so only the second sum is waited for.
        assert_eq!(spans, [(0, 10), (10, 10), (10, 20), (20, 20), (20, 20), (20, 27)]);
        let exposed = Level::ALL.map(|level| if level == Level::Node { 7 } else { 0 });
        assert_eq!(account, Account { end: 27, compute: 20, tensor: 0, exposed, idle: 0 });
    }
}
