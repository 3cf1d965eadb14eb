//! Plays codes against clocks: what `time::play` does with programs, without a name or a map in its way.

use std::cell::RefCell;

use kintsugi_plan::Axis;

use super::code::{CUTS, Code, Codes};
use super::table::{Table, Transfer};
use crate::time::{Account, Spent, Time, Totals, totals};

/// A step of as many micro-batches as there are codes for.
pub(super) struct Played {
    pub totals: Totals,
    /// What one more period adds, in the forwards and, where these are apart, in the backwards; `None` if the last
    /// periods differ, so that it is not known.
    pub period: Option<Totals>,
}

/// Plays the codes.
pub(super) fn play(codes: &Codes, table: &Table) -> Played {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.clear(codes);
        Player { codes, table, scratch, tied: (0, 0), sum: (0, 0) }.run()
    })
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Room that is used again from play to play.
#[derive(Default)]
struct Scratch {
    stages: Vec<Stage>,
    messages: Vec<Message>,
    /// When each stage's own transfers end, a row for each stage.
    transfers: Vec<Transfer>,
}

#[derive(Clone, Copy)]
struct Message {
    /// When it can leave.
    sent: Time,
    /// How long it travels.
    time: Time,
    /// When its receiver has made room.
    expected: Time,
}

/// Not yet known.
const UNKNOWN: Time = Time::MAX;

#[derive(Clone, Default)]
struct Stage {
    next: usize,
    now: Time,
    free: [Time; 3],
    account: Account,
    /// The time and the account at the beginning of each marked period, by phase.
    cuts: [[Account; CUTS]; 2],
    seen: [usize; 2],
}

impl Scratch {
    fn clear(&mut self, codes: &Codes) {
        self.stages.clear();
        self.stages.resize(codes.stages.len(), Stage::default());
        self.messages.clear();
        self.messages.resize(codes.messages, Message { sent: UNKNOWN, time: 0, expected: UNKNOWN });
        self.transfers.clear();
        self.transfers.resize(codes.stages.len() * codes.transfers, NONE);
    }
}

/// No transfer.
const NONE: Transfer = (kintsugi_spec::Level::Package, 0);

struct Player<'a> {
    codes: &'a Codes,
    table: &'a Table,
    scratch: &'a mut Scratch,
    /// How many stages have joined, and when the last did.
    tied: (usize, Time),
    sum: (usize, Time),
}

impl Player<'_> {
    fn run(mut self) -> Played {
        let stages = self.codes.stages.len();
        let mut moved = true;
        while moved {
            moved = false;
            // Activations go down the stages, gradients up: each way is gone in one sweep.
            for stage in (0..stages).chain((0..stages).rev()) {
                moved |= self.advance(stage);
            }
        }
        let ended = |(stage, codes): (&Stage, &Vec<Code>)| stage.next == codes.len();
        assert!(self.scratch.stages.iter().zip(&self.codes.stages).all(ended), "a schedule that deadlocks");
        let accounts: Vec<Account> =
            self.scratch.stages.iter().map(|stage| Account { end: stage.now, ..stage.account }).collect();
        Played { totals: totals(&accounts), period: period(&self.scratch.stages) }
    }

    /// Runs a stage until it must wait for another; whether it got anywhere.
    fn advance(&mut self, number: usize) -> bool {
        let codes = &self.codes.stages[number];
        let from = self.scratch.stages[number].next;
        let mut next = from;
        while let Some(&code) = codes.get(next) {
            if !self.execute(number, code) {
                break;
            }
            next += 1;
        }
        self.scratch.stages[number].next = next;
        next > from
    }

    /// Runs a code; whether what it waits for is known.
    #[inline]
    fn execute(&mut self, number: usize, code: Code) -> bool {
        let (table, interference) = (self.table, self.table.units.interference);
        let stage = &mut self.scratch.stages[number];
        let first = number * self.codes.transfers;
        let transfers = &mut self.scratch.transfers[first..first + self.codes.transfers];
        match code {
            Code::Run(kind) => stage.run(table.kinds[usize::from(kind)], interference),
            Code::Whole(i) => stage.run(table.units.whole[number][usize::from(i)], interference),
            Code::Start(kind, transfer) => {
                let spent = table.kinds[usize::from(kind)];
                stage.run(spent, interference);
                transfers[usize::from(transfer)] = spent.started.map_or(NONE, |started| stage.start(started));
            }
            Code::StartOnly(kind, transfer) => {
                let started = table.kinds[usize::from(kind)].started;
                transfers[usize::from(transfer)] = started.map_or(NONE, |started| stage.start(started));
            }
            Code::StartSum(axis, transfer) => {
                transfers[usize::from(transfer)] = stage.start(table.units.sums[sum_of(axis)]);
            }
            Code::Wait(transfer) => stage.wait(transfers[usize::from(transfer)]),
            Code::WaitRun(kind, transfer) => {
                stage.wait(transfers[usize::from(transfer)]);
                stage.run(table.kinds[usize::from(kind)], interference);
            }
            Code::SendActivation(message) => {
                self.scratch.messages[message as usize].send(stage, table.messages[number][0]);
            }
            Code::SendGradient(message) => {
                self.scratch.messages[message as usize].send(stage, table.messages[number][1]);
            }
            Code::Expect(message) => self.scratch.messages[message as usize].expected = stage.now,
            Code::Arrive(message) => {
                let message = self.scratch.messages[message as usize];
                if message.sent == UNKNOWN || message.expected == UNKNOWN {
                    return false;
                }
                stage.idle_until(message.sent.max(message.expected) + message.time);
            }
            Code::JoinTied(kind) => {
                stage.run(table.kinds[usize::from(kind)], interference);
                self.tied = (self.tied.0 + 1, self.tied.1.max(stage.now));
            }
            Code::WaitTied(kind) => {
                if self.tied.0 < 2 {
                    return false;
                }
                stage.idle_until(self.tied.1 + table.units.tied.1);
                stage.run(table.kinds[usize::from(kind)], interference);
            }
            Code::JoinSum => self.sum = (self.sum.0 + 1, self.sum.1.max(stage.now)),
            Code::WaitSum => {
                if self.sum.0 < self.codes.stages.len() {
                    return false;
                }
                stage.idle_until(self.sum.1 + table.units.sums[sum_of(Axis::Pipeline)].1);
            }
            Code::Cut(phase) => {
                let phase = phase as usize;
                stage.cuts[phase][stage.seen[phase]] = Account { end: stage.now, ..stage.account };
                stage.seen[phase] += 1;
            }
        }
        true
    }
}

