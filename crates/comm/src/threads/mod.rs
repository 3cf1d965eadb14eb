//! Ranks as threads of one process that read each other's memory.
//!
//! The ranks run the ring of [`crate::ring`]. `ThreadsGroup::move_elements` is the only place where bytes go from one rank
//! to another, and it counts them. All ranks share a [`World`], and each rank makes its own [`ThreadsGroup`]s. Starting a
//! transfer publishes an address in the group's shared state. Waiting for it moves the data.
//!
//! A rank waits for other ranks only in [`crate::Communicator::wait`]. On a GPU it also waits for its own stream when it
//! starts a transfer. A collective finishes when every rank of the group waits for it. A message finishes when both ends have
//! started it and one of them waits. So ranks that share several collectives must wait for them in the same order.

mod collective;
mod group;
mod group_state;
#[allow(unsafe_code, reason = "ranks read each other's memory; it happens in this file only")]
mod memory;
mod message;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kintsugi_spec::Topology;

use crate::traffic::TrafficCounter;
use crate::{Operation, Traffic};
pub use group::ThreadsGroup;
use group_state::GroupState;

/// Why a world stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} failed in {during}: {reason}")]
pub struct RankFailure {
    /// The rank that failed or detected the failure.
    pub rank: usize,
    /// What it was doing.
    pub during: String,
    /// What went wrong.
    pub reason: String,
}

/// Name and members: the identity of a group.
type GroupKey = (&'static str, Vec<usize>);

/// All ranks of a job that runs as threads.
#[derive(Debug)]
pub struct World {
    topology: Topology,
    /// Bytes sent by each rank.
    counters: Vec<TrafficCounter>,
    groups: Mutex<HashMap<GroupKey, Arc<GroupState>>>,
    timeout: Mutex<Duration>,
    failure: OnceLock<RankFailure>,
}

impl World {
    /// A world of `ranks` ranks. `topology` determines the link level between each pair of them.
    pub fn new(topology: Topology, ranks: usize) -> Arc<World> {
        Arc::new(World {
            topology,
            counters: (0..ranks).map(|_| TrafficCounter::default()).collect(),
            groups: Mutex::default(),
            timeout: Mutex::new(Duration::from_secs(600)),
            failure: OnceLock::new(),
        })
    }

    /// Rank `me`'s membership in the group of `members`, ranks of the world in group order.
    ///
    /// Every member must use the same name and members. The name distinguishes groups of the same ranks.
    pub fn group(self: &Arc<Self>, name: &'static str, members: &[usize], me: usize) -> ThreadsGroup {
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        assert!(
            sorted.windows(2).all(|pair| pair[0] < pair[1])
                && sorted.last().is_some_and(|&last| last < self.counters.len()),
            "group {name} of ranks {members:?} in a world of {}",
            self.counters.len()
        );
        let Some(index) = members.iter().position(|&member| member == me) else {
            panic!("rank {me} is not in group {name} of ranks {members:?}");
        };
        let shared = Arc::clone(
            lock(&self.groups)
                .entry((name, members.to_vec()))
                .or_insert_with(|| Arc::new(GroupState::new(name, members.to_vec()))),
        );
        ThreadsGroup::new(Arc::clone(self), shared, index)
    }

    /// What a rank has sent so far. After a wait, it includes all bytes of that transfer.
    pub fn traffic(&self, rank: usize) -> Traffic {
        self.counters[rank].read()
    }

    /// Stops the world: every rank that waits now, or starts or waits for a transfer later, panics with the first reason.
    pub fn abort(&self, reason: RankFailure) {
        // An earlier failure is the cause of this one.
        let _ = self.failure.set(reason);
        for group in lock(&self.groups).values() {
            group.wake_all();
        }
    }

    /// Why the world stopped, if it did.
    pub fn failure(&self) -> Option<&RankFailure> {
        self.failure.get()
    }

    /// Sets how long a rank waits for another before it fails. The default is ten minutes.
    pub fn set_timeout(&self, timeout: Duration) {
        *lock(&self.timeout) = timeout;
    }

    fn timeout(&self) -> Duration {
        *lock(&self.timeout)
    }

    /// Counts bytes for the rank that sends them.
    fn charge(&self, operation: Operation, from: usize, to: usize, bytes: usize) {
        let level = self.topology.level(from, to);
        self.counters[from].add(level, operation, bytes as u64);
    }
}

/// Locks a mutex, even if it is poisoned: the thread that panicked reports its panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
