//! A rank's membership in a group, and the only place where a rank waits.

use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kintsugi_tensor::{Backend, Buffer, View};

use super::group_state::{GroupState, Transfers};
use super::memory::{self, Region, SharedGpu};
use super::message::MessageEnd;
use super::{RankFailure, World};
use crate::ring::Action;
use crate::{Collective, Communicator, Operation, Pending, Tag, TransferKind};

/// A rank's membership in a group of threads.
#[derive(Clone, Debug)]
pub struct ThreadsGroup {
    pub(super) world: Arc<World>,
    pub(super) shared: Arc<GroupState>,
    /// This rank's index in the group.
    pub(super) me: usize,
    /// Moves elements in GPU memory.
    gpu: Option<SharedGpu>,
}

/// The longest time that a rank waits before it checks the timeout.
const SLICE: Duration = Duration::from_millis(200);

/// What a rank is doing, for error messages.
#[derive(Clone, Copy, Debug)]
pub(super) enum Activity {
    Collective { group: &'static str, collective: Collective, sequence: u64 },
    Message { group: &'static str, from: usize, to: usize, tag: Tag },
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Activity::Collective { group, collective, sequence } => {
                write!(f, "{} number {sequence} of group {group}", collective.operation().name())
            }
            Activity::Message { group, from, to, tag } => {
                write!(f, "send from rank {from} to rank {to} with tag {tag} of group {group}")
            }
        }
    }
}

impl ThreadsGroup {
    pub(super) fn new(world: Arc<World>, shared: Arc<GroupState>, me: usize) -> Self {
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
            None => memory::move_elements(action, from.1, to.1),
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

    /// Waits until `ready` returns a value. Panics if the world stops, or at the timeout. The message of a timeout has the
    /// text of `missing`, which names the missing ranks.
    ///
    /// The rank waits in short intervals, and each counts for at most its own length. So the time during which the whole
    /// process is stopped, as by SIGSTOP, does not count towards the timeout.
    pub(super) fn sleep_until<T>(
        &self,
        during: Activity,
        mut ready: impl FnMut(&mut Transfers) -> Option<T>,
        missing: impl Fn(&mut Transfers) -> String,
    ) -> T {
        let timeout = self.world.timeout();
        let mut left = timeout;
        let mut transfers = self.shared.lock();
        loop {
            self.assert_running(during);
            if let Some(found) = ready(&mut transfers) {
                return found;
            }
            if left.is_zero() {
                let reason = format!("after {timeout:?}, {}", missing(&mut transfers));
                drop(transfers);
                self.fail(during, reason);
            }
            let (begun, slice) = (Instant::now(), left.min(SLICE));
            let condvar = self.shared.condvar(self.me);
            transfers = condvar.wait_timeout(transfers, slice).unwrap_or_else(PoisonError::into_inner).0;
            left -= begun.elapsed().min(slice);
        }
    }

    /// Panics if the world has stopped.
    pub(super) fn assert_running(&self, during: Activity) {
        if let Some(failure) = self.world.failure() {
            panic!("rank {} stops in {during}: {failure}", self.global(self.me));
        }
    }

    /// Stops the world.
    pub(super) fn fail(&self, during: Activity, reason: String) -> ! {
        let failure = RankFailure { rank: self.global(self.me), during: during.to_string(), reason };
        self.world.abort(failure.clone());
        panic!("{failure}");
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
}
