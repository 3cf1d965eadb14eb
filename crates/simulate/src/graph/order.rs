//! One order for the nodes of all stages: every stage advances until it must wait for another.
//!
//! The dependencies between stages do not depend on durations. So an order in which every node follows those that it
//! waits for is computed once, and an evaluation is a single pass over an array.

use std::ops::Range;

use kintsugi_plan::{OpKind, Plan};

use super::compile::{Extent, GraphNodes, Node, Rendezvous, Rows, Step, compile};
use super::period::repeated;

/// The nodes of a step, or of a short step that represents longer ones.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(super) sections: Vec<Section>,
    pub(super) kinds: Vec<OpKind>,
    pub(super) rows: Vec<Vec<u16>>,
    pub(super) stages: usize,
    /// The stage of each slot for a transfer of a stage's own.
    pub(super) slots: Vec<u16>,
    pub(super) channels: usize,
    /// A power of two that is at least the number of consecutive micro-batches with an open rendezvous in a channel.
    pub(super) window: u32,
    /// Micro-batches of one period.
    pub(super) period: u32,
    /// How many earlier periods are compared with the current one. A longer cycle is evaluated in full.
    pub(super) cycle: usize,
}

/// Nodes that are evaluated in sequence.
#[derive(Debug)]
pub(super) struct Section {
    pub steps: Vec<Step>,
    /// Runs of steps in the section: a stage, and the number of its steps.
    pub turns: Vec<(u16, u32)>,
    /// Whether longer steps repeat this section.
    pub repeats: bool,
}

impl Graph {
    /// The graph of a whole step.
    pub(crate) fn whole(plan: &Plan, extent: Extent, rows: Rows) -> Graph {
        let compiled = compile(plan, extent, rows);
        Graph::new(plan, compiled, &[])
            .unwrap_or_else(|error| panic!("a schedule without an order: {error:?}"))
    }

    /// The graph of a short step with the section that longer ones repeat. Without such a section it represents only
    /// itself.
    pub(crate) fn short(plan: &Plan, extent: Extent) -> Graph {
        let compiled = compile(plan, extent, Rows::Merged);
        let ranges = repeated(plan, &compiled);
        Graph::new(plan, compiled, &ranges).unwrap_or_else(|_| Graph::whole(plan, extent, Rows::Merged))
    }

    /// Whether there is a section that longer steps repeat.
    pub(crate) fn repeats(&self) -> bool {
        self.sections.iter().any(|section| section.repeats)
    }

    fn new(plan: &Plan, compiled: GraphNodes, ranges: &[Vec<Range<usize>>]) -> Result<Graph, OrderError> {
        let mut order = Order::new(plan, &compiled);
        let mut sections = Vec::new();
        for range in ranges {
            sections.push(order.section(|stage| range[stage].start, false)?);
            let before = order.open(plan.period() as u32);
            sections.push(order.section(|stage| range[stage].end, true)?);
            if order.open(0) != before {
                return Err(OrderError::GrowsWithPeriods);
            }
        }
        sections.push(order.section(|stage| compiled.stages[stage].steps.len(), false)?);
        let window = order.channels.iter().map(|channel| channel.widest).max().unwrap_or(1);
        Ok(Graph {
            sections,
            stages: compiled.stages.len(),
            slots: compiled.slots,
            channels: compiled.sides.len(),
            window: window.next_power_of_two(),
            period: plan.period() as u32,
            // A delay that passes through all stages returns after this many micro-batches.
            cycle: (plan.mesh.pp() / plan.period()).max(2),
            kinds: compiled.kinds,
            rows: compiled.rows,
        })
    }
}

/// Why nodes have no order, or no repeating section.
#[derive(Debug)]
#[expect(dead_code, reason = "shown by its Debug in a panic")]
enum OrderError {
    /// These stages wait for each other.
    Deadlock(Vec<usize>),
    /// Each period ends with more unfinished messages than the previous one.
    GrowsWithPeriods,
}

struct Order<'a> {
    compiled: &'a GraphNodes,
    /// The next step of each stage.
    next: Vec<usize>,
    /// Stages that may be able to advance.
    ready: Vec<usize>,
    channels: Vec<Channel>,
    steps: Vec<Step>,
    turns: Vec<(u16, u32)>,
}

