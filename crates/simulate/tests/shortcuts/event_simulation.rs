//! A plain discrete-event simulation of a step, op by op. It is the reference for the graph.
//!
//! Each stage has one clock for its kernels and one for each level of links that it sends over. All ranks of a stage do
//! the same at the same time, so one stands for all. A transfer begins when it is started and its level is free, and
//! ends after its own duration. A message begins when both sides are ready and the stage's earlier messages over that
//! level are done. It delays the other transfers in flight on that level by its own duration, because another stage
//! waits for the message. Joint operations of several stages (the tied table and the sums over pp) begin when the last
//! stage has arrived.

use std::collections::HashMap;
use std::mem::{Discriminant, discriminant};

use kintsugi_plan::{Axis, Group, Message, Op, Program, Transfer, Unit};
use kintsugi_simulate::cost::{Costs, OpCost, Segment, Time, TransferCost};
use kintsugi_spec::{ByLevel, Level};

/// How a stage spent its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// In kernels.
    pub compute: Time,
    /// In transfers inside blocks: tensor parallelism.
    pub tensor: Time,
    /// Waiting for transfers of weights and gradients that were started before, by level.
    pub exposed: ByLevel<Time>,
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
    free: ByLevel<Time>,
    /// When the last message on each level ends.
    quiet: ByLevel<Time>,
    pending: HashMap<Pending, (Level, Time)>,
    account: Account,
}

/// A stage's own transfer in flight. It has at most one of each kind for a unit.
type Pending = (Discriminant<Transfer>, Option<Unit>);

fn pending(transfer: Transfer) -> Pending {
    (discriminant(&transfer), transfer.unit())
}

/// A transfer of several stages.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Joint {
    Tied,
    Sum,
}

impl Joint {
    fn of(transfer: Transfer) -> Option<Self> {
        match transfer.group()? {
            Group::Tied => Some(Joint::Tied),
            Group::Along(axis, _) => (axis == Axis::Pipeline).then_some(Joint::Sum),
            Group::Nodes => None,
        }
    }
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
            free: ByLevel::default(),
            quiet: ByLevel::default(),
            pending: HashMap::new(),
            account: Account::default(),
        }
    }

    /// Starts a message ahead of waiting transfers and beside one in flight. Returns its start.
    fn send(&mut self, TransferCost { level, time, .. }: TransferCost) -> Time {
        let (free, quiet) = (&mut self.free[level], &mut self.quiet[level]);
        let begin = self.now.max(*quiet);
        *quiet = begin + time;
        *free = begin.max(*free) + time;
        begin
    }

    /// Starts a transfer as soon as its level is free. It arrives a latency after it has left its level.
    fn start(&mut self, pending: Pending, TransferCost { level, time, latency }: TransferCost) {
        let end = self.now.max(self.free[level]) + time;
        self.free[level] = end;
        self.pending.insert(pending, (level, end + latency));
    }

    fn wait(&mut self, pending: Pending) {
        let Some((level, end)) = self.pending.remove(&pending) else { return };
        self.account.exposed[level] += end.saturating_sub(self.now);
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
                Segment::Start(TransferCost { level, time, latency }) => {
                    let before = ends.iter().rfind(|end| end.0 == level).map_or(0, |&(_, left, _)| left);
                    if self.free[level] > self.now {
                        self.free[level] += time;
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
        let cost = self.costs.of(rank.program.stage, op);
        match op {
            Op::Start(transfer) => self.start(rank, transfer, cost),
            Op::Wait(transfer) => return self.wait(rank, transfer, cost),
            Op::Step(_) | Op::Load { .. } | Op::Compute { .. } | Op::Matrices { .. } => {
                match self.costs.order(op).filter(|order| order.overlaps) {
                    Some(order) => rank.overlap(&order.segments, self.costs.interference()),
                    None => rank.run(cost, self.costs.interference()),
                }
            }
            Op::Release { .. } | Op::Discard { .. } => {}
            Op::Feed { .. } | Op::Choose { .. } => unreachable!("a training step has no {op}"),
        }
        true
    }

    fn start(&mut self, rank: &mut Stage, transfer: Transfer, cost: OpCost) {
        let stage = rank.program.stage;
        if transfer.unit().is_some() {
            rank.run(cost, self.costs.interference());
        }
        match (transfer, Joint::of(transfer)) {
            (Transfer::Send(message), _) => {
                let sent = self.costs.message(stage, message.kind);
                self.sent.insert((stage, message), (rank.send(sent), sent.duration()));
            }
            (Transfer::Receive(message), _) => _ = self.expected.insert(incoming(stage, message), rank.now),
            (_, Some(joint)) => self.join(joint, rank.now),
            (_, None) => {
                if let Some(started) = cost.started {
                    rank.start(pending(transfer), started);
                }
            }
        }
    }

    fn wait(&mut self, rank: &mut Stage, transfer: Transfer, cost: OpCost) -> bool {
        let stage = rank.program.stage;
        let arrival = match (transfer, Joint::of(transfer)) {
            (Transfer::Send(message), _) => self.arrival((stage, message)),
            (Transfer::Receive(message), _) => self.arrival(incoming(stage, message)),
            (_, Some(joint)) => self.complete(joint),
            (_, None) => {
                rank.wait(pending(transfer));
                Some(rank.now)
            }
        };
        let Some(arrival) = arrival else { return false };
        rank.idle_until(arrival);
        if transfer.unit().is_some() {
            rank.run(cost, self.costs.interference());
        }
        true
    }

    /// When a message arrives, once both sides have begun.
    fn arrival(&self, key: (usize, Message)) -> Option<Time> {
        let (&(sent, time), &expected) = (self.sent.get(&key)?, self.expected.get(&key)?);
        Some(sent.max(expected) + time)
    }

    /// When a joint operation ends, once all of its stages have begun.
    fn complete(&self, joint: Joint) -> Option<Time> {
        let (stages, cost) = match joint {
            Joint::Tied => (2, self.costs.tied()),
            Joint::Sum => (self.stages, self.costs.sum(Axis::Pipeline)),
        };
        let &(count, last) = self.joined.get(&joint)?;
        (count == stages).then(|| last + cost.duration())
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
