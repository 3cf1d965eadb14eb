//! A rank's membership in a group of processes.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kintsugi_spec::{Group, Places};
use kintsugi_tensor::{AddressSpace, Backend, Buffer, DType, View};

use super::Mpi;
use super::library::{Bytes, Handle};
use super::progress::TransferInfo;
use super::transfer::{AllToAll, Channel, LibrarySum, Message, OutgoingLink, Ring, Transfer};
use crate::activity::Activity;
use crate::emulated::LinkClocks;
use crate::patience::STEP_NOTICE;
use crate::region::Region;
use crate::traffic::TrafficCounter;
use crate::{Collective, Communicator, Operation, Pending, RankFailure, Tag, TransferKind, ring};

/// A rank's membership in a group of processes.
pub struct MpiGroup {
    mpi: &'static Mpi,
    group: Group,
    members: Vec<usize>,
    /// This rank's index in the group.
    me: usize,
    communicator: Handle,
    places: Places,
    counter: Arc<TrafficCounter>,
    clocks: Arc<LinkClocks>,
    timeout: Duration,
    /// Collectives so far. Each has a tag of its own.
    collectives: Cell<u64>,
    /// Whether sums may be the library's own, in its own order.
    library_sums: bool,
    /// The rank's device, if its tensors are not in host memory.
    device: Option<Rc<dyn Backend>>,
    /// Host copies of the tensors that are being transferred, by the number of the transfer.
    host_copies: RefCell<HashMap<u64, HostCopy>>,
}

/// A tensor's copy in host memory, aligned for every type.
struct HostCopy {
    words: Vec<u64>,
    bytes: usize,
    /// Whether the transfer changes it, so that it is copied back.
    changes: bool,
}

/// What all groups of a rank have in common.
#[derive(Clone)]
pub(super) struct GroupOptions {
    pub places: Places,
    pub counter: Arc<TrafficCounter>,
    pub clocks: Arc<LinkClocks>,
    pub timeout: Duration,
    pub library_sums: bool,
}

impl MpiGroup {
    /// Joins a group. All members call it.
    pub(super) fn new(
        mpi: &'static Mpi,
        group: Group,
        members: &[usize],
        backend: &Rc<dyn Backend>,
        options: GroupOptions,
    ) -> Result<Self, RankFailure> {
        let me = members.iter().position(|&member| member == mpi.rank);
        let me =
            me.unwrap_or_else(|| panic!("rank {} is not in group {group} of ranks {members:?}", mpi.rank));
        let created = mpi.block(Activity::Group { group }, || mpi.progress.lock().api.create(members));
        let communicator = created.map_err(|error| {
            let failure = RankFailure::new(mpi.rank, format!("making group {group}"), error.to_string());
            RankFailure { host: Some(mpi.host.clone()), ..failure }
        })?;
        let GroupOptions { places, counter, clocks, timeout, library_sums } = options;
        let on_device = backend.memory().address_space() == AddressSpace::Device;
        Ok(MpiGroup {
            mpi,
            group,
            members: members.to_vec(),
            me,
            communicator,
            places,
            counter,
            clocks,
            timeout,
            collectives: Cell::new(0),
            library_sums,
            device: on_device.then(|| Rc::clone(backend)),
            host_copies: RefCell::default(),
        })
    }

    /// The elements of a transfer in host memory: the tensor itself, or a copy of it.
    fn on_host(&self, view: View, reads: bool) -> (Region, Option<HostCopy>) {
        let Some(device) = &self.device else { return (Region::of(view), None) };
        let bytes = view.len() * view.dtype().bytes();
        let mut copy = HostCopy { words: vec![0; bytes.div_ceil(8)], bytes, changes: true };
        if reads {
            device.download(view, copy.as_bytes_mut());
        }
        (Region::on_host(copy.words.as_ptr() as usize, view.len(), view.dtype()), Some(copy))
    }

