//! Ranks as threads of one process that read each other's memory.
//!
//! The ranks run the ring of [`crate::ring`]. `Member::move_elements` is the only place where bytes go from one rank to
//! another, and it counts them. All ranks share a [`ThreadsWorld`], and each rank makes its own [`ThreadsGroup`]s. Starting a
//! transfer publishes an address in the group's shared state. From then on the rank's progress thread (`progress`) moves the
//! data while the rank computes, and the rank itself does when it waits for the transfer.
//!
//! A rank waits for other ranks only in [`crate::Communicator::wait`]. A transfer finishes when all its ranks have started it.
//! On a GPU there is no progress thread: a rank waits for its own stream when it starts a transfer, and moves the data when it
//! waits. So there, ranks that share several collectives must wait for them in the same order.
//!
//! A failure stops the whole world. A rank that leaves a transfer because of a failure first waits until no other rank moves
//! data from or to its buffer. No rank begins to move data after the failure, so the buffer is then its owner's alone.

mod collective;
mod group;
mod group_state;
mod message;
mod progress;
#[allow(unsafe_code, reason = "ranks use each other's memory on a GPU")]
mod shared_gpu;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kintsugi_spec::{EmulatedLinks, Group, Places, work};
use kintsugi_tensor::{AddressSpace, Backend};

use crate::activity::Activity;
use crate::emulated::LinkClocks;
use crate::traffic::TrafficCounter;
use crate::waits::{ChainEnd, RankState, Wait, follow};
use crate::{Communicator, Operation, RankFailure, Traffic, World};
use group::Member;
pub use group::ThreadsGroup;
use group_state::GroupState;
use progress::{Inbox, ProgressThreads};

/// What identifies a group.
type GroupKey = (Group, Vec<usize>);

/// All ranks of a job that runs as threads of one process.
#[derive(Clone, Debug)]
pub struct ThreadsWorld {
    shared: Arc<WorldState>,
    _progress: Arc<ProgressThreads>,
}

/// What the ranks share.
#[derive(Debug)]
struct WorldState {
    places: Places,
    /// Bytes sent by each rank.
    counters: Vec<TrafficCounter>,
    /// The links that each rank sends over.
    links: Vec<LinkClocks>,
    /// How each rank's progress thread is woken.
    inboxes: Vec<Inbox>,
    groups: Mutex<HashMap<GroupKey, Arc<GroupState>>>,
    timeout: Duration,
    /// The rank that each rank waits for and in what, if it has waited for a while.
    waits: Vec<Mutex<Option<(usize, Activity)>>>,
    failure: OnceLock<RankFailure>,
}

impl ThreadsWorld {
    /// A world of `ranks` ranks. `places` determine the link level between each pair of them. A rank that waits longer than
    /// `timeout` for another fails.
    pub fn new(places: impl Into<Places>, ranks: usize, timeout: Duration) -> Self {
        Self::with_links(places, ranks, timeout, EmulatedLinks::default())
    }

    /// The same with emulated links, over which transfers take longer.
    pub fn with_links(
        places: impl Into<Places>,
        ranks: usize,
        timeout: Duration,
        links: EmulatedLinks,
    ) -> Self {
        let shared = WorldState {
            places: places.into(),
            counters: (0..ranks).map(|_| TrafficCounter::default()).collect(),
            links: (0..ranks).map(|_| LinkClocks::new(links)).collect(),
            inboxes: (0..ranks).map(|_| Inbox::default()).collect(),
            groups: Mutex::default(),
            timeout,
            waits: (0..ranks).map(|_| Mutex::default()).collect(),
            failure: OnceLock::new(),
        };
        let shared = Arc::new(shared);
        ThreadsWorld { _progress: Arc::new(ProgressThreads::start(&shared)), shared }
    }

    /// Rank `me`'s membership in the group of `members`, whose tensors are in host memory: see [`World::group`].
    pub fn host_group(&self, group: Group, members: &[usize], me: usize) -> ThreadsGroup {
        ThreadsGroup::on_host(self.member(group, members, me))
    }

    fn member(&self, group: Group, members: &[usize], me: usize) -> Member {
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        assert!(
            sorted.windows(2).all(|pair| pair[0] < pair[1])
                && sorted.last().is_some_and(|&last| last < self.ranks()),
            "group {group} of ranks {members:?} in a world of {}",
            self.ranks()
        );
        let Some(index) = members.iter().position(|&member| member == me) else {
            panic!("rank {me} is not in group {group} of ranks {members:?}");
        };
        let state = Arc::clone(
            lock(&self.shared.groups)
                .entry((group, members.to_vec()))
                .or_insert_with(|| Arc::new(GroupState::new(group, members.to_vec()))),
        );
        Member::new(Arc::clone(&self.shared), state, index)
    }
}

impl World for ThreadsWorld {
    fn ranks(&self) -> usize {
        self.shared.counters.len()
    }

    fn local_ranks(&self) -> Range<usize> {
        0..self.ranks()
    }

    fn group(
        &self,
        group: Group,
        members: &[usize],
        me: usize,
        backend: &Rc<dyn Backend>,
    ) -> Box<dyn Communicator> {
        let member = self.member(group, members, me);
        match backend.memory().address_space() {
            AddressSpace::Device => Box::new(ThreadsGroup::on_gpu(member, Rc::clone(backend))),
            AddressSpace::Host | AddressSpace::Paper => Box::new(ThreadsGroup::on_host(member)),
        }
    }

    fn traffic(&self, rank: usize) -> Traffic {
        self.shared.counters[rank].read()
    }

    fn gather(&self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, RankFailure> {
        Ok(Some(vec![bytes]))
    }

    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure> {
        Ok(bytes)
    }

    fn post(&self, _: &[u8]) {
        unreachable!("all ranks are in the process of rank 0");
    }

    fn take_post(&self, _: usize) -> Option<Vec<u8>> {
        None
    }

    fn finished_pieces(&self) -> u64 {
        work::finished_pieces()
    }

    fn abort(&self, reason: RankFailure) {
        self.shared.abort(reason);
    }

    fn failure(&self) -> Option<RankFailure> {
        self.shared.failure.get().cloned()
    }
}

impl WorldState {
    fn abort(&self, reason: RankFailure) {
        // An earlier failure is the cause of this one.
        let _ = self.failure.set(reason);
        for group in lock(&self.groups).values() {
            group.wake_all();
        }
    }

    /// The chain of waits from the rank that `waiting` waits for.
    fn chain(&self, waiting: usize, peer: usize) -> ChainEnd {
        follow(waiting, Some(peer), self.waits.len(), |rank| {
            let wait = lock(&self.waits[rank])
                .map(|(peer, activity)| Wait { peer: Some(peer), activity: activity.to_string() });
            Some(RankState { wait, ..RankState::default() })
        })
    }

    /// Counts bytes for the rank that sends them. Returns when they arrive, if they take time on an emulated link: they begin
    /// when both ranks were ready.
    fn send(
        &self,
        operation: Operation,
        (from, to): (usize, usize),
        bytes: usize,
        ready: Instant,
    ) -> Option<Instant> {
        let level = self.places.level(from, to);
        self.counters[from].add(level, operation, bytes as u64);
        self.links[from].send(level, bytes, ready)
    }
}

/// Locks a mutex, even if it is poisoned: the thread that panicked reports its panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
