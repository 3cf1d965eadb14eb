//! Plays codes against clocks: what `time::play` does with programs, without a name or a map in its way, and without
//! playing what `steady` can tell.

use std::cell::RefCell;

use kintsugi_plan::Axis;

use super::code::{Code, Name};
use super::loops::{Codes, Loop};
use super::stage::{Pending, Stage};
use super::steady::{Alike, Trace, account_after};
use super::table::Table;
use crate::time::{Account, Spent, Time, Totals, totals};

/// Plays the codes, what repeats so many times; `None` if the stages cannot get to the end of a repetition together.
pub(super) fn play(codes: &Codes, table: &Table, repetitions: usize) -> Option<Totals> {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.begin(codes, table);
        Player { codes, table, scratch, tied: (0, 0), sum: (0, 0) }.run(repetitions)
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
    transfers: Vec<Pending>,
    /// What the ops take together that are run in a row.
    runs: Vec<Spent>,
    /// Stages that may get further.
    ready: Vec<usize>,
    trace: Trace,
    /// How many plays there have been: what is left of an earlier one is told by its number.
    plays: u32,
}

/// A message between stages.
#[derive(Clone, Copy, Default)]
struct Message {
    /// When it can leave, and when its receiver has made room.
    sides: [Side; 2],
    /// How long it travels.
    time: Time,
    /// The play and the stage that waits for it.
    waiting: (u32, u32),
}

const SENT: usize = 0;
const EXPECTED: usize = 1;

/// What one side of a message has done, and when.
#[derive(Clone, Copy, Default)]
struct Side {
    at: Time,
    /// The play and the micro-batch that this is about.
    key: u64,
}

impl Scratch {
    fn begin(&mut self, codes: &Codes, table: &Table) {
        self.plays += 1;
        self.ready.clear();
        self.stages.clear();
        self.stages.resize(codes.stages.len(), Stage::default());
        let messages = codes.rows * codes.ring;
        if self.messages.len() < messages {
            self.messages.resize(messages, Message::default());
        }
        self.transfers.clear();
        self.transfers.resize(codes.stages.len() * codes.transfers, Pending::default());
        self.runs.clear();
        let plus = |sum: Spent, &kind: &u8| sum.plus(table.kinds[usize::from(kind)]);
        self.runs.extend(codes.rows_of_runs.iter().map(|kinds| kinds.iter().fold(Spent::default(), plus)));
        self.trace.make_room(codes.stages.len(), 1);
    }
}

struct Player<'a> {
    codes: &'a Codes,
    table: &'a Table,
    scratch: &'a mut Scratch,
    /// How many stages have joined, and when the last did.
    tied: (usize, Time),
    sum: (usize, Time),
}

