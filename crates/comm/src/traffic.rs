//! Bytes sent, by level and operation: what is predicted, and what a transport measures.

use std::sync::atomic::{AtomicU64, Ordering};

use kintsugi_spec::Level;

/// What bytes are sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// Sum over all ranks, for all ranks.
    AllReduce,
    /// Every rank's piece, for all ranks.
    AllGather,
    /// Sum over all ranks, a piece for each.
    ReduceScatter,
    /// A different piece from every rank to every rank.
    AllToAll,
    /// One rank's piece, for all ranks.
    Broadcast,
    /// From one rank to one other.
    Send,
}

impl Operation {
    /// Every operation, in the order in which they are printed.
    pub const ALL: [Operation; 6] = [
        Operation::AllReduce,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::AllToAll,
        Operation::Broadcast,
        Operation::Send,
    ];

    /// The name used in outputs.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllToAll => "all_to_all",
            Operation::Broadcast => "broadcast",
            Operation::Send => "send",
        }
    }
}

type ByLevelAndOperation<T> = [[T; Operation::ALL.len()]; Level::ALL.len()];

/// Bytes by level and operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic(ByLevelAndOperation<u64>);

impl Traffic {
    /// Adds bytes that are sent over links of a level.
    pub fn add(&mut self, level: Level, operation: Operation, bytes: u64) {
        self.0[level as usize][operation as usize] += bytes;
    }

    /// Bytes sent over links of a level for an operation.
    pub fn get(&self, level: Level, operation: Operation) -> u64 {
        self.0[level as usize][operation as usize]
    }

    /// Adds all that another rank or step has sent.
    pub fn merge(&mut self, other: &Traffic) {
        for (level, operation, bytes) in other.iter() {
            self.add(level, operation, bytes);
        }
    }

    /// What is not zero: innermost level first, then in the order of [`Operation::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Level, Operation, u64)> + '_ {
        Level::ALL
            .into_iter()
            .flat_map(|level| Operation::ALL.into_iter().map(move |operation| (level, operation)))
            .map(|(level, operation)| (level, operation, self.get(level, operation)))
            .filter(|&(_, _, bytes)| bytes > 0)
    }

    /// Bytes of all levels and operations.
    pub fn total(&self) -> u64 {
        self.0.as_flattened().iter().sum()
    }
}

/// [`Traffic`] that several threads add to.
#[derive(Debug, Default)]
pub(crate) struct Meter(ByLevelAndOperation<AtomicU64>);

impl Meter {
    /// Adds bytes; whoever synchronises with this thread afterwards sees them.
    pub(crate) fn add(&self, level: Level, operation: Operation, bytes: u64) {
        self.0[level as usize][operation as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// What has been added so far.
    pub(crate) fn read(&self) -> Traffic {
        Traffic(self.0.each_ref().map(|row| row.each_ref().map(|bytes| bytes.load(Ordering::Relaxed))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_in_the_order_of_their_enums() {
        assert!(Operation::ALL.iter().enumerate().all(|(i, &operation)| operation as usize == i));
        assert!(Level::ALL.iter().enumerate().all(|(i, &level)| level as usize == i));
    }

    #[test]
    fn merging_adds_and_iteration_skips_zeros() {
        let mut a = Traffic::default();
        a.add(Level::Cluster, Operation::AllReduce, 5);
        let meter = Meter::default();
        meter.add(Level::Cluster, Operation::AllReduce, 2);
        meter.add(Level::Package, Operation::Send, 1);
        a.merge(&meter.read());
        let entries: Vec<_> = a.iter().collect();
        assert_eq!(
            entries,
            [(Level::Package, Operation::Send, 1), (Level::Cluster, Operation::AllReduce, 7)]
        );
        assert_eq!(a.total(), 8);
    }
}
