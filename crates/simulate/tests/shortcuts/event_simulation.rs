//! A plain discrete-event simulation of a step, op by op. It is the reference for the graph.
//!
//! Each stage has one clock for its kernels and one for each level of links that it sends over. All ranks of a stage do
//! the same at the same time, so one stands for all. A transfer begins when it is started and its level is free, and
//! ends after its own duration. A message begins when both sides are ready and the stage's earlier messages over that
//! level are done. It delays the other transfers in flight on that level by its own duration, because another stage
//! waits for the message. Joint operations of several stages (the tied table and the sums over pp) begin when the last
//! stage has arrived.

use std::collections::HashMap;

use kintsugi_plan::{Axis, Group, Message, Op, Program, Unit};
use kintsugi_simulate::cost::{Costs, OpCost, Segment, Time, Transfer};
use kintsugi_spec::Level;

/// How a stage spent its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// In kernels.
    pub compute: Time,
    /// In transfers inside blocks: tensor parallelism.
    pub tensor: Time,
    /// Waiting for transfers of weights and gradients that were started before, by level.
    pub exposed: [Time; 3],
    /// Waiting for other stages, and for messages in flight.
    pub idle: Time,
    /// When it finished.
    pub end: Time,
}

/// Simulates one step.
pub fn simulate(programs: &[Program], costs: &Costs) -> Vec<Account> {
    let mut simulation = EventSimulation {
        costs,
        stages: programs.len(),
        sent: HashMap::new(),
        expected: HashMap::new(),
        joined: HashMap::new(),
    };
    let mut ranks: Vec<Stage> = programs.iter().map(Stage::new).collect();
    let mut moved = true;
    while moved {
        moved = false;
        for rank in &mut ranks {
            moved |= simulation.advance(rank);
        }
    }
    assert!(ranks.iter().all(|rank| rank.next == rank.program.ops.len()), "a schedule that deadlocks");
    ranks.into_iter().map(|rank| Account { end: rank.now, ..rank.account }).collect()
}

/// A stage's progress through its program.
struct Stage<'a> {
    program: &'a Program,
    next: usize,
    now: Time,
    /// When each level becomes free.
    free: [Time; 3],
    /// When the last message on each level ends.
    quiet: [Time; 3],
    pending: HashMap<Pending, (Level, Time)>,
    account: Account,
}

/// A stage's own transfer in flight.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Pending {
    Gather(Unit),
    Reduce(Unit),
    Refresh(Unit),
    Norm,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Joint {
    Tied,
    Sum,
}

struct EventSimulation<'a> {
    costs: &'a Costs,
    stages: usize,
    /// When a message can leave, and how long it takes.
    sent: HashMap<(usize, Message), (Time, Time)>,
    /// When its receiver is ready.
    expected: HashMap<(usize, Message), Time>,
    joined: HashMap<Joint, (usize, Time)>,
}

impl<'a> Stage<'a> {
    fn new(program: &'a Program) -> Self {
        Stage {
            program,
            next: 0,
            now: 0,
            free: [0; 3],
            quiet: [0; 3],
            pending: HashMap::new(),
            account: Account::default(),
        }
    }

    /// Starts a message ahead of waiting transfers and beside one in flight. Returns its start.
    fn send(&mut self, Transfer { level, time, .. }: Transfer) -> Time {
        let (free, quiet) = (&mut self.free[level as usize], &mut self.quiet[level as usize]);
        let begin = self.now.max(*quiet);
        *quiet = begin + time;
        *free = begin.max(*free) + time;
        begin
    }

    /// Starts a transfer as soon as its level is free. It arrives a latency after it has left its level.
    fn start(&mut self, pending: Pending, Transfer { level, time, latency }: Transfer) {
        let end = self.now.max(self.free[level as usize]) + time;
        self.free[level as usize] = end;
        self.pending.insert(pending, (level, end + latency));
    }

    fn wait(&mut self, pending: Pending) {
        let Some((level, end)) = self.pending.remove(&pending) else { return };
        self.account.exposed[level as usize] += end.saturating_sub(self.now);
        self.now = self.now.max(end);
    }

    fn idle_until(&mut self, then: Time) {
        self.account.idle += then.saturating_sub(self.now);
        self.now = self.now.max(then);
    }

    /// Runs kernels, slower while a transfer is in flight, and the transfers between them.
    fn run(&mut self, cost: OpCost, interference: u64) {
        let busy = self.free.iter().map(|free| free.saturating_sub(self.now)).max().unwrap_or(0);
        let slowed = cost.compute + cost.compute.min(busy) * interference / 1024;
        self.now += slowed + cost.links;
        self.account.compute += slowed;
        self.account.tensor += cost.links;
        // Transfers inside the op delay those in flight on the same level.
        if cost.links > 0 && busy > 0 {
            self.free.iter_mut().filter(|free| **free > self.now).for_each(|free| *free += cost.links);
        }
    }
}

