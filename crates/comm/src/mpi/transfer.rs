//! Transfers in progress, as state machines: they see addresses and lengths only, so that any thread can advance them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kintsugi_spec::Level;
use kintsugi_tensor::DType;

use super::library::{Api, Bytes, Handle, MAX_BYTES, MpiError};
use crate::emulated::LinkClocks;
use crate::region::{self, Region};
use crate::ring::{self, Action};
use crate::traffic::TrafficCounter;
use crate::{Collective, Operation, all_to_all};

/// Bytes that travel as one message of a ring. While one segment is added, the next ones travel.
const SEGMENT_BYTES: usize = 512 << 10;

/// Receives of a ring that are posted at a time.
const WINDOW: usize = 2;

/// The link that a transfer sends over: counts the bytes that are handed to MPI, and delays them if the link is emulated.
#[derive(Clone, Debug)]
pub(super) struct OutgoingLink {
    pub counter: Arc<TrafficCounter>,
    pub clocks: Arc<LinkClocks>,
    pub level: Level,
    pub operation: Operation,
}

impl OutgoingLink {
    /// Counts bytes. Returns when they arrive, if the link is emulated: MPI gets them only then.
    fn send(&self, bytes: usize) -> Option<Instant> {
        self.counter.add(self.level, self.operation, bytes as u64);
        self.clocks.send(self.level, bytes, Instant::now())
    }
}

/// A communicator and a tag, by which the messages of one transfer find each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Channel {
    pub communicator: Handle,
    pub tag: i32,
}

/// A transfer that MPI works on.
pub(super) enum Transfer {
    Ring(Ring),
    AllToAll(AllToAll),
    Message(Message),
    Library(LibrarySum),
}

impl Transfer {
    /// Advances without waiting. Returns whether anything happened. `now` is the same for all transfers, so that messages leave
    /// emulated links in the order in which they were sent.
    pub fn advance(
        &mut self,
        api: &dyn Api,
        spare: &mut Vec<Staging>,
        now: Instant,
    ) -> Result<bool, MpiError> {
        match self {
            Transfer::Ring(ring) => ring.advance(api, spare, now),
            Transfer::AllToAll(all) => all.advance(api, now),
            Transfer::Message(message) => message.advance(api, now),
            Transfer::Library(sum) => sum.advance(api),
        }
    }

    /// When the next message leaves an emulated link.
    pub fn due(&self) -> Option<Instant> {
        match self {
            Transfer::Ring(ring) => ring.held.front().map(|(arrival, _)| *arrival),
            Transfer::AllToAll(all) => all.messages.iter().filter_map(Message::due).min(),
            Transfer::Message(message) => message.due(),
            Transfer::Library(_) => None,
        }
    }

    /// Whether it has finished.
    pub fn is_done(&self) -> bool {
        match self {
            Transfer::Ring(ring) => ring.is_done(),
            Transfer::AllToAll(all) => all.messages.iter().all(Message::is_done),
            Transfer::Message(message) => message.is_done(),
            Transfer::Library(sum) => sum.request.is_none() && sum.left.is_empty(),
        }
    }
}

/// A place for one segment that was received and is to be added.
pub(super) type Staging = Box<[u64]>;

/// A collective as a ring of messages, in segments.
///
/// Every rank adds and copies in the order of [`ring::step`], so sums are those of every other transport, bit for bit. A
/// segment that was received in one step is sent on in the next one as soon as it is there.
pub(super) struct Ring {
    region: Region,
    collective: Collective,
    ranks: usize,
    me: usize,
    channel: Channel,
    link: OutgoingLink,
    /// The step and the offset in its chunk of the next receive.
    cursor: (usize, usize),
    receives: VecDeque<Receive>,
    sends: VecDeque<(Handle, Range<usize>)>,
    /// Segments on an emulated link, and when each arrives.
    held: VecDeque<(Instant, Range<usize>)>,
}

/// A posted receive of a segment.
struct Receive {
    request: Handle,
    step: usize,
    segment: Range<usize>,
    /// Where it arrives, if it is to be added. Otherwise it arrives in place.
    staging: Option<Staging>,
}

impl Ring {
    /// Starts this rank's part of a collective over the elements of `region`, which are in host memory.
    ///
    /// The region must stay valid, and nobody else may use it, until the transfer is done.
    pub fn start(
        api: &dyn Api,
        region: Region,
        collective: Collective,
        (ranks, me): (usize, usize),
        channel: Channel,
        link: OutgoingLink,
    ) -> Result<Self, MpiError> {
        let mut ring = Ring {
            region,
            collective,
            ranks,
            me,
            channel,
            link,
            cursor: (0, 0),
            receives: VecDeque::with_capacity(WINDOW),
            sends: VecDeque::new(),
            held: VecDeque::new(),
        };
        if ranks == 1 {
            return Ok(ring);
        }
        let first = ring.chunk((me + 1) % ranks, 0);
        for start in first.clone().step_by(ring.segment_elements()) {
            ring.send(api, start..(start + ring.segment_elements()).min(first.end))?;
        }
        Ok(ring)
    }

