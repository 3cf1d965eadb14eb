//! A rank's membership in a group, and the only place where a rank waits.

use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kintsugi_tensor::{Backend, Buffer, View};

use super::WorldState;
use super::group_state::{GroupState, Transfers};
use super::message::MessageEnd;
use super::shared_gpu::SharedGpu;
use crate::activity::Activity;
use crate::region::{self, Region};
use crate::ring::Action;
use crate::{Collective, Communicator, Operation, Pending, RankFailure, Tag, TransferKind};

/// A rank's membership in a group of threads.
#[derive(Clone, Debug)]
pub struct ThreadsGroup {
    pub(super) world: Arc<WorldState>,
    pub(super) shared: Arc<GroupState>,
    /// This rank's index in the group.
    pub(super) me: usize,
    /// Moves elements in GPU memory.
    gpu: Option<SharedGpu>,
}

/// The longest time that a rank waits before it checks the timeout.
const SLICE: Duration = Duration::from_millis(200);

impl ThreadsGroup {
    pub(super) fn new(world: Arc<WorldState>, shared: Arc<GroupState>, me: usize) -> Self {
        ThreadsGroup { world, shared, me, gpu: None }
    }

    /// The same membership for ranks that share a GPU. `backend` is this rank's stream on it.
    #[must_use]
    pub fn on_gpu(self, backend: Rc<dyn Backend>) -> Self {
        ThreadsGroup { gpu: Some(SharedGpu::new(backend)), ..self }
    }

    /// Copies or adds elements from one rank to another, and counts the bytes for the sender.
    pub(super) fn move_elements(
        &self,
        operation: Operation,
        action: Action,
        from: (usize, Region),
        to: (usize, Region),
    ) {
        match &self.gpu {
            Some(gpu) => gpu.move_elements(action, from.1, to.1),
            None => region::move_elements(action, from.1, to.1),
        }
        self.world.charge(operation, from.0, to.0, from.1.bytes());
    }

    /// The memory of a transfer that starts. On a GPU, waits until the rank's stream has written it.
    fn publish(&self, view: View) -> Region {
        if let Some(gpu) = &self.gpu {
            gpu.synchronize();
        }
        Region::of(view)
    }

    /// The rank of the world of a member of the group.
    pub(super) fn global(&self, member: usize) -> usize {
        self.shared.members[member]
    }

    /// Waits until `ready` returns a value. `None` if the world stops, or at the timeout, which stops it. The reason of a
    /// timeout is what `missing` returns: the rank that is missing, and what it has not done.
    ///
    /// The rank waits in short intervals, and each counts for at most its own length. So the time during which the whole
    /// process is stopped, as by SIGSTOP, does not count towards the timeout.
    pub(super) fn sleep_until<T>(
        &self,
        during: Activity,
        mut ready: impl FnMut(&mut Transfers) -> Option<T>,
        missing: impl Fn(&mut Transfers) -> (usize, String),
    ) -> Option<T> {
        let timeout = self.world.timeout;
        let mut left = timeout;
        let mut transfers = self.shared.lock();
        loop {
            // Under the lock: a rank that sees the failure and then takes the lock knows that no move begins any more.
            if self.has_failed() {
                return None;
            }
            if let Some(found) = ready(&mut transfers) {
                return Some(found);
            }
            if left.is_zero() {
                let (peer, reason) = missing(&mut transfers);
                drop(transfers);
                self.fail(during, peer, format!("after {timeout:?}, {reason}"));
                return None;
            }
            let (begun, slice) = (Instant::now(), left.min(SLICE));
            let condvar = self.shared.condvar(self.me);
            transfers = condvar.wait_timeout(transfers, slice).unwrap_or_else(PoisonError::into_inner).0;
            left -= begun.elapsed().min(slice);
        }
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

    fn start_message(&self, end: MessageEnd, peer: usize, tag: Tag, buffer: Buffer) -> Pending {
        let all = 0..buffer.len();
        let sequence = self.join_message(end, peer, tag, self.publish(buffer.view()));
        Pending::new(buffer, all, TransferKind::Message { sequence })
    }
}

impl Communicator for ThreadsGroup {
    fn rank(&self) -> usize {
        self.me
    }

    fn size(&self) -> usize {
        self.shared.members.len()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        let sequence = self.start_collective(collective, self.publish(buffer.slice(range.clone())));
        Pending::new(buffer, range, TransferKind::Collective { collective, sequence })
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
                self.run_collective(collective, sequence, region);
            }
            TransferKind::Message { sequence } => self.pass_message(sequence, region),
        }
        pending.finish()
    }

    fn failure(&self) -> Option<RankFailure> {
        self.world.failure.get().cloned()
    }
}