impl Player<'_> {
    fn run(mut self, repetitions: usize) -> Option<Totals> {
        let codes = self.codes;
        for part in &codes.loops {
            self.until::<false>(|stage| part.spans[stage].start)?;
            self.repeat(part, repetitions)?;
        }
        self.until::<false>(|stage| codes.stages[stage].len())?;
        let account = |stage: &Stage| Account { end: stage.now, ..stage.account };
        Some(totals(&self.scratch.stages.iter().map(account).collect::<Vec<_>>()))
    }

    /// Plays a part over and over, all stages together, and skips what can be told.
    fn repeat(&mut self, part: &Loop, mut left: usize) -> Option<()> {
        let clear = |trace: &mut Trace| trace.clear(part.spans.len(), self.codes.cycle, part.age);
        clear(&mut self.scratch.trace);
        loop {
            let Scratch { stages, transfers, trace, .. } = &mut *self.scratch;
            trace.begin(stages, part.transfers.then_some(transfers));
            self.until::<true>(|stage| part.spans[stage].end)?;
            left -= 1;
            if let Some(Alike { cycle, times }) = self.scratch.trace.alike() {
                let times = times.min(left / cycle);
                self.skip(part, cycle, times as u64);
                left -= times * cycle;
                clear(&mut self.scratch.trace);
            }
            if left == 0 {
                return Some(());
            }
            for (stage, span) in self.scratch.stages.iter_mut().zip(&part.spans) {
                stage.next = span.start;
                part.kinds.clone().for_each(|kind| stage.later[kind] += self.codes.period);
            }
        }
    }

    /// Moves everything on by cycles in which everything advances as much as in the last.
    fn skip(&mut self, part: &Loop, cycle: usize, times: u64) {
        let Scratch { stages, transfers, trace, messages, plays, .. } = &mut *self.scratch;
        // What is left of messages that nobody waits for any more is moved too, to wherever that is.
        let on = |now: &mut Time, before: Time| {
            *now = now.wrapping_add(times.wrapping_mul(now.wrapping_sub(before)));
        };
        let own = self.codes.transfers;
        for (number, stage) in stages.iter_mut().enumerate() {
            let (one, ends, two) = trace.before(number, cycle);
            on(&mut stage.now, one.now);
            stage.free.iter_mut().zip(one.free).for_each(|(now, before)| on(now, before));
            stage.account = account_after([&stage.account, &one.account, two], times);
            transfers[number * own..]
                .iter_mut()
                .zip(ends)
                .for_each(|(now, &before)| on(&mut now.end, before));
        }
        let (ring, period) = (self.codes.ring, cycle as u64 * u64::from(self.codes.period));
        let of_kind = self.codes.rows / 2 * ring;
        let moved = part.kinds.start * of_kind..part.kinds.end * of_kind;
        for row in messages[moved].chunks_mut(ring) {
            let before: Vec<[Side; 2]> = row.iter().map(|message| message.sides).collect();
            for (side, kind) in
                row.iter_mut().flat_map(|message| message.sides.iter_mut().zip([SENT, EXPECTED]))
            {
                let one = before[side.key.wrapping_sub(period) as usize & (ring - 1)][kind];
                if side.key >> 32 == u64::from(*plays) && one.key + period == side.key {
                    on(&mut side.at, one.at);
                }
            }
        }
    }

    /// Plays every stage up to its limit; `None` if they wait for what comes after it.
    fn until<const TRACED: bool>(&mut self, limit: impl Fn(usize) -> usize) -> Option<()> {
        let stages = self.codes.stages.len();
        self.scratch.ready.extend((0..stages).rev());
        while let Some(stage) = self.scratch.ready.pop() {
            self.advance::<TRACED>(stage, limit(stage));
        }
        (0..stages).all(|stage| self.scratch.stages[stage].next == limit(stage)).then_some(())
    }

    /// Runs a stage until it must wait for another.
    fn advance<const TRACED: bool>(&mut self, number: usize, limit: usize) {
        let (codes, table, interference) = (self.codes, self.table, self.table.units.interference);
        let Scratch { stages, transfers, messages, runs, ready, trace, plays } = &mut *self.scratch;
        let count = stages.len();
        let mut stage = stages[number];
        let transfers = &mut transfers[number * codes.transfers..][..codes.transfers];
        let mut decisions = trace.decisions::<TRACED>(number, interference > 0);
        let play = u64::from(*plays) << 32;
        let named = |later: [u32; 2], Name { row, micro }: Name| {
            let micro = micro + later[usize::from(usize::from(row) >= codes.rows / 2)];
            let place = usize::from(row) * codes.ring + (micro as usize & (codes.ring - 1));
            (place, play | u64::from(micro))
        };
        for &code in &codes.stages[number][stage.next..limit] {
            match code {
                Code::Run(kind) => stage.run(table.kinds[usize::from(kind)], interference, &mut decisions),
                Code::RunAll(row) => {
                    let row = usize::from(row);
                    let each = codes.rows_of_runs[row].iter().map(|&kind| table.kinds[usize::from(kind)]);
                    stage.run_all(runs[row], each, interference, &mut decisions);
                }
                Code::Whole(i) => {
                    stage.run(table.units.whole[number][usize::from(i)], interference, &mut decisions);
                }
                Code::Start(kind, i) => {
                    let spent = table.kinds[usize::from(kind)];
                    stage.run(spent, interference, &mut decisions);
                    transfers[usize::from(i)] = stage.start(spent.started, &mut decisions);
                }
                Code::StartOnly(kind, i) => {
                    let started = table.kinds[usize::from(kind)].started;
                    transfers[usize::from(i)] = stage.start(started, &mut decisions);
                }
                Code::StartSum(axis, i) => {
                    transfers[usize::from(i)] =
                        stage.start(Some(table.units.sums[sum_of(axis)]), &mut decisions);
                }
                Code::Wait(i) => stage.wait(transfers[usize::from(i)], &mut decisions),
                Code::WaitRun(kind, i) => {
                    stage.wait(transfers[usize::from(i)], &mut decisions);
                    stage.run(table.kinds[usize::from(kind)], interference, &mut decisions);
                }
                Code::SendActivation(name) | Code::SendGradient(name) => {
                    let way = usize::from(matches!(code, Code::SendGradient(_)));
                    let (level, time) = table.messages[number][way];
                    let (place, key) = named(stage.later, name);
                    messages[place].time = time;
                    messages[place].done(
                        SENT,
                        Side { at: stage.occupy(level, time, &mut decisions), key },
                        ready,
                    );
                }
                Code::Expect(name) => {
                    let (place, key) = named(stage.later, name);
                    messages[place].done(EXPECTED, Side { at: stage.now, key }, ready);
                }
                Code::Arrive(name) => {
                    let (place, key) = named(stage.later, name);
                    let message = &mut messages[place];
                    let [sent, expected] = message.sides;
                    if sent.key != key || expected.key != key {
                        message.waiting = (*plays, number as u32);
                        break;
                    }
                    let begin = decisions.later(sent.at, expected.at);
                    stage.idle_until(begin + message.time, &mut decisions);
                }
                Code::JoinTied(kind) => {
                    stage.run(table.kinds[usize::from(kind)], interference, &mut decisions);
                    self.tied = (self.tied.0 + 1, self.tied.1.max(stage.now));
                    ready.extend(0..count);
                }
                Code::WaitTied(kind) => {
                    if self.tied.0 < 2 {
                        break;
                    }
                    stage.idle_until(self.tied.1 + table.units.tied.1, &mut decisions);
                    stage.run(table.kinds[usize::from(kind)], interference, &mut decisions);
                }
                Code::JoinSum => {
                    self.sum = (self.sum.0 + 1, self.sum.1.max(stage.now));
                    if self.sum.0 == count {
                        ready.extend(0..count);
                    }
                }
                Code::WaitSum => {
                    if self.sum.0 < count {
                        break;
                    }
                    stage.idle_until(self.sum.1 + table.units.sums[sum_of(Axis::Pipeline)].1, &mut decisions);
                }
            }
            stage.next += 1;
        }
        stages[number] = stage;
    }
}

fn sum_of(axis: Axis) -> usize {
    match axis {
        Axis::Pipeline => 0,
        Axis::Data => 1,
        Axis::Tensor => 2,
    }
}

impl Message {
    /// One side has done its part: the other may be waiting for that.
    #[inline]
    fn done(&mut self, kind: usize, side: Side, ready: &mut Vec<usize>) {
        self.sides[kind] = side;
        if u64::from(self.waiting.0) == side.key >> 32 {
            ready.push(self.waiting.1 as usize);
            self.waiting.0 = 0;
        }
    }
}