    /// The chunk that `rank` receives in `step`.
    fn chunk(&self, rank: usize, step: usize) -> Range<usize> {
        let index = ring::step(self.collective, self.ranks, rank, step).chunk;
        ring::chunk(self.region.len(), self.ranks, index)
    }

    fn steps(&self) -> usize {
        ring::step_count(self.collective, self.ranks)
    }

    fn segment_elements(&self) -> usize {
        SEGMENT_BYTES / self.region.dtype().bytes()
    }

    fn is_done(&self) -> bool {
        self.cursor.0 == self.steps()
            && self.receives.is_empty()
            && self.sends.is_empty()
            && self.held.is_empty()
    }

    fn advance(&mut self, api: &dyn Api, spare: &mut Vec<Staging>, now: Instant) -> Result<bool, MpiError> {
        let mut advanced = self.send_held(api, now)?;
        advanced |= self.finish_sends(api)?;
        while let Some(receive) = self.receives.front_mut() {
            let Some(bytes) = api.test(&mut receive.request)? else { break };
            expect_bytes(bytes, receive.segment.len() * self.region.dtype().bytes())?;
            let receive = self.receives.pop_front().expect("it was looked at");
            self.use_segment(api, receive, spare)?;
            advanced = true;
        }
        while self.receives.len() < WINDOW && self.post_receive(api, spare)? {
            advanced = true;
        }
        Ok(advanced)
    }

    fn finish_sends(&mut self, api: &dyn Api) -> Result<bool, MpiError> {
        let before = self.sends.len();
        while let Some((request, _)) = self.sends.front_mut() {
            if api.test(request)?.is_none() {
                break;
            }
            self.sends.pop_front();
        }
        Ok(self.sends.len() < before)
    }

    /// Adds a received segment, if it is to be added, and sends it on in the next step.
    fn use_segment(
        &mut self,
        api: &dyn Api,
        receive: Receive,
        spare: &mut Vec<Staging>,
    ) -> Result<(), MpiError> {
        let Receive { step, segment, staging, .. } = receive;
        if let Some(staging) = staging {
            let received = Region::on_host(staging.as_ptr() as usize, segment.len(), self.region.dtype());
            region::move_elements(Action::Add, received, self.region.part(segment.clone()));
            spare.push(staging);
        }
        if step + 1 < self.steps() { self.send(api, segment) } else { Ok(()) }
    }

    /// Posts the next receive. Returns `false` if there is none, or if its elements are still in use.
    fn post_receive(&mut self, api: &dyn Api, spare: &mut Vec<Staging>) -> Result<bool, MpiError> {
        let (step, segment) = loop {
            let (step, offset) = self.cursor;
            if step == self.steps() {
                return Ok(false);
            }
            let chunk = self.chunk(self.me, step);
            let start = chunk.start + offset;
            if start < chunk.end {
                break (step, start..(start + self.segment_elements()).min(chunk.end));
            }
            self.cursor = (step + 1, 0);
        };
        let adds = ring::step(self.collective, self.ranks, self.me, step).action == Action::Add;
        // The second phase of an all-reduce overwrites elements that the first one adds to and sends.
        let in_use = self.receives.iter().any(|receive| receive.segment == segment)
            || self.sends.iter().any(|(_, sent)| *sent == segment)
            || self.held.iter().any(|(_, held)| *held == segment);
        if !adds && in_use {
            return Ok(false);
        }
        let staging = adds.then(|| spare.pop().unwrap_or_else(|| vec![0; SEGMENT_BYTES / 8].into()));
        let address = match &staging {
            Some(staging) => staging.as_ptr() as usize,
            None => self.region.part(segment.clone()).address(),
        };
        let bytes = Bytes { address, len: segment.len() * self.region.dtype().bytes() };
        let (from, Channel { communicator, tag }) = ((self.me + self.ranks - 1) % self.ranks, self.channel);
        // SAFETY: the staging, or the region, is this transfer's until the receive has finished: no send and no other receive
        // uses it.
        let request = unsafe { api.irecv(bytes, from, tag, communicator) }?;
        self.cursor.1 += segment.len();
        self.receives.push_back(Receive { request, step, segment, staging });
        Ok(true)
    }

