//! A rank's membership in a group of GPUs that communicate by NCCL.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_spec::{Group, Places};
use kintsugi_tensor::{Buffer, SideEvent, SideStream, SideTransfer, View};

use super::communicator::{Communicator as NcclCommunicator, StartedTransfer};
use super::job_state::JobState;
use super::library::{Api, Elements, EnqueueTarget, NcclError};
use super::links::MessageLink;
use crate::activity::Activity;
use crate::paper::{Entry, Transfer, sent_bytes};
use crate::{Collective, Communicator, Operation, Pending, RankFailure, Tag, TransferKind, all_to_all, ring};

/// A rank's membership in a group of GPUs.
pub struct NcclGroup {
    state: Arc<JobState>,
    group: Group,
    members: Vec<usize>,
    /// This rank's index in the group.
    me: usize,
    places: Places,
    collectives: StreamCommunicator,
    /// The communicators of this rank's messages, in the order of their rounds.
    links: Vec<(MessageLink, StreamCommunicator)>,
    /// Transfers so far.
    started: Cell<u64>,
    /// The transfers that are not waited for yet, by number.
    in_flight: RefCell<HashMap<u64, InFlight>>,
}

/// The end of a transfer, and the stream on which it runs.
struct InFlight {
    end: SideEvent,
    stream: Rc<dyn SideStream>,
}

/// A communicator and the side stream on which it works.
///
/// Every communicator has a stream of its own: a transfer that waits for another rank holds up its stream, and transfers of
/// different groups start in different orders on different ranks.
#[derive(Clone)]
pub(super) struct StreamCommunicator {
    pub communicator: Arc<NcclCommunicator>,
    pub stream: Rc<dyn SideStream>,
}

impl NcclGroup {
    pub(super) fn new(
        state: Arc<JobState>,
        (group, members, me): (Group, &[usize], usize),
        places: Places,
        collectives: StreamCommunicator,
        links: Vec<(MessageLink, StreamCommunicator)>,
    ) -> Self {
        NcclGroup {
            state,
            group,
            members: members.to_vec(),
            me,
            places,
            collectives,
            links,
            started: Cell::new(0),
            in_flight: RefCell::default(),
        }
    }

    /// The links of this rank's messages, in the order of their rounds.
    pub(super) fn links(&self) -> impl Iterator<Item = MessageLink> + '_ {
        self.links.iter().map(|(link, _)| *link)
    }

    /// Enqueues a transfer of a part of a buffer on a side stream, in which this rank sends or receives this many
    /// bytes. Returns its number.
    fn begin(
        &self,
        carrier: &StreamCommunicator,
        transfer: StartedTransfer,
        (view, sent): (View, usize),
        kind: u64,
        enqueue: impl Fn(&Api, Elements, EnqueueTarget) -> Result<(), NcclError>,
    ) -> u64 {
        let number = self.started.replace(self.started.get() + 1);
        if self.state.has_failed() {
            return number;
        }
        let elements = Elements { address: view.address(), len: view.len(), dtype: view.dtype() };
        let bytes = elements.len * elements.dtype.bytes();
        let name = || format!("{} over {}", self.kind_name(transfer.activity), self.group);
        let words = [kind, elements.address, bytes as u64, elements.dtype as u64];
        let mut enqueued = Ok(());
        let side = SideTransfer { name: &name, bytes: sent as u64, words: &words };
        let end = carrier.stream.start(&side, &mut |stream| {
            enqueued =
                carrier.communicator.enqueue(transfer, stream, |api, target| enqueue(api, elements, target));
        });
        let stream = Rc::clone(&carrier.stream);
        self.in_flight.borrow_mut().insert(number, InFlight { end, stream });
        if let Err(error) = enqueued {
            self.state.fail_in(Some(transfer), error.to_string());
        }
        number
    }

    fn kind_name(&self, activity: Activity) -> &'static str {
        match activity {
            Activity::Collective { collective, .. } => collective.operation().name(),
            Activity::Message { from, .. } if from == self.members[self.me] => "send",
            Activity::Message { .. } => "receive",
            Activity::Exchange { .. } | Activity::Group { .. } | Activity::End => "exchange",
        }
    }

    /// Counts bytes that this rank sends to a member.
    fn count(&self, operation: Operation, to: usize, bytes: usize) {
        let level = self.places.level(self.members[self.me], self.members[to]);
        self.state.traffic.add(level, operation, bytes as u64);
    }

    fn link(&self, link: MessageLink) -> &StreamCommunicator {
        let found = self.links.iter().find_map(|(known, carrier)| (*known == link).then_some(carrier));
        found.unwrap_or_else(|| {
            panic!("group {} has no link for messages from member {} to {}", self.group, link.from, link.to)
        })
    }

    fn message(&self, tag: Tag, from: usize, to: usize, buffer: Buffer) -> Pending {
        let sends = from == self.me;
        let peer = self.members[if sends { to } else { from }];
        let activity =
            Activity::Message { group: self.group, from: self.members[from], to: self.members[to], tag };
        let transfer = StartedTransfer { activity, peer: Some(peer) };
        let (carrier, view) = (self.link(MessageLink::of(tag, from, to)), buffer.view());
        if sends {
            self.count(Operation::Send, to, view.bytes());
        }
        // The sender is rank 0 of the communicator of its link, and the receiver rank 1.
        let number = self.begin(
            carrier,
            transfer,
            (view, view.bytes()),
            3 + u64::from(sends),
            |api, elements, target| {
                // SAFETY: the buffer belongs to the transfer until it is waited for. The lock of the communicator is held, and its stream
                // lives as long as the group.
                unsafe {
                    if sends { api.send(elements, 1, target) } else { api.receive(elements, 0, target) }
                }
            },
        );
        let all = 0..buffer.len();
        Pending::new(buffer, all, TransferKind::Message { sequence: number })
    }
}

