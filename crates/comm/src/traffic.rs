//! Bytes sent by level and operation, predicted or measured by a transport.

use std::sync::atomic::{AtomicU64, Ordering};

use kintsugi_spec::{ByLevel, Level};
use serde::{Deserialize, Serialize};

/// The operation that bytes are sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// Every rank gets the sum over all ranks.
    AllReduce,
    /// Every rank gets every rank's piece.
    AllGather,
    /// Every rank gets a piece of the sum over all ranks.
    ReduceScatter,
    /// Every rank sends a different piece to every rank.
    AllToAll,
    /// Every rank gets one rank's piece.
    Broadcast,
    /// One rank sends to one other.
    Send,
}

impl Operation {
    /// All operations, in the order of the output.
    pub const ALL: [Operation; 6] = [
        Operation::AllReduce,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::AllToAll,
        Operation::Broadcast,
        Operation::Send,
    ];

    /// The name in the output.
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

type ByLevelAndOperation<T> = ByLevel<[T; Operation::ALL.len()]>;

/// Bytes by level and operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic(ByLevelAndOperation<u64>);

impl Traffic {
    /// Adds bytes that are sent over links of a level.
    pub fn add(&mut self, level: Level, operation: Operation, bytes: u64) {
        self.0[level][operation as usize] += bytes;
    }

    /// Bytes sent over links of a level for an operation.
    pub fn get(&self, level: Level, operation: Operation) -> u64 {
        self.0[level][operation as usize]
    }

    /// Adds the bytes of another rank or step.
    pub fn merge(&mut self, other: &Traffic) {
        for (level, operation, bytes) in other.iter() {
            self.add(level, operation, bytes);
        }
    }

    /// What was added since it was `before`.
    #[must_use]
    pub fn since(&self, before: &Traffic) -> Traffic {
        let mut since = Traffic::default();
        for (level, operation, bytes) in self.iter() {
            since.add(level, operation, bytes - before.get(level, operation));
        }
        since
    }

    /// The counts that are not zero: innermost level first, then in the order of [`Operation::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Level, Operation, u64)> + '_ {
        Level::ALL
            .into_iter()
            .flat_map(|level| Operation::ALL.into_iter().map(move |operation| (level, operation)))
            .map(|(level, operation)| (level, operation, self.get(level, operation)))
            .filter(|&(_, _, bytes)| bytes > 0)
    }

    /// Bytes over all levels and operations.
    pub fn total(&self) -> u64 {
        self.0.as_flattened().iter().sum()
    }
}

/// [`Traffic`] that several threads can add to.
#[derive(Debug, Default)]
pub(crate) struct TrafficCounter(ByLevelAndOperation<AtomicU64>);

impl TrafficCounter {
    /// Adds bytes. Threads that synchronise with this one afterwards see them.
    pub(crate) fn add(&self, level: Level, operation: Operation, bytes: u64) {
        self.0[level][operation as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// The traffic so far.
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
        let counter = TrafficCounter::default();
        counter.add(Level::Cluster, Operation::AllReduce, 2);
        counter.add(Level::Package, Operation::Send, 1);
        a.merge(&counter.read());
        let entries: Vec<_> = a.iter().collect();
        assert_eq!(
            entries,
            [(Level::Package, Operation::Send, 1), (Level::Cluster, Operation::AllReduce, 7)]
        );
        assert_eq!(a.total(), 8);
    }
}
