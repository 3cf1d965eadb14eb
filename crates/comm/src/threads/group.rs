//! A rank's membership in a group: the [`Communicator`], and what the rank and its progress thread both use to run transfers.

use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kintsugi_spec::work::finished_pieces;
use kintsugi_tensor::{Backend, Buffer, View};

use super::group_state::{GroupState, Transfers};
use super::message::MessageEnd;
use super::shared_gpu::SharedGpu;
use super::{WorldState, lock};
use crate::activity::Activity;
use crate::notice::print_notice;
use crate::patience::{Decision, Patience, SLICE, STEP_NOTICE};
use crate::region::{self, Region};
use crate::ring::Action;
use crate::{Collective, Communicator, Operation, Pending, RankFailure, Tag, TransferKind};

/// A rank's membership in a group of threads.
#[derive(Clone, Debug)]
pub struct ThreadsGroup {
    pub(super) member: Member,
    /// Moves elements in GPU memory.
    gpu: Option<SharedGpu>,
}

impl ThreadsGroup {
    /// A group whose tensors are in host memory. The rank's progress thread moves them, too.
    pub(super) fn on_host(member: Member) -> Self {
        let rank = member.global(member.me);
        member.world.inboxes[rank].add(&member.shared, member.me);
        ThreadsGroup { member, gpu: None }
    }

    /// A group of ranks that share a GPU. `backend` is this rank's stream on it.
    pub(super) fn on_gpu(member: Member, backend: Rc<dyn Backend>) -> Self {
        ThreadsGroup { member, gpu: Some(SharedGpu::new(backend)) }
    }

    /// The memory of a transfer that starts. On a GPU, waits until the rank's stream has written it.
    fn publish(&self, view: View) -> Region {
        if let Some(gpu) = &self.gpu {
            gpu.synchronize();
        }
        Region::of(view)
    }

    fn start_collective(
        &self,
        collective: Collective,
        buffer: Buffer,
        range: Range<usize>,
        waits: bool,
    ) -> Pending {
        let region = self.publish(buffer.slice(range.clone()));
        let sequence = self.member.start_collective(collective, region, waits);
        Pending::new(buffer, range, TransferKind::Collective { collective, sequence })
    }

    fn start_message(&self, end: MessageEnd, peer: usize, tag: Tag, buffer: Buffer) -> Pending {
        let all = 0..buffer.len();
        let sequence = self.member.join_message(end, peer, tag, self.publish(buffer.view()));
        Pending::new(buffer, all, TransferKind::Message { sequence })
    }
}

impl Communicator for ThreadsGroup {
    fn rank(&self) -> usize {
        self.member.me
    }

    fn size(&self) -> usize {
        self.member.size()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        self.start_collective(collective, buffer, range, false)
    }

    fn send(&self, to: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.start_message(MessageEnd::Sender, to, tag, buffer)
    }

    fn receive(&self, from: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.start_message(MessageEnd::Receiver, from, tag, buffer)
    }

    fn wait(&self, pending: Pending) -> Buffer {
        let region = Region::of(pending.buffer.slice(pending.range.clone()));
        match pending.kind {
            TransferKind::Collective { collective, sequence } => {
                self.member.run_collective(collective, sequence, region, self.gpu.as_ref());
            }
            TransferKind::Message { sequence } => {
                self.member.pass_message(sequence, region, self.gpu.as_ref());
            }
        }
        pending.finish()
    }

    fn run(&self, collective: Collective, buffer: Buffer) -> Buffer {
        let all = 0..buffer.len();
        self.wait(self.start_collective(collective, buffer, all, true))
    }

    fn failure(&self) -> Option<RankFailure> {
        self.member.world.failure.get().cloned()
    }
}

/// What a rank and its progress thread both use to run the rank's transfers in a group.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) world: Arc<WorldState>,
    pub(super) shared: Arc<GroupState>,
    /// This rank's index in the group.
    pub(super) me: usize,
}

/// When a transfer can go on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Next<T> {
    /// Now, with this.
    Now(T),
    /// At a known time: the data is on an emulated link.
    At(Instant),
    /// When another rank has done its part.
    AfterOthers,
}

impl Member {
    pub(super) fn new(world: Arc<WorldState>, shared: Arc<GroupState>, me: usize) -> Self {
        Member { world, shared, me }
    }

    /// Ranks in the group.
    pub(super) fn size(&self) -> usize {
        self.shared.members.len()
    }

    /// The rank of the world of a member of the group.
    pub(super) fn global(&self, member: usize) -> usize {
        self.shared.members[member]
    }

    /// Copies or adds elements from one rank to another, and counts the bytes for the sender. Returns when they arrive, if they
    /// take time on an emulated link since both ranks were `ready`. `gpu` moves elements in GPU memory.
    pub(super) fn move_elements(
        &self,
        operation: Operation,
        action: Action,
        from: (usize, Region),
        to: (usize, Region),
        ready: Instant,
        gpu: Option<&SharedGpu>,
    ) -> Option<Instant> {
        let ends = (self.global(from.0), self.global(to.0));
        let arrival = self.world.send(operation, ends, from.1.bytes(), ready);
        move_within(action, from.1, to.1, gpu);
        arrival
    }