/// What one more period adds to all stages, if the last ones add the same: as many as there are stages and one more, since
/// a message may be under way for so long, and only then have all that are under way kept step too.
fn period(stages: &[Stage]) -> Option<Totals> {
    let alike = (stages.len() + 1).min(CUTS - 1);
    let phases = usize::from(stages[0].seen[0] > 0) + usize::from(stages[0].seen[1] > 0);
    let mut sum = [0; 7];
    for phase in 0..phases {
        let mut length = None;
        for stage in stages {
            if stage.seen[phase] < CUTS {
                return None;
            }
            let cuts = &stage.cuts[phase][CUTS - 1 - alike..];
            let last = change(cuts[alike - 1], cuts[alike]);
            let differs = cuts.windows(2).any(|pair| change(pair[0], pair[1]) != last);
            if differs || length.is_some_and(|length| length != last[0]) {
                return None;
            }
            length = Some(last[0]);
            sum.iter_mut().zip(last).skip(1).for_each(|(sum, change)| *sum += change);
        }
        sum[0] += length.unwrap_or(0);
    }
    (phases > 0).then_some(Totals(sum))
}

/// What was spent between two moments, in the order of [`Totals`].
fn change(before: Account, after: Account) -> [Time; 7] {
    let list = |a: Account| [a.end, a.compute, a.tensor, a.exposed[0], a.exposed[1], a.exposed[2], a.idle];
    let (before, after) = (list(before), list(after));
    std::array::from_fn(|i| after[i] - before[i])
}

fn sum_of(axis: Axis) -> usize {
    match axis {
        Axis::Pipeline => 0,
        Axis::Data => 1,
        Axis::Tensor => 2,
    }
}

impl Message {
    #[inline]
    fn send(&mut self, stage: &mut Stage, (level, time): Transfer) {
        self.sent = stage.now.max(stage.free[level as usize]);
        self.time = time;
        stage.free[level as usize] = self.sent + time;
    }
}

impl Stage {
    /// Begins a transfer as soon as its level is free; when it ends.
    #[inline]
    fn start(&mut self, (level, time): Transfer) -> Transfer {
        let end = self.now.max(self.free[level as usize]) + time;
        self.free[level as usize] = end;
        (level, end)
    }

    #[inline]
    fn wait(&mut self, (level, end): Transfer) {
        self.account.exposed[level as usize] += end.saturating_sub(self.now);
        self.now = self.now.max(end);
    }

    #[inline]
    fn idle_until(&mut self, then: Time) {
        self.account.idle += then.saturating_sub(self.now);
        self.now = self.now.max(then);
    }

    /// Runs kernels, slower while a transfer goes on beside them, and the transfers between them.
    #[inline]
    fn run(&mut self, spent: Spent, interference: u64) {
        let busy = self.free.iter().map(|free| free.saturating_sub(self.now)).max().unwrap_or(0);
        let slowed = spent.compute + spent.compute.min(busy) * interference / 1024;
        self.now += slowed + spent.links;
        self.account.compute += slowed;
        self.account.tensor += spent.links;
        // What the transfers inside the op take of a level is missing to what goes on beside it.
        if spent.links > 0 && busy > 0 {
            self.free.iter_mut().filter(|free| **free > self.now).for_each(|free| *free += spent.links);
        }
    }
}
