//! A thread for each rank that moves its transfers while the rank computes.
//!
//! Whoever makes a step of a transfer possible wakes the rank that runs the step: the rank itself, if it waits for that transfer,
//! or else its progress thread. The two run the same code, and a flag in the group's state ensures that one of them runs a step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::group::Member;
use super::group_state::GroupState;
use super::{WorldState, lock};
use crate::RankFailure;

/// What a rank's progress thread works on, and how it is woken.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct InboxState {
    /// The groups of the rank, with its index in each.
    groups: Vec<(Arc<GroupState>, usize)>,
    /// Whether something has changed since the thread last looked.
    changed: bool,
    stop: bool,
}

impl Inbox {
    /// Adds a group of the rank.
    pub(super) fn add(&self, group: &Arc<GroupState>, me: usize) {
        let groups = &mut lock(&self.state).groups;
        if !groups.iter().any(|(other, _)| Arc::ptr_eq(other, group)) {
            groups.push((Arc::clone(group), me));
        }
    }

    /// Wakes the thread: a step of one of the rank's transfers may be possible now.
    pub(super) fn ring(&self) {
        lock(&self.state).changed = true;
        self.wake.notify_one();
    }

    /// Waits until something changes, or until `due`. Returns the groups, or `None` at the end.
    fn next(&self, due: Option<Instant>, groups: &mut Vec<(Arc<GroupState>, usize)>) -> Option<()> {
        let mut state = lock(&self.state);
        loop {
            let left = due.map(|due| due.saturating_duration_since(Instant::now()));
            if state.stop {
                return None;
            }
            if state.changed || left.is_some_and(|left| left.is_zero()) {
                state.changed = false;
                groups.clone_from(&state.groups);
                return Some(());
            }
            state = match left {
                Some(left) => self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

/// The progress threads of a world. They end when this is dropped.
#[derive(Debug)]
pub(super) struct ProgressThreads {
    world: Arc<WorldState>,
    threads: Vec<JoinHandle<()>>,
}

impl ProgressThreads {
    /// Starts a thread for every rank. A world of one rank needs none.
    pub(super) fn start(world: &Arc<WorldState>) -> Self {
        let ranks = world.inboxes.len();
        let start = |rank: usize| {
            let world = Arc::clone(world);
            let name = format!("transfers {rank}");
            let thread = thread::Builder::new().name(name).spawn(move || run(&world, rank));
            // Without its thread, a rank moves its transfers when it waits for them.
            thread.ok()
        };
        let threads = if ranks > 1 { (0..ranks).filter_map(start).collect() } else { Vec::new() };
        ProgressThreads { world: Arc::clone(world), threads }
    }
}

impl Drop for ProgressThreads {
    fn drop(&mut self) {
        for inbox in &self.world.inboxes {
            lock(&inbox.state).stop = true;
            inbox.wake.notify_one();
        }
        for thread in self.threads.drain(..) {
            // It catches its panics.
            let _ = thread.join();
        }
    }
}

/// The loop of a progress thread.
fn run(world: &Arc<WorldState>, rank: usize) {
    let inbox = &world.inboxes[rank];
    let (mut due, mut groups) = (None, Vec::new());
    while inbox.next(due, &mut groups).is_some() {
        let members = groups.iter().map(|(group, me)| Member::new(Arc::clone(world), Arc::clone(group), *me));
        let advance = || members.filter_map(|member| member.advance_all()).min();
        match catch_unwind(AssertUnwindSafe(advance)) {
            Ok(next) => due = next,
            Err(_) => world.abort(RankFailure::new(rank, "a transfer", "its progress thread panicked")),
        }
    }
}