/// Enqueues a collective over the elements of a part of a buffer.
///
/// The library needs chunks of the same length. If the chunks differ by an element, they are broadcast or reduced one by one, in
/// one piece of work.
///
/// # Safety
/// See the contract of [`Api`].
unsafe fn enqueue(
    api: &Api,
    collective: Collective,
    all: Elements,
    (ranks, me): (usize, usize),
    target: EnqueueTarget,
) -> Result<(), NcclError> {
    if all.len == 0 {
        return Ok(());
    }
    let chunk = |index| all.part(&ring::chunk(all.len, ranks, index));
    let each = |call: &dyn Fn(Elements, usize) -> Result<(), NcclError>| {
        let chunks = (0..ranks).map(|index| (chunk(index), index)).filter(|(chunk, _)| chunk.len > 0);
        api.grouped(|| chunks.into_iter().try_for_each(|(chunk, index)| call(chunk, index)))
    };
    let equal = all.len.is_multiple_of(ranks);
    // SAFETY: chunks are parts of the elements; the rest is the caller's promise.
    unsafe {
        match collective {
            Collective::AllReduce => api.all_reduce(all, target),
            Collective::AllGather if equal => api.all_gather(chunk(me), all, target),
            Collective::AllGather => each(&|chunk, owner| api.broadcast(chunk, owner, target)),
            Collective::ReduceScatter if equal => api.reduce_scatter(chunk(me), all, target),
            Collective::ReduceScatter => each(&|chunk, owner| api.reduce(chunk, owner, target)),
            Collective::AllToAll => api.grouped(|| {
                (0..ranks).try_for_each(|peer| {
                    api.send(all.part(&all_to_all::sent(all.len, ranks, peer)), peer, target)?;
                    api.receive(all.part(&all_to_all::received(all.len, ranks, peer)), peer, target)
                })
            }),
        }
    }
}

impl Communicator for NcclGroup {
    fn rank(&self) -> usize {
        self.me
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        assert!(!collective.sums() || buffer.dtype().is_float(), "token ids and bytes are not summed");
        let (ranks, me, view) = (self.size(), self.me, buffer.slice(range.clone()));
        let (group, transfer) = (self.group, Transfer::Collective(collective));
        let entry = Entry { group, transfer, len: view.len(), dtype: view.dtype() };
        let mut sent = 0;
        for (level, operation, bytes) in
            sent_bytes(entry, ranks, me, |i| self.members[i], self.places.clone())
        {
            self.state.traffic.add(level, operation, bytes);
            sent += bytes as usize;
        }
        let sequence = self.started.get();
        let activity = Activity::Collective { group: self.group, collective, sequence };
        let peer = (ranks == 2).then(|| self.members[1 - me]);
        let transfer = StartedTransfer { activity, peer };
        let number = self.begin(
            &self.collectives,
            transfer,
            (view, sent),
            collective as u64,
            |api, elements, target| {
                // SAFETY: as in `message`.
                unsafe { enqueue(api, collective, elements, (ranks, me), target) }
            },
        );
        Pending::new(buffer, range, TransferKind::Collective { collective, sequence: number })
    }

    fn send(&self, to: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.message(tag, self.me, to, buffer)
    }

    fn receive(&self, from: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.message(tag, from, self.me, buffer)
    }

    fn wait(&self, pending: Pending) -> Buffer {
        let (TransferKind::Collective { sequence: number, .. } | TransferKind::Message { sequence: number }) =
            pending.kind;
        if let Some(InFlight { end, stream }) = self.in_flight.borrow_mut().remove(&number) {
            stream.join(end);
        }
        pending.finish()
    }

    fn failure(&self) -> Option<RankFailure> {
        // Asked after every op, so the common case is one load.
        self.state.has_failed().then(|| self.state.failure()).flatten()
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        for carrier in self.links.iter().map(|(_, carrier)| carrier).chain([&self.collectives]) {
            if self.state.has_failed() || std::thread::panicking() {
                carrier.communicator.abort();
            }
            // NCCL frees a communicator only after its work has ended and the graphs that contain it are gone.
            carrier.stream.finish();
        }
    }
}