    /// Sends a segment, at once or when an emulated link has carried it.
    fn send(&mut self, api: &dyn Api, segment: Range<usize>) -> Result<(), MpiError> {
        match self.link.send(segment.len() * self.region.dtype().bytes()) {
            None => self.hand_to_mpi(api, segment),
            Some(arrival) => {
                self.held.push_back((arrival, segment));
                Ok(())
            }
        }
    }

    /// Hands the segments to MPI that an emulated link has carried. Returns whether there were any.
    fn send_held(&mut self, api: &dyn Api, now: Instant) -> Result<bool, MpiError> {
        let arrived = self.held.iter().take_while(|(arrival, _)| *arrival <= now).count();
        for (_, segment) in self.held.drain(..arrived).collect::<Vec<_>>() {
            self.hand_to_mpi(api, segment)?;
        }
        Ok(arrived > 0)
    }

    fn hand_to_mpi(&mut self, api: &dyn Api, segment: Range<usize>) -> Result<(), MpiError> {
        let part = self.region.part(segment.clone());
        let bytes = Bytes { address: part.address(), len: part.bytes() };
        let (to, Channel { communicator, tag }) = ((self.me + 1) % self.ranks, self.channel);
        // SAFETY: the region is valid until the transfer is done. This rank changes these elements only by a receive that
        // waits for this send, or did so before.
        let request = unsafe { api.isend(bytes, to, tag, communicator) }?;
        self.sends.push_back((request, segment));
        Ok(())
    }
}

/// An all-to-all: a message to and from every other rank, all at once.
pub(super) struct AllToAll {
    messages: Vec<Message>,
}

impl AllToAll {
    /// Starts this rank's part of an all-to-all over the elements of `region`, which are in host memory. `link` is the link to a
    /// rank of the group.
    ///
    /// The region must stay valid, and nobody else may use it, until the transfer is done.
    pub fn start(
        api: &dyn Api,
        region: Region,
        (ranks, me): (usize, usize),
        channel: Channel,
        link: impl Fn(usize) -> OutgoingLink,
    ) -> Result<Self, MpiError> {
        let sent = |to| region.part(all_to_all::sent(region.len(), ranks, to));
        let received = |from| region.part(all_to_all::received(region.len(), ranks, from));
        let bytes = |part: Region| Bytes { address: part.address(), len: part.bytes() };
        region::move_elements(Action::Copy, sent(me), received(me));
        let sources = (1..ranks).map(|step| all_to_all::source(ranks, me, step));
        let receives = sources.map(|from| Message::receive(api, bytes(received(from)), from, channel));
        let receivers = (1..ranks).map(|distance| (me + distance) % ranks);
        let sends = receivers.map(|to| Message::send(api, bytes(sent(to)), to, channel, Some(&link(to))));
        Ok(AllToAll { messages: receives.chain(sends).collect::<Result<_, _>>()? })
    }

    fn advance(&mut self, api: &dyn Api, now: Instant) -> Result<bool, MpiError> {
        let mut advanced = false;
        for message in &mut self.messages {
            advanced |= message.advance(api, now)?;
        }
        Ok(advanced)
    }
}

/// A message to or from one rank.
pub(super) struct Message {
    /// The requests that have not finished, and the bytes that each receives.
    requests: VecDeque<(Handle, Option<usize>)>,
    /// A send on an emulated link, and when it arrives.
    held: Option<(Instant, Send)>,
}

/// A send that MPI does not have yet.
#[derive(Clone, Copy)]
struct Send {
    bytes: Bytes,
    to: usize,
    channel: Channel,
}

impl Message {
    /// Starts sending the bytes at an address to rank `to` of the communicator. Only bytes over a link are counted.
    ///
    /// They must stay valid and unchanged until the transfer is done.
    pub fn send(
        api: &dyn Api,
        bytes: Bytes,
        to: usize,
        channel: Channel,
        link: Option<&OutgoingLink>,
    ) -> Result<Self, MpiError> {
        let send = Send { bytes, to, channel };
        match link.and_then(|link| link.send(bytes.len)) {
            None => Ok(Message { requests: send.hand_to_mpi(api)?, held: None }),
            Some(arrival) => Ok(Message { requests: VecDeque::new(), held: Some((arrival, send)) }),
        }
    }

    /// Starts receiving bytes to an address from rank `from` of the communicator.
    ///
    /// They must stay valid, and nobody may use them, until the transfer is done.
    pub fn receive(api: &dyn Api, bytes: Bytes, from: usize, channel: Channel) -> Result<Self, MpiError> {
        // SAFETY: as asked of the caller.
        let receive = |piece| unsafe { api.irecv(piece, from, channel.tag, channel.communicator) };
        let requests = pieces(bytes).map(|piece| receive(piece).map(|request| (request, Some(piece.len))));
        Ok(Message { requests: requests.collect::<Result<_, _>>()?, held: None })
    }