    /// Advances all transfers of this rank in this group as far as they can go now, except those that the rank waits for.
    /// Returns when the first of them can go on, if that is known.
    pub(super) fn advance_all(&self) -> Option<Instant> {
        self.advance_collectives().into_iter().chain(self.advance_messages()).min()
    }

    /// Wakes a member after a change of a transfer: the member itself if it waits for that transfer, or else its progress
    /// thread.
    pub(super) fn wake(&self, member: usize, waits: bool) {
        if waits {
            self.shared.wake(member);
        } else {
            self.world.inboxes[self.global(member)].ring();
        }
    }

    /// Waits until `ready` returns a value. `None` if the world stops, or at the timeout, which stops it. `missing` returns the rank
    /// that is missing, and `describe` what it has not done, which is the reason of a timeout. A step allocates nothing, so only
    /// `describe` may.
    ///
    /// The rank waits in short intervals, and each counts for at most its own length. So the time during which the whole
    /// process is stopped, as by SIGSTOP, does not count towards the timeout. Time on an emulated link does not count, either. Other
    /// ranks that load or write begin the timeout anew.
    pub(super) fn sleep_until<T>(
        &self,
        during: Activity,
        mut ready: impl FnMut(&mut Transfers) -> Next<T>,
        missing: impl Fn(&mut Transfers) -> usize,
        describe: impl Fn(&mut Transfers) -> String,
    ) -> Option<T> {
        let timeout = self.world.timeout;
        let mut patience = Patience::new(timeout, STEP_NOTICE);
        let _registered = RegisteredWait(self);
        let mut transfers = self.shared.lock();
        loop {
            // Under the lock: a rank that sees the failure and then takes the lock knows that no move begins any more.
            if self.has_failed() {
                return None;
            }
            let begun = Instant::now();
            let (slice, counts) = match ready(&mut transfers) {
                Next::Now(found) => return Some(found),
                Next::At(due) => (due.saturating_duration_since(begun), false),
                Next::AfterOthers if patience.left().is_zero() => {
                    let (peer, reason) = (missing(&mut transfers), describe(&mut transfers));
                    drop(transfers);
                    self.fail_stalled(during, peer, &format!("after {timeout:?}, {reason}"));
                    return None;
                }
                Next::AfterOthers => (patience.left().min(SLICE), true),
            };
            let condvar = self.shared.condvar(self.me);
            transfers = condvar.wait_timeout(transfers, slice).unwrap_or_else(PoisonError::into_inner).0;
            let passed = begun.elapsed().min(slice);
            if !counts {
                continue;
            }
            let decision = patience.pass(passed, finished_pieces());
            if passed == slice {
                let peer = missing(&mut transfers);
                self.register_wait(during, peer);
                if decision == Decision::Notify {
                    let (me, waited) = (self.global(self.me), patience.waited().as_secs());
                    let words = self.world.chain(me, self.global(peer)).words;
                    print_notice(&format!("rank {me} has waited {waited} s in {during} for {words}"));
                }
            }
        }
    }

    /// Says whom this rank waits for.
    fn register_wait(&self, during: Activity, peer: usize) {
        *lock(&self.world.waits[self.global(self.me)]) = Some((self.global(peer), during));
    }

    /// Stops the world because this rank has waited too long. Names the end of the chain of waits.
    fn fail_stalled(&self, during: Activity, peer: usize, reason: &str) {
        let (me, peer) = (self.global(self.me), self.global(peer));
        let end = self.world.chain(me, peer);
        let reason = if end.rank == Some(peer) {
            reason.to_owned()
        } else {
            format!("{reason}; it waits for {}", end.words)
        };
        let failure = RankFailure::stalled(me, during.to_string(), end.rank);
        self.world.abort(RankFailure { reason, blame: end.blame, ..failure });
    }

    /// After a failure: waits until `unused` is true, which a rank in the middle of a move soon makes it.
    pub(super) fn leave_after_failure(&self, unused: impl Fn(&mut Transfers) -> bool) {
        let mut transfers = self.shared.lock();
        while !unused(&mut transfers) {
            let condvar = self.shared.condvar(self.me);
            let waited = condvar.wait_timeout(transfers, Duration::from_millis(1));
            transfers = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the world has stopped.
    pub(super) fn has_failed(&self) -> bool {
        self.world.failure.get().is_some()
    }

    /// Stops the world. `peer` is the member of the group that this rank waited for.
    pub(super) fn fail(&self, during: Activity, peer: usize, reason: String) {
        let (me, peer) = (self.global(self.me), self.global(peer));
        self.world.abort(RankFailure::in_transfer(me, during.to_string(), peer, reason));
    }
}

/// Removes what a rank has registered of its wait.
struct RegisteredWait<'a>(&'a Member);

impl Drop for RegisteredWait<'_> {
    fn drop(&mut self) {
        let member = self.0;
        *lock(&member.world.waits[member.global(member.me)]) = None;
    }
}

/// Copies or adds elements within the memory that ranks share. `gpu` moves elements in GPU memory.
pub(super) fn move_within(action: Action, from: Region, to: Region, gpu: Option<&SharedGpu>) {
    match gpu {
        Some(gpu) => gpu.move_elements(action, from, to),
        None => region::move_elements(action, from, to),
    }
}
