//! Collectives between ranks: one trait, and its transports.
//!
//! A [`World`] is the ranks of a job, and makes the groups in which they communicate ([`Communicator`]). Ranks are threads of
//! one process ([`threads`]), processes on one or many machines ([`mpi`]), processes with a GPU each ([`nccl`]), or exist on
//! paper only ([`paper`]).
//!
//! Starting a collective moves its buffer into the communicator, and waiting for it returns the buffer. Nobody can use the
//! buffer in between. Collectives work in place; an all-to-all receives in the second half of its elements. The algorithm is a ring
//! over the ranks in group order, so ranks only exchange data with their neighbours and the order of every sum is fixed. In an
//! all-to-all every rank exchanges a chunk with every other.
#![deny(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::Range;

use kintsugi_tensor::Buffer;

mod activity;
pub mod all_to_all;
mod collective;
mod connection;
mod emulated;
pub mod mpi;
pub mod nccl;
mod notice;
mod observe;
pub mod paper;
mod patience;
#[allow(unsafe_code, reason = "transports move memory that other ranks own")]
mod region;
pub mod rendezvous;
pub mod ring;
mod solo;
pub mod threads;
mod traffic;
mod waits;
mod world;

pub use collective::Collective;
pub use connection::{Connection, MpiProcess, NcclConnectError, NcclProcess, WorldOptions};
pub use notice::{print_notices_by, report_failures_by};
pub use observe::{ObservedGroup, TransferObserver};
pub use rendezvous::agents;
pub use solo::Solo;
pub use traffic::{Operation, Traffic};
pub use world::{Blame, RankFailure, World};

/// Distinguishes messages between the same two ranks.
///
/// The lowest bit is the lane of the message: a transport without tags carries the two lanes separately ([`nccl::links`]). Messages
/// of one lane between two ranks are received in the order in which they are sent.
pub type Tag = u64;

/// A pending transfer. It owns the buffer until [`Communicator::wait`] returns it.
///
/// If it is dropped, as when a panic unwinds, its memory leaks, because a peer may still use it.
#[derive(Debug)]
#[must_use = "a transfer that is never waited for may never happen"]
pub struct Pending {
    /// The buffer that is being transferred.
    pub(crate) buffer: ManuallyDrop<Buffer>,
    /// The part of the buffer that is being transferred.
    pub(crate) range: Range<usize>,
    /// The kind of transfer.
    pub(crate) kind: TransferKind,
}

impl Pending {
    /// A transfer of a part of a buffer.
    pub(crate) fn new(buffer: Buffer, range: Range<usize>, kind: TransferKind) -> Self {
        assert!(
            range.start <= range.end && range.end <= buffer.len(),
            "{range:?} of {} elements",
            buffer.len()
        );
        Pending { buffer: ManuallyDrop::new(buffer), range, kind }
    }

    /// Returns the buffer. No peer may still use it.
    pub(crate) fn finish(self) -> Buffer {
        ManuallyDrop::into_inner(self.buffer)
    }
}

/// The kind of a [`Pending`] transfer. `sequence` is the number that the transport gave it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TransferKind {
    /// A collective.
    Collective { collective: Collective, sequence: u64 },
    /// A message to or from another rank of the group.
    Message { sequence: u64 },
}

/// A rank's membership in a group of ranks.
///
/// Every rank of a group starts the same collectives in the same order.
///
/// If a transfer fails, the group keeps the failure: the transfer's wait returns the buffer with undefined contents, transfers
/// that start later do nothing, and [`Communicator::failure`] returns the reason. So a layer can communicate without handling
/// errors, and the caller of the layer asks for the failure afterwards.
pub trait Communicator {
    /// This rank's index in the group.
    fn rank(&self) -> usize;
    /// Ranks in the group.
    fn size(&self) -> usize;
    /// Starts a collective over elements `range` of `buffer`.
    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending;
    /// Starts sending all of `buffer` to rank `to` of the group.
    fn send(&self, to: usize, tag: Tag, buffer: Buffer) -> Pending;
    /// Starts receiving all of `buffer` from rank `from` of the group.
    fn receive(&self, from: usize, tag: Tag, buffer: Buffer) -> Pending;
    /// Waits for a transfer and returns its buffer.
    fn wait(&self, pending: Pending) -> Buffer;
    /// Why a transfer failed, if one did. Its group is of no further use.
    fn failure(&self) -> Option<RankFailure>;

    /// Starts a collective over all of `buffer` and waits for it.
    fn run(&self, collective: Collective, buffer: Buffer) -> Buffer {
        let all = 0..buffer.len();
        let pending = self.start(collective, buffer, all);
        self.wait(pending)
    }
}
