//! A rank's membership in a group.

use std::ops::Range;
use std::rc::Rc;

use kintsugi_tensor::{Backend, Buffer, View};

use super::member::Member;
use super::message::MessageEnd;
use super::shared_gpu::SharedGpu;
use crate::region::Region;
use crate::{Collective, Communicator, Pending, RankFailure, Tag, TransferKind};

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
