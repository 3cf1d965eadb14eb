//! Ranks as threads of one process, which read each other's memory.
//!
//! The ring of [`crate::ring`] is really run, so traffic is measured where it happens: in `ThreadsGroup::carry`, the only
//! place where bytes go from one rank to another. A [`World`] is shared by all ranks; each rank makes its own
//! [`ThreadsGroup`]s. Starting a transfer posts an address on the group's board; waiting for it moves the data.
//!
//! A rank waits for others only in [`crate::Communicator::wait`], and on a GPU, when it starts a transfer, for its own
//! stream: a collective is done when every rank of the group waits for
//! it, a message as soon as one end waits and both have started it. So ranks that share several collectives have to
//! wait for them in the same order.

mod board;
mod collective;
mod group;
#[allow(unsafe_code, reason = "ranks read each other's memory; it happens in this file only")]
mod memory;
mod message;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kintsugi_spec::Topology;

use crate::traffic::Meter;
use crate::{Operation, Traffic};
use board::Board;
pub use group::ThreadsGroup;

/// Why a world stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} failed in {during}: {reason}")]
pub struct Failure {
    /// The rank that failed, or that noticed.
    pub rank: usize,
    /// What it was doing.
    pub during: String,
    /// What went wrong.
    pub reason: String,
}

/// Name and members: what a group is known by.
type GroupKey = (&'static str, Vec<usize>);

/// All ranks of a job that runs as threads.
#[derive(Debug)]
pub struct World {
    topology: Topology,
    /// What each rank has sent.
    meters: Vec<Meter>,
    boards: Mutex<HashMap<GroupKey, Arc<Board>>>,
    timeout: Mutex<Duration>,
    failure: OnceLock<Failure>,
}

impl World {
    /// A world of `ranks` ranks; `topology` says over which level each pair of them is charged.
    pub fn new(topology: Topology, ranks: usize) -> Arc<World> {
        Arc::new(World {
            topology,
            meters: (0..ranks).map(|_| Meter::default()).collect(),
            boards: Mutex::default(),
            timeout: Mutex::new(Duration::from_secs(600)),
            failure: OnceLock::new(),
        })
    }

    /// Rank `me`'s membership in the group of `members`, ranks of the world in group order.
    ///
    /// Every member asks for the group with the same name and members; the name tells groups of the same ranks apart.
    pub fn group(self: &Arc<Self>, name: &'static str, members: &[usize], me: usize) -> ThreadsGroup {
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        assert!(
            sorted.windows(2).all(|pair| pair[0] < pair[1])
                && sorted.last().is_some_and(|&last| last < self.meters.len()),
            "group {name} of ranks {members:?} in a world of {}",
            self.meters.len()
        );
        let Some(index) = members.iter().position(|&member| member == me) else {
            panic!("rank {me} is not in group {name} of ranks {members:?}");
        };
        let board = Arc::clone(
            lock(&self.boards)
                .entry((name, members.to_vec()))
                .or_insert_with(|| Arc::new(Board::new(name, members.to_vec()))),
        );
        ThreadsGroup::new(Arc::clone(self), board, index)
    }

    /// What a rank has sent so far. After a wait it contains all of that transfer.
    pub fn traffic(&self, rank: usize) -> Traffic {
        self.meters[rank].read()
    }

    /// Stops the world: every rank that waits, or starts or waits later, panics with the reason. The first reason stays.
    pub fn abort(&self, reason: Failure) {
        // An earlier failure is the cause of this one.
        let _ = self.failure.set(reason);
        for board in lock(&self.boards).values() {
            board.ring_all();
        }
    }

    /// Why the world stopped, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Sets how long a rank waits for another before it fails. The default is ten minutes.
    pub fn set_timeout(&self, timeout: Duration) {
        *lock(&self.timeout) = timeout;
    }

    fn timeout(&self) -> Duration {
        *lock(&self.timeout)
    }

    /// Charges the rank that bytes come from.
    fn charge(&self, operation: Operation, from: usize, to: usize, bytes: usize) {
        let level = self.topology.level(from, to);
        self.meters[from].add(level, operation, bytes as u64);
    }
}

/// Locks, also after a panic elsewhere: that one is reported by whoever panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