    fn link(&self, operation: Operation, to: usize) -> OutgoingLink {
        let level = self.places.level(self.members[self.me], self.members[to]);
        OutgoingLink {
            counter: Arc::clone(&self.counter),
            clocks: Arc::clone(&self.clocks),
            level,
            operation,
        }
    }

    /// Whether a collective is the library's own.
    fn uses_library(&self, collective: Collective, dtype: DType) -> bool {
        self.library_sums && collective == Collective::AllReduce && LibrarySum::supports(dtype)
    }

    /// Counts a sum of the library. It chooses its own algorithm, so what is counted is what a ring would send.
    fn count_library_sum(&self, region: Region) {
        let (ranks, me, collective) = (self.size(), self.me, Collective::AllReduce);
        let bytes = ring::link_elements(collective, region.len(), ranks, me) * region.dtype().bytes();
        let level = self.places.level(self.members[me], self.members[(me + 1) % ranks]);
        self.counter.add(level, collective.operation(), bytes as u64);
    }

    /// Tags of collectives are in the lower half, and those of messages in the upper.
    fn collective_channel(&self, sequence: u64) -> Channel {
        Channel { communicator: self.communicator, tag: (sequence % self.tags()) as i32 }
    }

    fn message_channel(&self, tag: Tag) -> Channel {
        Channel { communicator: self.communicator, tag: (self.tags() + tag % self.tags()) as i32 }
    }

    fn tags(&self) -> u64 {
        self.mpi.largest_tag as u64 / 2
    }

    fn assert_peer(&self, peer: usize) {
        assert!(
            peer < self.size() && peer != self.me,
            "rank {} of group {} cannot exchange a message with rank {peer} of {}",
            self.me,
            self.group,
            self.size()
        );
    }

    /// Starts a transfer of a part of a buffer, unless a transfer has failed before.
    fn begin(
        &self,
        buffer: Buffer,
        range: Range<usize>,
        reads: bool,
        changes: bool,
        start: impl FnOnce(Region) -> u64,
        kind: impl FnOnce(u64) -> TransferKind,
    ) -> Pending {
        let (region, copy) = self.on_host(buffer.slice(range.clone()), reads);
        let number = if self.mpi.has_failed() { NEVER_STARTED } else { start(region) };
        if let Some(copy) = copy {
            self.host_copies.borrow_mut().insert(number, HostCopy { changes, ..copy });
        }
        Pending::new(buffer, range, kind(number))
    }
}

/// The number of a transfer that was not started because of a failure.
const NEVER_STARTED: u64 = u64::MAX;

impl HostCopy {
    fn as_bytes(&self) -> &[u8] {
        &bytes_of(&self.words)[..self.bytes]
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut bytes_of_mut(&mut self.words)[..self.bytes]
    }
}

#[allow(unsafe_code, reason = "words are seen as their bytes")]
fn bytes_of(words: &[u64]) -> &[u8] {
    // SAFETY: every byte of a word is valid, and the slice ends with the last word.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len() * 8) }
}

#[allow(unsafe_code, reason = "words are seen as their bytes")]
fn bytes_of_mut(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, and any bytes are valid words.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len() * 8) }
}

impl Communicator for MpiGroup {
    fn rank(&self) -> usize {
        self.me
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        assert!(!collective.sums() || buffer.dtype().is_float(), "token ids and bytes are not summed");
        let sequence = self.collectives.replace(self.collectives.get() + 1);
        let (ranks, me) = (self.size(), self.me);
        let (successor, predecessor) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let activity = Activity::Collective { group: self.group, collective, sequence };
        let info = TransferInfo { activity, peer: self.members[predecessor] };
        let link = self.link(collective.operation(), successor);
        let library = self.uses_library(collective, buffer.dtype());
        let start = |region: Region| {
            if library {
                self.count_library_sum(region);
            }
            self.mpi.progress.start(info, |api| {
                if library {
                    return LibrarySum::start(api, region, self.communicator).map(Transfer::Library);
                }
                let channel = self.collective_channel(sequence);
                if collective == Collective::AllToAll {
                    let link = |to| self.link(collective.operation(), to);
                    return AllToAll::start(api, region, (ranks, me), channel, link).map(Transfer::AllToAll);
                }
                Ring::start(api, region, collective, (ranks, me), channel, link).map(Transfer::Ring)
            })
        };
        let kind = |sequence| TransferKind::Collective { collective, sequence };
        self.begin(buffer, range, true, true, start, kind)
    }

