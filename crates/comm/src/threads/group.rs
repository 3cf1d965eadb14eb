//! A rank's handle on a group, and the one place where a rank sleeps.

use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kintsugi_tensor::{Backend, Buffer, View};

use super::board::{Board, Posts};
use super::memory::{self, Gpu, Region};
use super::message::End;
use super::{Failure, World};
use crate::ring::Action;
use crate::{Collective, Communicator, Operation, Pending, Tag, Work};

/// A rank's membership in a group of threads.
#[derive(Clone, Debug)]
pub struct ThreadsGroup {
    pub(super) world: Arc<World>,
    pub(super) board: Arc<Board>,
    /// This rank's index in the group.
    pub(super) me: usize,
    /// Moves what lies in a GPU's memory.
    gpu: Option<Gpu>,
}

/// The longest time that a rank sleeps before it looks at the clock.
const SLICE: Duration = Duration::from_millis(200);

/// What a rank is doing, for messages.
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
    pub(super) fn new(world: Arc<World>, board: Arc<Board>, me: usize) -> Self {
        ThreadsGroup { world, board, me, gpu: None }
    }

    /// The same membership for ranks that share a GPU; `backend` is this rank's stream on it.
    #[must_use]
    pub fn on_gpu(self, backend: Rc<dyn Backend>) -> Self {
        ThreadsGroup { gpu: Some(Gpu::new(backend)), ..self }
    }

    /// Moves memory from one rank to another and charges the one that it comes from.
    pub(super) fn carry(
        &self,
        operation: Operation,
        action: Action,
        from: (usize, Region),
        to: (usize, Region),
    ) {
        match &self.gpu {
            Some(gpu) => gpu.carry(action, from.1, to.1),
            None => memory::carry(action, from.1, to.1),
        }
        self.world.charge(operation, from.0, to.0, from.1.bytes());
    }

    /// The memory of a transfer that begins, ready for others to use.
    fn offer(&self, view: View) -> Region {
        if let Some(gpu) = &self.gpu {
            gpu.settle();
        }
        Region::of(view)
    }

    /// The rank in the world of a member of the group.
    pub(super) fn global(&self, member: usize) -> usize {
        self.board.members[member]
    }

    /// Sleeps until `ready` finds what it looks for on the board. Panics if the world stops, or at the timeout; then
    /// `missing` says which ranks did not come.
    ///
    /// The rank sleeps in slices, and each counts for at most its own length. So the time during which the whole
    /// process is stopped, as by SIGSTOP, is not counted: it makes one slice longer.
    pub(super) fn sleep_until<T>(
        &self,
        during: Activity,
        mut ready: impl FnMut(&mut Posts) -> Option<T>,
        missing: impl Fn(&mut Posts) -> String,
    ) -> T {
        let timeout = self.world.timeout();
        let mut left = timeout;
        let mut posts = self.board.lock();
        loop {
            self.assert_running(during);
            if let Some(found) = ready(&mut posts) {
                return found;
            }
            if left.is_zero() {
                let reason = format!("after {timeout:?}, {}", missing(&mut posts));
                drop(posts);
                self.fail(during, reason);
            }
            let (begun, slice) = (Instant::now(), left.min(SLICE));
            let bell = self.board.bell(self.me);
            posts = bell.wait_timeout(posts, slice).unwrap_or_else(PoisonError::into_inner).0;
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
        let failure = Failure { rank: self.global(self.me), during: during.to_string(), reason };
        self.world.abort(failure.clone());
        panic!("{failure}");
    }

    fn start_message(&self, end: End, peer: usize, tag: Tag, buffer: Buffer) -> Pending {
        let all = 0..buffer.len();
        let sequence = self.post_message(end, peer, tag, self.offer(buffer.view()));
        Pending::new(buffer, all, Work::Message { sequence })
    }
}

impl Communicator for ThreadsGroup {
    fn rank(&self) -> usize {
        self.me
    }

    fn size(&self) -> usize {
        self.board.members.len()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        let sequence = self.post_collective(collective, self.offer(buffer.slice(range.clone())));
        Pending::new(buffer, range, Work::Collective { collective, sequence })
    }

    fn send(&self, to: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.start_message(End::Sender, to, tag, buffer)
    }

    fn receive(&self, from: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.start_message(End::Receiver, from, tag, buffer)
    }

    fn wait(&self, pending: Pending) -> Buffer {
        let region = Region::of(pending.buffer.slice(pending.range.clone()));
        match pending.work {
            Work::Collective { collective, sequence } => self.run_collective(collective, sequence, region),
            Work::Message { sequence } => self.pass_message(sequence, region),
        }
        pending.finish()
    }
}
