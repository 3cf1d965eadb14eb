//! The clocks of a stage, under several plans side by side: one for its kernels and one for each level of links.
#![allow(clippy::inline_always, reason = "a call would take the numbers out of the registers")]

use super::lanes::Lanes;
use super::prices::{Cost, LEVELS, Prices, Way};

/// All levels.
const ALL: u8 = (1 << LEVELS) - 1;

/// A stage's clocks.
#[derive(Clone, Copy)]
pub(super) struct Stage<const V: usize> {
    pub now: Lanes<V>,
    /// When each level is free.
    pub free: [Lanes<V>; LEVELS],
    /// When each level has no message left.
    pub quiet: [Lanes<V>; LEVELS],
    /// The levels that may be busy under some plan: a bit for each.
    busy: u8,
}

impl<const V: usize> Stage<V> {
    /// Everything is at its beginning.
    pub(super) const START: Self =
        Stage { now: Lanes::ZERO, free: [Lanes::ZERO; LEVELS], quiet: [Lanes::ZERO; LEVELS], busy: ALL };

    /// Another plan is played, of which nothing is known yet.
    pub(super) fn forget(&mut self) {
        self.busy = ALL;
    }

    /// Takes levels as soon as they are free; when that is.
    #[inline(always)]
    pub(super) fn occupy(&mut self, way: &Way<V>) -> Lanes<V> {
        let mut begin = self.now;
        for (level, free) in self.free.iter_mut().enumerate() {
            if let Some(plans) = way.over(level) {
                begin = self.now.max(*free).or(plans, begin);
                *free = (begin + way.time).or(plans, *free);
                self.busy |= 1 << level;
            }
        }
        begin
    }

    /// Begins a message before transfers that wait, and beside those that are under way; when that is.
    #[inline(always)]
    pub(super) fn send(&mut self, way: &Way<V>) -> Lanes<V> {
        let mut begin = self.now;
        for (level, (free, quiet)) in self.free.iter_mut().zip(&mut self.quiet).enumerate() {
            if let Some(plans) = way.over(level) {
                begin = self.now.max(*quiet).or(plans, begin);
                *quiet = (begin + way.time).or(plans, *quiet);
                *free = (begin.max(*free) + way.time).or(plans, *free);
                self.busy |= 1 << level;
            }
        }
        begin
    }

    /// Runs the ops of a row. `slowed` is what kernels take longer beside transfers.
    #[inline(always)]
    pub(super) fn run(&mut self, row: usize, kinds: &[u8], prices: &Prices<V>, slowed: &mut Lanes<V>) {
        let together = &prices.rows[row];
        if together.alone || !self.beside_transfers() {
            self.now += together.total;
            return;
        }
        for &kind in kinds {
            let cost = &prices.kinds[usize::from(kind)];
            if !cost.nothing {
                self.run_beside(cost, prices.interference, slowed);
            }
        }
    }

    /// Runs kernels, slower while a transfer goes on beside them, and the transfers between them.
    #[inline(always)]
    pub(super) fn run_beside(&mut self, cost: &Cost<V>, interference: i64, slowed: &mut Lanes<V>) {
        if interference > 0 {
            let busy = self.free.iter().fold(Lanes::ZERO, |busy, &free| busy.max(free - self.now));
            let longer = cost.compute.min(busy).in_1024ths(interference);
            *slowed += longer;
            self.now += longer;
        }
        self.now += cost.compute + cost.links;
        // What the transfers inside the op take of a level is missing to what goes on beside it.
        for (level, free) in self.free.iter_mut().enumerate() {
            if self.busy >> level & 1 == 1 {
                *free += cost.links.only(free.above(self.now));
            }
        }
    }

    /// Whether any level is busy under any plan.
    #[inline(always)]
    fn beside_transfers(&mut self) -> bool {
        for (level, free) in self.free.iter().enumerate() {
            if self.busy >> level & 1 == 1 && !free.above(self.now).any() {
                self.busy ^= 1 << level;
            }
        }
        self.busy != 0
    }
}