    fn send(&self, to: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.assert_peer(to);
        let (from, all) = (self.members[self.me], 0..buffer.len());
        let activity = Activity::Message { group: self.group, from, to: self.members[to], tag };
        let (info, link) =
            (TransferInfo { activity, peer: self.members[to] }, self.link(Operation::Send, to));
        let start = |region: Region| {
            let bytes = Bytes { address: region.address(), len: region.bytes() };
            self.mpi.progress.start(info, |api| {
                Message::send(api, bytes, to, self.message_channel(tag), Some(&link)).map(Transfer::Message)
            })
        };
        self.begin(buffer, all, true, false, start, |sequence| TransferKind::Message { sequence })
    }

    fn receive(&self, from: usize, tag: Tag, buffer: Buffer) -> Pending {
        self.assert_peer(from);
        let (to, all) = (self.members[self.me], 0..buffer.len());
        let activity = Activity::Message { group: self.group, from: self.members[from], to, tag };
        let info = TransferInfo { activity, peer: self.members[from] };
        let start = |region: Region| {
            let bytes = Bytes { address: region.address(), len: region.bytes() };
            self.mpi.progress.start(info, |api| {
                Message::receive(api, bytes, from, self.message_channel(tag)).map(Transfer::Message)
            })
        };
        self.begin(buffer, all, false, true, start, |sequence| TransferKind::Message { sequence })
    }

    fn wait(&self, pending: Pending) -> Buffer {
        let (TransferKind::Collective { sequence: number, .. } | TransferKind::Message { sequence: number }) =
            pending.kind;
        let done = number != NEVER_STARTED && self.mpi.wait(number, self.timeout, STEP_NOTICE).is_ok();
        let copy = self.host_copies.borrow_mut().remove(&number);
        match (copy, &self.device) {
            (Some(copy), Some(device)) if done => {
                if copy.changes {
                    device.upload_bytes(copy.as_bytes(), pending.buffer.slice(pending.range.clone()));
                }
            }
            // MPI may still use it.
            (copy, _) => std::mem::forget(copy),
        }
        pending.finish()
    }

    fn run(&self, collective: Collective, buffer: Buffer) -> Buffer {
        let whole = 0..buffer.len();
        if !self.uses_library(collective, buffer.dtype()) || self.device.is_some() || self.failure().is_some()
        {
            let pending = self.start(collective, buffer, whole);
            return self.wait(pending);
        }
        // A library is fastest if it need not return before the end. The heartbeat's thread looks at the limit.
        let region = Region::of(buffer.view());
        self.count_library_sum(region);
        let sequence = self.collectives.replace(self.collectives.get() + 1);
        let activity = Activity::Collective { group: self.group, collective, sequence };
        let summed = self
            .mpi
            .block(activity, || LibrarySum::run(&*self.mpi.progress.lock().api, region, self.communicator));
        if let Err(error) = summed {
            let peer = self.members[(self.me + 1) % self.size()];
            self.mpi.fail(TransferInfo { activity, peer }, error.to_string());
        }
        buffer
    }

    fn failure(&self) -> Option<RankFailure> {
        self.mpi.rendezvous().failure()
    }
}

impl Drop for MpiGroup {
    fn drop(&mut self) {
        // All members free it, at the same place of the program. After a failure they may not come there.
        if !self.mpi.has_failed() && !std::thread::panicking() {
            self.mpi.progress.lock().api.free(self.communicator);
        } else {
            // MPI may still use them.
            std::mem::forget(self.host_copies.take());
        }
    }
}
