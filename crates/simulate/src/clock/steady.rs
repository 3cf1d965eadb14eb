//! When a repetition can be told from the ones before it, and how many.
//!
//! All that a play decides is which of two moments is the later one. As long as every such decision falls the same way,
//! each moment of a repetition is some moment of the one before, or of the few before that, plus a constant. So once
//! all moments have advanced equally from repetition to repetition, they go on doing so, each at its own pace, until
//! the two moments of some decision have come so close that it falls the other way. How far apart they are, and how
//! fast they come closer, says how many repetitions that takes: so many can be skipped, to the picosecond.

use super::stage::{Pending, Stage};
use crate::time::{Account, Time};

/// What the last repetitions decided.
#[derive(Default)]
pub(super) struct Trace {
    /// The last repetitions of each stage, in a ring.
    stages: Vec<Vec<Window>>,
    /// Stages of this play.
    active: usize,
    /// Repetitions that are remembered.
    kept: usize,
    /// The longest cycle that is looked for.
    cycle: usize,
    /// How many repetitions ago the oldest moment may have been that still counts.
    age: usize,
    /// Repetitions so far.
    count: usize,
    /// At which repetition it is worth looking for cycles again.
    look_at: usize,
}

/// One repetition on one stage.
#[derive(Clone, Default)]
pub(super) struct Window {
    /// The stage when it began.
    stage: Stage,
    /// When its transfers ended.
    transfers: Vec<Time>,
    /// By how much the first moment of each decision was the later one.
    leads: Vec<i64>,
    /// By how much each level was free before kernels ran. While it is not, how much longer it takes decides how
    /// much slower they are, which is not the same for two repetitions unless this is.
    rests: Vec<i64>,
}

/// Repetitions that will be like those before them.
pub(super) struct Alike {
    /// How many make a cycle.
    pub cycle: usize,
    /// How many cycles there will be.
    pub times: usize,
}

/// Writes down what a stage decides, if that is wanted.
pub(super) struct Decisions<'a, const TRACED: bool> {
    window: &'a mut Window,
    rigid: bool,
}

impl<const TRACED: bool> Decisions<'_, TRACED> {
    /// The later of two moments.
    #[inline]
    pub(super) fn later(&mut self, first: Time, second: Time) -> Time {
        if TRACED {
            self.window.leads.push(first.wrapping_sub(second) as i64);
        }
        first.max(second)
    }

    /// Notes when levels are free before kernels run: whether they are slowed down, and by how much.
    #[inline]
    pub(super) fn beside(&mut self, now: Time, free: [Time; 3]) {
        if TRACED {
            let leads = free.map(|free| now.wrapping_sub(free) as i64);
            let list = if self.rigid { &mut self.window.rests } else { &mut self.window.leads };
            list.extend_from_slice(&leads);
        }
    }
}

impl Trace {
    /// Begins anew. Cycles are looked for of up to `cycle` repetitions; whatever is begun in one has been waited for
    /// `age` repetitions later.
    pub(super) fn clear(&mut self, stages: usize, cycle: usize, age: usize) {
        (self.active, self.cycle, self.age, self.kept) = (stages, cycle, age, 2 * cycle + age);
        (self.count, self.look_at) = (0, 0);
        self.make_room(stages, self.kept);
    }

    /// Makes room for so many repetitions of so many stages.
    pub(super) fn make_room(&mut self, stages: usize, kept: usize) {
        self.stages.resize_with(stages.max(self.stages.len()), Vec::new);
        for windows in &mut self.stages[..stages] {
            windows.resize(kept.max(windows.len()), Window::default());
        }
    }

    /// A repetition begins.
    pub(super) fn begin(&mut self, stages: &[Stage], transfers: Option<&[Pending]>) {
        self.count += 1;
        let last = self.count % self.kept;
        let each = transfers.map_or(0, |all| all.len() / stages.len());
        for (number, stage) in stages.iter().enumerate() {
            let window = &mut self.stages[number][last];
            window.stage = *stage;
            window.leads.clear();
            window.rests.clear();
            window.transfers.clear();
            let own = transfers.map(|all| &all[number * each..][..each]);
            window.transfers.extend(own.into_iter().flatten().map(|transfer| transfer.end));
        }
    }

