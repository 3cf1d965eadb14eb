//! The state that the ranks of one group share.
//!
//! It is plain data under one mutex. Ranks hold the mutex only briefly and move tensor data outside of it. The mutex orders
//! memory: what a rank wrote before it changed the state is visible to every rank that reads the state afterwards.

use std::sync::{Condvar, Mutex, MutexGuard};

use kintsugi_spec::Group;

use super::collective::{ActiveCollective, MemberProgress};
use super::lock;
use super::message::ActiveMessage;

/// The shared state of a group.
#[derive(Debug)]
pub(super) struct GroupState {
    pub(super) group: Group,
    /// The group's ranks of the world, in group order.
    pub(super) members: Vec<usize>,
    transfers: Mutex<Transfers>,
    /// One condition variable per member, so that a change wakes only the members that it concerns.
    condvars: Vec<Condvar>,
}

/// The active transfers of a group.
#[derive(Debug)]
pub(super) struct Transfers {
    /// How many collectives each member has started.
    pub(super) started: Vec<u64>,
    /// Collectives that some member has started and that not all members have finished.
    pub(super) collectives: Vec<ActiveCollective>,
    /// The vectors of finished collectives, for reuse.
    pub(super) spare: Vec<Vec<MemberProgress>>,
    /// Messages that one end has started and that not both ends have finished, oldest first.
    pub(super) messages: Vec<ActiveMessage>,
    /// The number of messages so far.
    pub(super) message_count: u64,
}

/// Transfers for which memory is allocated in advance. The number of active transfers depends on how far ranks drift apart,
/// which may grow after the first step, and a step should not allocate.
pub(super) const PREALLOCATED: usize = 32;

impl GroupState {
    pub(super) fn new(group: Group, members: Vec<usize>) -> Self {
        let transfers = Transfers {
            started: vec![0; members.len()],
            collectives: Vec::with_capacity(PREALLOCATED),
            spare: (0..PREALLOCATED).map(|_| Vec::with_capacity(members.len())).collect(),
            messages: Vec::with_capacity(PREALLOCATED),
            message_count: 0,
        };
        let condvars = members.iter().map(|_| Condvar::new()).collect();
        GroupState { group, members, transfers: Mutex::new(transfers), condvars }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Transfers> {
        lock(&self.transfers)
    }

    /// The condition variable of `member`.
    pub(super) fn condvar(&self, member: usize) -> &Condvar {
        &self.condvars[member]
    }

    /// Wakes `member` after a change that it may be waiting for.
    pub(super) fn wake(&self, member: usize) {
        self.condvars[member].notify_all();
    }

    /// Wakes every member after a change outside this state.
    pub(super) fn wake_all(&self) {
        // While this thread holds the lock, no member is between checking for that change and starting to wait.
        let _posts = self.lock();
        for condvar in &self.condvars {
            condvar.notify_all();
        }
    }
}