/// The progress of each message or joint operation of one channel.
#[derive(Clone, Default)]
struct Channel {
    /// Indexed by micro-batch.
    open: Vec<Progress>,
    /// The first open rendezvous.
    first: u32,
    /// The largest number of open rendezvous, counted from the first to the last.
    widest: u32,
}

#[derive(Clone, Default)]
struct Progress {
    joined: usize,
    arrived: usize,
    waiting: Vec<usize>,
}

impl<'a> Order<'a> {
    fn new(plan: &Plan, compiled: &'a GraphNodes) -> Self {
        let channel = Channel { open: vec![Progress::default(); plan.micro_batches()], first: 0, widest: 1 };
        Order {
            compiled,
            next: vec![0; compiled.stages.len()],
            ready: Vec::new(),
            channels: vec![channel; compiled.sides.len()],
            steps: Vec::new(),
            turns: Vec::new(),
        }
    }

    /// Advances every stage to its limit. Fails if stages wait for nodes beyond it.
    fn section(&mut self, limit: impl Fn(usize) -> usize, repeats: bool) -> Result<Section, OrderError> {
        let stages = self.compiled.stages.len();
        self.ready.extend((0..stages).rev());
        while let Some(stage) = self.ready.pop() {
            self.advance(stage, limit(stage));
        }
        let stuck: Vec<usize> = (0..stages).filter(|&stage| self.next[stage] < limit(stage)).collect();
        if !stuck.is_empty() {
            return Err(OrderError::Deadlock(stuck));
        }
        Ok(Section {
            steps: std::mem::take(&mut self.steps),
            turns: std::mem::take(&mut self.turns),
            repeats,
        })
    }

    /// The open rendezvous, shifted by `later` micro-batches: channel, micro-batch, and progress.
    fn open(&self, later: u32) -> Vec<(usize, u32, usize, usize)> {
        let of_channel = |(number, channel): (usize, &Channel)| {
            let sides = self.compiled.sides[number];
            let open = channel.open.iter().enumerate().skip(channel.first as usize);
            let under_way = open.filter(move |(_, progress)| progress.joined > 0 && progress.arrived < sides);
            under_way
                .map(move |(micro, at)| (number, micro as u32 + later, at.joined, at.arrived))
                .collect::<Vec<_>>()
        };
        self.channels.iter().enumerate().flat_map(of_channel).collect()
    }

    /// Advances a stage until it must wait for another.
    fn advance(&mut self, stage: usize, limit: usize) {
        let (compiled, before) = (self.compiled, self.steps.len());
        for &step in &compiled.stages[stage].steps[self.next[stage]..limit] {
            let node = match step.node {
                Node::Send { rendezvous, .. } => Node::Send { rendezvous, first: self.join(rendezvous) },
                Node::Join { rendezvous, .. } => Node::Join { rendezvous, first: self.join(rendezvous) },
                Node::Arrive { rendezvous, .. } => match self.arrive(rendezvous, stage) {
                    Some(last) => Node::Arrive { rendezvous, last },
                    None => break,
                },
                Node::Run(_) | Node::RunStep(_) | Node::Start { .. } | Node::Wait { .. } => step.node,
            };
            self.steps.push(Step { node, ..step });
            self.next[stage] += 1;
        }
        self.turns.push((stage as u16, (self.steps.len() - before) as u32));
    }

    /// Marks one side as ready. Returns whether it is the first.
    fn join(&mut self, Rendezvous { channel, micro }: Rendezvous) -> bool {
        let sides = self.compiled.sides[usize::from(channel)];
        let channel = &mut self.channels[usize::from(channel)];
        channel.widest = channel.widest.max(micro + 1 - channel.first);
        let progress = &mut channel.open[micro as usize];
        progress.joined += 1;
        if progress.joined == sides {
            self.ready.append(&mut progress.waiting);
        }
        progress.joined == 1
    }

    /// Marks that one side has waited. Returns whether it is the last. `None` if a side is not ready yet.
    fn arrive(&mut self, Rendezvous { channel, micro }: Rendezvous, stage: usize) -> Option<bool> {
        let sides = self.compiled.sides[usize::from(channel)];
        let channel = &mut self.channels[usize::from(channel)];
        let progress = &mut channel.open[micro as usize];
        if progress.joined < sides {
            progress.waiting.push(stage);
            return None;
        }
        progress.arrived += 1;
        let last = progress.arrived == sides;
        while channel.open.get(channel.first as usize).is_some_and(|progress| progress.arrived == sides) {
            channel.first += 1;
        }
        Some(last)
    }
}
