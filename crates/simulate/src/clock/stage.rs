//! A stage on its way through its codes, with a clock for its kernels and one for each level of links.

use kintsugi_spec::Level;

use super::steady::Decisions;
use super::table::Transfer;
use crate::time::{Account, Spent, Time};

/// A stage on its way through its codes.
#[derive(Clone, Copy, Default)]
pub(super) struct Stage {
    /// The next code.
    pub next: usize,
    /// What is added to the micro-batches of the codes, for activations and for gradients.
    pub later: [u32; 2],
    pub now: Time,
    /// When each level is free.
    pub free: [Time; 3],
    /// No level is busy.
    quiet: bool,
    pub account: Account,
}

/// One of a stage's own transfers.
#[derive(Clone, Copy, Default)]
pub(super) struct Pending {
    level: usize,
    pub end: Time,
}

impl Stage {
    /// Takes a level as soon as it is free; when that is.
    #[inline]
    pub(super) fn occupy<const TRACED: bool>(
        &mut self,
        level: Level,
        time: Time,
        decisions: &mut Decisions<TRACED>,
    ) -> Time {
        let free = &mut self.free[level as usize];
        let begin = decisions.later(self.now, *free);
        *free = begin + time;
        self.quiet = false;
        begin
    }

    /// Begins a transfer, if there is one.
    #[inline]
    pub(super) fn start<const TRACED: bool>(
        &mut self,
        transfer: Option<Transfer>,
        decisions: &mut Decisions<TRACED>,
    ) -> Pending {
        let Some((level, time)) = transfer else { return Pending::default() };
        Pending { level: level as usize, end: self.occupy(level, time, decisions) + time }
    }

    /// Waits for a transfer of its own.
    #[inline]
    pub(super) fn wait<const TRACED: bool>(&mut self, transfer: Pending, decisions: &mut Decisions<TRACED>) {
        let then = decisions.later(self.now, transfer.end);
        self.account.exposed[transfer.level] += then - self.now;
        self.now = then;
    }

    /// Waits for other stages.
    #[inline]
    pub(super) fn idle_until<const TRACED: bool>(&mut self, then: Time, decisions: &mut Decisions<TRACED>) {
        let then = decisions.later(self.now, then);
        self.account.idle += then - self.now;
        self.now = then;
    }

    /// Runs kernels, slower while a transfer goes on beside them, and the transfers between them.
    #[inline]
    pub(super) fn run<const TRACED: bool>(
        &mut self,
        spent: Spent,
        interference: u64,
        decisions: &mut Decisions<TRACED>,
    ) {
        if self.quiet {
            return self.run_alone(spent);
        }
        decisions.beside(self.now, self.free);
        let busy = self.free.iter().map(|free| free.saturating_sub(self.now)).max().unwrap_or(0);
        self.quiet = busy == 0;
        let slowed = spent.compute + spent.compute.min(busy) * interference / 1024;
        self.run_alone(Spent { compute: slowed, ..spent });
        // What the transfers inside the op take of a level is missing to what goes on beside it.
        if spent.links > 0 && busy > 0 {
            decisions.beside(self.now, self.free);
            self.free.iter_mut().filter(|free| **free > self.now).for_each(|free| *free += spent.links);
        }
    }

    /// Runs several ops in a row, which take `all` together.
    #[inline]
    pub(super) fn run_all<const TRACED: bool>(
        &mut self,
        all: Spent,
        each: impl Iterator<Item = Spent>,
        interference: u64,
        decisions: &mut Decisions<TRACED>,
    ) {
        if self.quiet {
            self.run_alone(all);
        } else {
            each.for_each(|spent| self.run(spent, interference, decisions));
        }
    }

    #[inline]
    fn run_alone(&mut self, spent: Spent) {
        self.now += spent.compute + spent.links;
        self.account.compute += spent.compute;
        self.account.tensor += spent.links;
    }
}