impl Stage<'_> {
    /// Runs an op whose transfers run beside its kernels, one after the other on each level. Each delays the transfers
    /// that are in flight on its level.
    fn overlap(&mut self, segments: &[Segment], interference: u64) {
        // The level of each transfer, when it has left the level, and when it arrives.
        let mut ends: Vec<(Level, Time, Time)> = Vec::new();
        for &segment in segments {
            match segment {
                Segment::Run(time) => {
                    let own = ends.iter().map(|&(_, left, _)| left);
                    let last = own.chain(self.free).max().unwrap_or(0);
                    let slowed = time + time.min(last.saturating_sub(self.now)) * interference / 1024;
                    self.now += slowed;
                    self.account.compute += slowed;
                }
                Segment::Start(Transfer { level, time, latency }) => {
                    let before = ends.iter().rfind(|end| end.0 == level).map_or(0, |&(_, left, _)| left);
                    if self.free[level as usize] > self.now {
                        self.free[level as usize] += time;
                    }
                    let left = self.now.max(before) + time;
                    ends.push((level, left, left + latency));
                }
                Segment::Wait(transfer) => {
                    let (_, _, end) = ends[transfer];
                    self.account.tensor += end.saturating_sub(self.now);
                    self.now = self.now.max(end);
                }
            }
        }
    }
}

impl EventSimulation<'_> {
    /// Runs a stage until it must wait for another. Returns whether it made progress.
    fn advance(&mut self, rank: &mut Stage) -> bool {
        let from = rank.next;
        while let Some(&op) = rank.program.ops.get(rank.next) {
            if !self.execute(rank, op) {
                break;
            }
            rank.next += 1;
        }
        rank.next > from
    }

    /// Runs an op. Returns whether everything that it waits for is known.
    fn execute(&mut self, rank: &mut Stage, op: Op) -> bool {
        let stage = rank.program.stage;
        let cost = self.costs.of(stage, op);
        match op {
            Op::SendStart { message } => {
                let sent = self.costs.message(stage, message.kind);
                self.sent.insert((stage, message), (rank.send(sent), sent.duration()));
            }
            Op::ReceiveStart { message } => {
                self.expected.insert(incoming(stage, message), rank.now);
            }
            Op::SendWait { message } => {
                let Some(arrival) = self.arrival((stage, message)) else { return false };
                rank.idle_until(arrival);
            }
            Op::ReceiveWait { message } => {
                let Some(arrival) = self.arrival(incoming(stage, message)) else { return false };
                rank.idle_until(arrival);
            }
            Op::ReduceStart { unit, phase } => {
                rank.run(cost, self.costs.interference());
                if phase.over == Group::Tied {
                    self.join(Joint::Tied, rank.now);
                } else if let Some(transfer) = cost.started {
                    rank.start(Pending::Reduce(unit), transfer);
                }
            }
            Op::ReduceWait { unit, phase } => {
                if phase.over == Group::Tied {
                    let Some(last) = self.complete(Joint::Tied, 2) else { return false };
                    rank.idle_until(last + self.costs.tied().duration());
                } else {
                    rank.wait(Pending::Reduce(unit));
                }
                rank.run(cost, self.costs.interference());
            }
            Op::GatherStart { unit, .. } => {
                rank.run(cost, self.costs.interference());
                if let Some(transfer) = cost.started {
                    rank.start(Pending::Gather(unit), transfer);
                }
            }
            Op::GatherWait { unit, .. } => {
                rank.wait(Pending::Gather(unit));
                rank.run(cost, self.costs.interference());
            }
            Op::RefreshStart { unit, .. } => {
                rank.run(cost, self.costs.interference());
                if let Some(transfer) = cost.started {
                    rank.start(Pending::Refresh(unit), transfer);
                }
            }
            Op::RefreshWait { unit, .. } => {
                rank.wait(Pending::Refresh(unit));
                rank.run(cost, self.costs.interference());
            }
            Op::NormStart { axis: Axis::Pipeline } => self.join(Joint::Sum, rank.now),
            Op::NormStart { axis } => rank.start(Pending::Norm, self.costs.sum(axis)),
            Op::NormWait { axis: Axis::Pipeline } => {
                let Some(last) = self.complete(Joint::Sum, self.stages) else { return false };
                rank.idle_until(last + self.costs.sum(Axis::Pipeline).duration());
            }
            Op::NormWait { .. } => rank.wait(Pending::Norm),
            Op::Begin
            | Op::Load { .. }
            | Op::Forward { .. }
            | Op::Recompute { .. }
            | Op::Backward { .. }
            | Op::Measure
            | Op::Clip
            | Op::Step => match self.costs.order(op).filter(|order| order.overlaps) {
                Some(order) => rank.overlap(&order.segments, self.costs.interference()),
                None => rank.run(cost, self.costs.interference()),
            },
            Op::Release { .. } | Op::Discard { .. } => {}
            Op::Evaluate { .. }
            | Op::Feed { .. }
            | Op::Decode { .. }
            | Op::Choose { .. }
            | Op::ShareStart
            | Op::ShareWait => unreachable!("a training step has no {op}"),
        }
        true
    }

    /// When a message arrives, once both sides have begun.
    fn arrival(&self, key: (usize, Message)) -> Option<Time> {
        let (&(sent, time), &expected) = (self.sent.get(&key)?, self.expected.get(&key)?);
        Some(sent.max(expected) + time)
    }

    fn complete(&self, joint: Joint, stages: usize) -> Option<Time> {
        self.joined.get(&joint).filter(|(count, _)| *count == stages).map(|&(_, last)| last)
    }

    fn join(&mut self, joint: Joint, now: Time) {
        let (count, last) = self.joined.entry(joint).or_insert((0, 0));
        *count += 1;
        *last = (*last).max(now);
    }
}

fn incoming(stage: usize, message: Message) -> (usize, Message) {
    (message.peer, Message { peer: stage, ..message })
}
