//! What everything costs under several plans, side by side.

use super::code::{Joint, KINDS, TRANSFERS, WHOLE};
use super::lanes::{Lanes, Mask};
use super::sheet::Sheet;
use super::table::{Table, Transfer};
use crate::time::{Spent, Time};

/// The costs of several plans that play the same sheet.
pub(super) struct Prices<const V: usize> {
    /// How much slower kernels are beside a transfer, in 1/1024.
    pub interference: i64,
    pub kinds: [Cost<V>; KINDS],
    pub rows: Vec<Row<V>>,
    /// Of each stage, in the order of [`WHOLE`].
    pub whole: Vec<[Cost<V>; WHOLE.len()]>,
    pub transfers: [Way<V>; TRANSFERS],
    /// Of messages: of each stage onward and back.
    pub links: Vec<Way<V>>,
    pub joints: [Lanes<V>; 2],
}

/// What kernels take, and the transfers between them.
#[derive(Clone, Copy)]
pub(super) struct Cost<const V: usize> {
    pub compute: Lanes<V>,
    pub links: Lanes<V>,
    pub nothing: bool,
}

/// What the ops of a row take together.
#[derive(Clone, Copy)]
pub(super) struct Row<const V: usize> {
    pub total: Lanes<V>,
    links: Lanes<V>,
    /// Nothing that goes on beside them makes a difference, nor do they to that.
    pub alone: bool,
}

/// How long a transfer takes, and over which level: not the same for all plans, and some have no such transfer.
#[derive(Clone, Copy)]
pub(super) struct Way<const V: usize> {
    pub time: Lanes<V>,
    over: [Mask<V>; LEVELS],
    /// The levels that it is over for any plan: a bit for each.
    used: u8,
}

/// Levels of links.
pub(super) const LEVELS: usize = 3;

impl<const V: usize> Prices<V> {
    /// Prices of nothing yet.
    pub(super) fn new(sheet: &Sheet, interference: i64) -> Self {
        let (stages, rows) = (sheet.stages, sheet.rows.len());
        Prices {
            interference,
            kinds: [Cost::ZERO; KINDS],
            rows: vec![Row { total: Lanes::ZERO, links: Lanes::ZERO, alone: true }; rows],
            whole: vec![[Cost::ZERO; WHOLE.len()]; stages],
            transfers: [Way::NONE; TRANSFERS],
            links: vec![Way::NONE; 2 * stages],
            joints: [Lanes::ZERO; 2],
        }
    }

    /// Sets the prices of one plan; all are to be [settled](Self::settle) after that.
    pub(super) fn set(&mut self, lane: usize, sheet: &Sheet, table: &Table) {
        for (cost, spent) in self.kinds.iter_mut().zip(&table.kinds) {
            cost.set(lane, *spent);
        }
        let plus = |sum: Spent, &kind: &u8| sum.plus(table.kinds[usize::from(kind)]);
        for (cost, row) in self.rows.iter_mut().zip(&sheet.rows) {
            let spent = row.iter().fold(Spent::default(), plus);
            cost.total[lane] = picoseconds(spent.compute + spent.links);
            cost.links[lane] = picoseconds(spent.links);
        }
        for (costs, spent) in self.whole.iter_mut().zip(&table.units.whole) {
            costs.iter_mut().zip(spent).for_each(|(cost, spent)| cost.set(lane, *spent));
        }
        for (number, way) in self.transfers.iter_mut().enumerate() {
            way.set(lane, table.transfer(number));
        }
        for (way, transfer) in self.links.iter_mut().zip(table.messages.iter().flatten()) {
            way.set(lane, Some(*transfer));
        }
        self.joints[Joint::Tied as usize][lane] = picoseconds(table.units.tied.1);
        self.joints[Joint::Sum as usize][lane] = self.transfers[KINDS].time[lane];
    }

    /// Finds out what is the same for all plans.
    pub(super) fn settle(&mut self) {
        for cost in &mut self.kinds {
            cost.nothing = cost.compute == Lanes::ZERO && cost.links == Lanes::ZERO;
        }
        for row in &mut self.rows {
            row.alone = row.total == Lanes::ZERO || (self.interference == 0 && row.links == Lanes::ZERO);
        }
        for way in self.transfers.iter_mut().chain(&mut self.links) {
            way.used = (0..LEVELS).map(|level| u8::from(way.over[level].any()) << level).sum();
        }
    }
}

impl<const V: usize> Cost<V> {
    const ZERO: Self = Cost { compute: Lanes::ZERO, links: Lanes::ZERO, nothing: true };

    fn set(&mut self, lane: usize, spent: Spent) {
        self.compute[lane] = picoseconds(spent.compute);
        self.links[lane] = picoseconds(spent.links);
    }
}

impl<const V: usize> Way<V> {
    const NONE: Self = Way { time: Lanes::ZERO, over: [Mask::NONE; LEVELS], used: 0 };

    fn set(&mut self, lane: usize, transfer: Option<Transfer>) {
        self.time[lane] = transfer.map_or(0, |(_, time)| picoseconds(time));
        for (level, over) in self.over.iter_mut().enumerate() {
            over.set(lane, transfer.is_some_and(|(own, _)| own as usize == level));
        }
    }

    /// Whether any plan has it.
    #[inline]
    pub(super) fn exists(&self) -> bool {
        self.used != 0
    }

    /// The plans for which it is over a level, if there are any.
    #[inline]
    pub(super) fn over(&self, level: usize) -> Option<Mask<V>> {
        (self.used >> level & 1 == 1).then(|| self.over[level])
    }
}

/// Durations are added to and subtracted from one another: they have a sign here.
fn picoseconds(time: Time) -> i64 {
    time as i64
}
