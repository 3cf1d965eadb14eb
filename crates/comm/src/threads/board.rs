//! What the ranks of one group tell each other.
//!
//! All of it is plain data under one lock, held for moments only; data moves outside the lock. So whatever a rank did
//! before it posted something has happened for whoever reads the post, and no other ordering is needed.

use std::sync::{Condvar, Mutex, MutexGuard};

use super::collective::{Round, Seat};
use super::lock;
use super::message::Message;

/// The shared state of a group.
#[derive(Debug)]
pub(super) struct Board {
    pub(super) name: &'static str,
    /// The group's ranks of the world, in group order.
    pub(super) members: Vec<usize>,
    posts: Mutex<Posts>,
    /// What each member sleeps on, so that a post wakes only those whom it concerns.
    bells: Vec<Condvar>,
}

/// The transfers of a group that are under way.
#[derive(Debug)]
pub(super) struct Posts {
    /// How many collectives each member has started.
    pub(super) started: Vec<u64>,
    /// Collectives that some member has started and not all have left.
    pub(super) rounds: Vec<Round>,
    /// Seats of finished rounds, whose memory is used again.
    pub(super) spare: Vec<Vec<Seat>>,
    /// Messages that one end has started and not both have left, oldest first.
    pub(super) messages: Vec<Message>,
    /// How many messages there have been.
    pub(super) message_count: u64,
}

/// Transfers for which there is room from the start. How many are under way at once depends on how far ranks drift apart,
/// which may be further in a later step than in the first; a step should not allocate for that.
pub(super) const ROOM: usize = 32;

impl Board {
    pub(super) fn new(name: &'static str, members: Vec<usize>) -> Self {
        let posts = Posts {
            started: vec![0; members.len()],
            rounds: Vec::with_capacity(ROOM),
            spare: (0..ROOM).map(|_| Vec::with_capacity(members.len())).collect(),
            messages: Vec::with_capacity(ROOM),
            message_count: 0,
        };
        let bells = members.iter().map(|_| Condvar::new()).collect();
        Board { name, members, posts: Mutex::new(posts), bells }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Posts> {
        lock(&self.posts)
    }

    /// What `member` sleeps on.
    pub(super) fn bell(&self, member: usize) -> &Condvar {
        &self.bells[member]
    }

    /// Wakes `member`, after a post that it may be waiting for.
    pub(super) fn ring(&self, member: usize) {
        self.bells[member].notify_all();
    }

    /// Wakes every member, after a change outside the board.
    pub(super) fn ring_all(&self) {
        // With the lock held, nobody is between looking at that change and falling asleep.
        let _posts = self.lock();
        for bell in &self.bells {
            bell.notify_all();
        }
    }
}
