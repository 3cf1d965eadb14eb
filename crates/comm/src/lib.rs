//! Collectives between ranks: one trait, and its transports.
//!
//! A collective is started with a buffer, which the communicator keeps until it is waited for; nobody can touch the
//! buffer in between. All collectives work in place. The algorithm is a ring over the ranks in group order, so the
//! traffic of a group follows its neighbours and the order of every sum is fixed.
#![deny(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::Range;

use kintsugi_tensor::Buffer;

pub mod paper;
pub mod ring;
mod solo;
pub mod threads;
mod traffic;

pub use solo::Solo;
pub use traffic::{Operation, Traffic};

/// A collective over a group of ranks, in place over a part of a buffer.
///
/// That part is cut into as many chunks as there are ranks (see [`ring::chunk`]); chunk `i` belongs to rank `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Afterwards every rank has the sum over all ranks.
    AllReduce,
    /// Before, each rank's own chunk is filled; afterwards every rank has every chunk.
    AllGather,
    /// Afterwards each rank's own chunk is the sum over all ranks; its other chunks are undefined.
    ReduceScatter,
}

impl Collective {
    /// The operation its bytes are counted under.
    pub fn operation(self) -> Operation {
        match self {
            Collective::AllReduce => Operation::AllReduce,
            Collective::AllGather => Operation::AllGather,
            Collective::ReduceScatter => Operation::ReduceScatter,
        }
    }
}

/// What distinguishes messages between the same two ranks.
pub type Tag = u64;

/// A transfer under way. It owns the buffer until [`Communicator::wait`] gives it back.
///
/// If it is dropped instead, as when a panic unwinds, its memory is never given back: a peer may be using it.
#[derive(Debug)]
#[must_use = "a transfer that is never waited for may never happen"]
pub struct Pending {
    /// The buffer in transfer.
    pub(crate) buffer: ManuallyDrop<Buffer>,
    /// The part of it that is in transfer.
    pub(crate) range: Range<usize>,
    /// What is being done.
    pub(crate) work: Work,
}

impl Pending {
    /// Takes a buffer until the transfer is done.
    pub(crate) fn new(buffer: Buffer, range: Range<usize>, work: Work) -> Self {
        assert!(
            range.start <= range.end && range.end <= buffer.len(),
            "{range:?} of {} elements",
            buffer.len()
        );
        Pending { buffer: ManuallyDrop::new(buffer), range, work }
    }

    /// Gives the buffer back, once no peer can be using it.
    pub(crate) fn finish(self) -> Buffer {
        ManuallyDrop::into_inner(self.buffer)
    }
}

/// What a [`Pending`] is waiting for; `sequence` is the transport's number for it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// A collective.
    Collective { collective: Collective, sequence: u64 },
    /// A message to or from another rank of the group.
    Message { sequence: u64 },
}

/// A rank's membership in a group of ranks.
///
/// Every rank of a group starts the same collectives in the same order. A failure elsewhere (a rank that panicked, a
/// rank that never came) panics here with the reason; the engine turns that into the job's error message.
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
    /// Waits for a transfer and gives its buffer back.
    fn wait(&self, pending: Pending) -> Buffer;

    /// Starts a collective over all of `buffer` and waits for it.
    fn run(&self, collective: Collective, buffer: Buffer) -> Buffer {
        let all = 0..buffer.len();
        let pending = self.start(collective, buffer, all);
        self.wait(pending)
    }
}