    fn due(&self) -> Option<Instant> {
        self.held.map(|(arrival, _)| arrival)
    }

    fn is_done(&self) -> bool {
        self.held.is_none() && self.requests.is_empty()
    }

    fn advance(&mut self, api: &dyn Api, now: Instant) -> Result<bool, MpiError> {
        if let Some((_, send)) = self.held.take_if(|(arrival, _)| *arrival <= now) {
            self.requests = send.hand_to_mpi(api)?;
            return Ok(true);
        }
        let before = self.requests.len();
        while let Some((request, expected)) = self.requests.front_mut() {
            let Some(bytes) = api.test(request)? else { break };
            expected.map_or(Ok(()), |expected| expect_bytes(bytes, expected))?;
            self.requests.pop_front();
        }
        Ok(self.requests.len() < before)
    }
}

impl Send {
    fn hand_to_mpi(self, api: &dyn Api) -> Result<VecDeque<(Handle, Option<usize>)>, MpiError> {
        let Send { bytes, to, channel } = self;
        // SAFETY: the bytes stay valid and unchanged until the transfer is done, as `Message::send` asks.
        let send = |piece| unsafe { api.isend(piece, to, channel.tag, channel.communicator) };
        pieces(bytes).map(|piece| send(piece).map(|request| (request, None))).collect()
    }
}

/// The pieces of a message that MPI can count. An empty message has one piece, too, so that its receiver waits for it.
fn pieces(bytes: Bytes) -> impl Iterator<Item = Bytes> {
    let starts = (0..bytes.len.max(1)).step_by(MAX_BYTES);
    starts.map(move |start| Bytes { address: bytes.address + start, len: (bytes.len - start).min(MAX_BYTES) })
}

/// The library's own sum, which chooses its own order.
pub(super) struct LibrarySum {
    communicator: Handle,
    request: Option<Handle>,
    /// What it has not started yet.
    left: Range<usize>,
    region: Region,
}

impl LibrarySum {
    /// Whether the library can sum elements of a type. MPI has no 16-bit floats.
    pub fn supports(dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::F64)
    }

    /// Starts a sum of the elements of `region` over all ranks of a communicator.
    ///
    /// The region must stay valid, and nobody else may use it, until the transfer is done.
    pub fn start(api: &dyn Api, region: Region, communicator: Handle) -> Result<Self, MpiError> {
        let mut sum = LibrarySum { communicator, request: None, left: 0..region.len(), region };
        sum.start_piece(api)?;
        Ok(sum)
    }

    /// Sums the elements of `region` over all ranks of a communicator, and waits for it.
    ///
    /// Nobody else may use the region.
    pub fn run(api: &dyn Api, region: Region, communicator: Handle) -> Result<(), MpiError> {
        let (most, wide) = (MAX_BYTES / region.dtype().bytes(), region.dtype() == DType::F64);
        (0..region.len()).step_by(most).try_for_each(|start| {
            let piece = region.part(start..(start + most).min(region.len()));
            // SAFETY: the elements are those of the region, which nobody else uses.
            unsafe { api.allreduce(piece.address(), piece.len(), wide, communicator) }
        })
    }

    fn start_piece(&mut self, api: &dyn Api) -> Result<(), MpiError> {
        let size = self.region.dtype().bytes();
        let piece = self.left.start..self.left.end.min(self.left.start + MAX_BYTES / size);
        if !piece.is_empty() {
            let (address, wide) =
                (self.region.part(piece.clone()).address(), self.region.dtype() == DType::F64);
            // SAFETY: the elements are those of the region, which is valid until the transfer is done.
            let request = unsafe { api.iallreduce(address, piece.len(), wide, self.communicator) }?;
            self.request = Some(request);
        }
        self.left.start = piece.end;
        Ok(())
    }

    fn advance(&mut self, api: &dyn Api) -> Result<bool, MpiError> {
        let Some(request) = &mut self.request else { return Ok(false) };
        if api.test(request)?.is_none() {
            return Ok(false);
        }
        self.request = None;
        self.start_piece(api)?;
        Ok(true)
    }
}

fn expect_bytes(found: usize, expected: usize) -> Result<(), MpiError> {
    if found == expected {
        return Ok(());
    }
    let message =
        format!("{expected} bytes were expected and {found} received: the ranks do not run the same program");
    Err(MpiError { call: "MPI_Irecv", message })
}