    /// Where a stage writes down its decisions. If kernels are slower beside transfers, `rigid`, it matters by how much
    /// a level is not free.
    pub(super) fn decisions<const TRACED: bool>(
        &mut self,
        stage: usize,
        rigid: bool,
    ) -> Decisions<'_, TRACED> {
        let last = if TRACED { self.count % self.kept } else { 0 };
        Decisions { window: &mut self.stages[stage][last], rigid }
    }

    /// The repetitions that will be like those before them, as far as that is certain.
    pub(super) fn alike(&mut self) -> Option<Alike> {
        if self.count < self.look_at {
            return None;
        }
        let long_enough = |cycle: &usize| 2 * cycle + self.age <= self.count.min(self.kept);
        let cycles = (1..=self.cycle).take_while(long_enough);
        let even = cycles.filter(|&cycle| self.evenly(cycle));
        let found = even.map(|cycle| Alike { cycle, times: self.lasts(cycle) }).find(|alike| alike.times > 0);
        // Looking takes its time too, the longer the more there is to look at.
        self.look_at = self.count + 1 + self.count / 8;
        found
    }

    /// How the repetition that began `ago` repetitions before the last one was on a stage.
    fn window(&self, stage: usize, ago: usize) -> &Window {
        &self.stages[stage][(self.count - ago) % self.kept]
    }

    /// Whether all that still counts has advanced evenly from cycle to cycle, and the last two decided the same.
    fn evenly(&self, cycle: usize) -> bool {
        let three = |stage: usize, ago: usize| [0, 1, 2].map(|back| self.window(stage, ago + back * cycle));
        let begun = |stage: usize, ago: usize| {
            let [c, b, a] = three(stage, ago).map(|window| window.stage.now);
            c - b == b - a
        };
        let stages = || 0..self.active;
        stages().all(|stage| (0..self.age).all(|ago| begun(stage, ago)))
            && stages().all(|stage| (0..self.age).all(|ago| margins_change_evenly(three(stage, ago))))
            && stages().all(|stage| {
                (self.age..cycle)
                    .all(|ago| same_decisions(self.window(stage, ago), self.window(stage, ago + cycle)))
            })
    }

    /// For how many more cycles all decisions fall as in the last.
    fn lasts(&self, cycle: usize) -> usize {
        let windows = (0..self.active).flat_map(|stage| (0..cycle).map(move |ago| (stage, ago)));
        let each =
            windows.map(|(stage, ago)| lasts(self.window(stage, ago + cycle), self.window(stage, ago)));
        each.min().unwrap_or(0)
    }

    /// What a stage and its transfers were one cycle ago, and how it had spent its time two cycles ago.
    pub(super) fn before(&self, number: usize, cycle: usize) -> (&Stage, &[Time], &Account) {
        let one = self.window(number, cycle - 1);
        (&one.stage, &one.transfers, &self.window(number, 2 * cycle - 1).stage.account)
    }
}

/// How a stage has spent its time after so many more cycles: what it spends in each changes evenly too.
pub(super) fn account_after([now, one, two]: [&Account; 3], times: u64) -> Account {
    let after = |of: fn(&Account) -> Time| {
        let [now, one, two] = [now, one, two].map(|account| of(account) as i64);
        let (spent, times) = (now - one, times as i64);
        let change = spent - (one - two);
        (now + times * spent + times * (times + 1) / 2 * change) as Time
    };
    Account {
        compute: after(|account| account.compute),
        tensor: after(|account| account.tensor),
        exposed: [
            after(|account| account.exposed[0]),
            after(|account| account.exposed[1]),
            after(|account| account.exposed[2]),
        ],
        idle: after(|account| account.idle),
        end: now.end,
    }
}

/// Whether three repetitions have decided the same, by margins that change evenly.
fn margins_change_evenly([c, b, a]: [&Window; 3]) -> bool {
    let evenly = |of: fn(&Window) -> &[i64]| {
        let (a, b, c) = (of(a), of(b), of(c));
        a.len() == b.len() && (0..b.len().min(c.len())).all(|i| c[i] - b[i] == b[i] - a[i])
    };
    same_decisions(a, b)
        && same_decisions(b, c)
        && evenly(|window| &window.leads)
        && evenly(|window| &window.rests)
}

fn same_decisions(a: &Window, b: &Window) -> bool {
    let same =
        |a: &[i64], b: &[i64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (*a < 0) == (*b < 0));
    same(&a.leads, &b.leads) && same(&a.rests, &b.rests)
}

/// For how many more repetitions all decisions fall as in the last, if their margins go on changing as they did.
fn lasts(before: &Window, last: &Window) -> usize {
    let decisions = last.leads.iter().zip(&before.leads).map(|(&last, &before)| {
        let change = last - before;
        match (last < 0, change.signum()) {
            (false, -1) => last / -change,
            (true, 1) => (-1 - last) / change,
            _ => i64::MAX,
        }
    });
    let rests = last.rests.iter().zip(&before.rests).map(|(&last, &before)| {
        let change = last - before;
        match (last < 0, change.signum()) {
            (_, 0) | (false, 1) => i64::MAX,
            (false, _) => last / -change,
            (true, _) => 0,
        }
    });
    decisions.chain(rests).min().unwrap_or(i64::MAX) as usize
}
