//! A group on paper: it moves no data and logs what would be moved.
//!
//! A [`Log`] is independent of where the ranks are, and [`sent_bytes`] adds the topology. So one log serves all ranks that run
//! the same program.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use kintsugi_spec::{Group, Level, Places};
use kintsugi_tensor::{Buffer, DType};

use crate::{Collective, Communicator, Operation, Pending, RankFailure, Tag, TransferKind, all_to_all, ring};

/// A transfer that a rank takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// A collective of the group.
    Collective(Collective),
    /// A message to the rank with this index in the group.
    Send {
        /// The receiver.
        to: usize,
    },
    /// A message from the rank with this index in the group.
    Receive {
        /// The sender.
        from: usize,
    },
}

/// A kind of transfer: everything that determines its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The group.
    pub group: Group,
    /// The transfer.
    pub transfer: Transfer,
    /// Number of elements.
    pub len: usize,
    /// Element type.
    pub dtype: DType,
}

impl Entry {
    /// The operation that its bytes are counted for.
    pub fn operation(&self) -> Operation {
        match self.transfer {
            Transfer::Collective(collective) => collective.operation(),
            Transfer::Send { .. } | Transfer::Receive { .. } => Operation::Send,
        }
    }
}

/// How often one rank started each kind of transfer. Receives are not logged, since bytes are counted for the sender.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// In order of first use. There are few kinds, so a linear search is fast.
    counts: Vec<(Entry, u64)>,
}

impl Log {
    /// Counts one transfer.
    pub fn record(&mut self, entry: Entry) {
        match self.counts.iter_mut().find(|(other, _)| *other == entry) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((entry, 1)),
        }
    }

    /// Returns the counts so far and clears the log.
    #[must_use]
    pub fn take(&mut self) -> Log {
        std::mem::take(self)
    }

    /// Every kind of transfer with its count, in order of first use.
    pub fn iter(&self) -> impl Iterator<Item = (Entry, u64)> + '_ {
        self.counts.iter().copied()
    }
}

/// The bytes that rank `me` of a group of `ranks` sends in one such transfer, with the level of the link: one link, except in an
/// all-to-all, where every other rank gets a chunk over its own link.
///
/// `member` maps an index in the group to a rank of the world.
pub fn sent_bytes(
    entry: Entry,
    ranks: usize,
    me: usize,
    member: impl Fn(usize) -> usize,
    places: impl Into<Places>,
) -> impl Iterator<Item = (Level, Operation, u64)> {
    let places = places.into();
    // The receivers, as distances from `me`.
    let (distances, elements) = match entry.transfer {
        Transfer::Collective(Collective::AllToAll) => (1..ranks, all_to_all::chunk_len(entry.len, ranks)),
        Transfer::Collective(collective) => (1..2, ring::link_elements(collective, entry.len, ranks, me)),
        Transfer::Send { to } => (ranks + to - me..ranks + to - me + 1, entry.len),
        Transfer::Receive { .. } => (0..0, 0),
    };
    let bytes = (elements * entry.dtype.bytes()) as u64;
    distances.map(move |distance| {
        let level = places.level(member(me), member((me + distance) % ranks));
        (level, entry.operation(), bytes)
    })
}

/// A rank's membership in a group on paper.
#[derive(Clone, Debug)]
pub struct PaperGroup {
    group: Group,
    size: usize,
    rank: usize,
    log: Rc<RefCell<Log>>,
}

impl PaperGroup {
    /// Rank `rank` of the group `group` of `size` ranks, which writes to `log`.
    pub fn new(group: Group, size: usize, rank: usize, log: Rc<RefCell<Log>>) -> Self {
        assert!(rank < size, "rank {rank} of group {group} with {size} ranks");
        PaperGroup { group, size, rank, log }
    }

    fn record(&self, transfer: Transfer, len: usize, dtype: DType) {
        self.log.borrow_mut().record(Entry { group: self.group, transfer, len, dtype });
    }

    fn assert_peer(&self, peer: usize) {
        assert!(
            peer < self.size && peer != self.rank,
            "rank {} of group {} cannot exchange a message with rank {peer} of {}",
            self.rank,
            self.group,
            self.size
        );
    }
}

impl Communicator for PaperGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn start(&self, collective: Collective, buffer: Buffer, range: Range<usize>) -> Pending {
        self.record(Transfer::Collective(collective), range.len(), buffer.dtype());
        Pending::new(buffer, range, TransferKind::Collective { collective, sequence: 0 })
    }

    fn send(&self, to: usize, _: Tag, buffer: Buffer) -> Pending {
        self.assert_peer(to);
        let all = 0..buffer.len();
        self.record(Transfer::Send { to }, buffer.len(), buffer.dtype());
        Pending::new(buffer, all, TransferKind::Message { sequence: 0 })
    }

    fn receive(&self, from: usize, _: Tag, buffer: Buffer) -> Pending {
        self.assert_peer(from);
        let all = 0..buffer.len();
        Pending::new(buffer, all, TransferKind::Message { sequence: 0 })
    }

    fn wait(&self, pending: Pending) -> Buffer {
        pending.finish()
    }

    fn failure(&self) -> Option<RankFailure> {
        None
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_spec::Topology;
    use kintsugi_tensor::{Arena, Category, Memory};

    use super::*;

    #[test]
    fn like_transfers_are_counted_together_and_receives_not_at_all() {
        let memory: Rc<dyn Memory> = Rc::new(Arena::on_paper());
        let log = Rc::new(RefCell::new(Log::default()));
        let group = PaperGroup::new(Group::PIPELINE, 4, 1, Rc::clone(&log));
        let mut buffer = Buffer::new(&memory, 10, DType::BF16, Category::Communication);
        for range in [0..6, 4..10, 0..10] {
            let pending = group.start(Collective::AllGather, buffer, range);
            buffer = group.wait(pending);
        }
        buffer = group.wait(group.send(2, 7, buffer));
        drop(group.wait(group.receive(0, 7, buffer)));

        let kind = |transfer, len| Entry { group: Group::PIPELINE, transfer, len, dtype: DType::BF16 };
        let gather = Transfer::Collective(Collective::AllGather);
        let entries: Vec<_> = log.borrow().iter().collect();
        assert_eq!(
            entries,
            [(kind(gather, 6), 2), (kind(gather, 10), 1), (kind(Transfer::Send { to: 2 }, 10), 1)]
        );
    }

    #[test]
    fn the_level_is_that_of_the_link_to_the_receiver() {
        let frontier = Topology { per_package: 2, per_node: Some(8), nodes_per_pod: None };
        let entry = |transfer| Entry { group: Group::DATA, transfer, len: 10, dtype: DType::F32 };
        let members = [0, 1, 2, 8];
        let reduce = entry(Transfer::Collective(Collective::AllReduce));
        // Chunks of 3, 3, 2 and 2 elements.
        let sent: Vec<_> =
            (0..4).flat_map(|me| sent_bytes(reduce, 4, me, |i| members[i], frontier)).collect();
        assert_eq!(
            sent,
            [
                (Level::Package, Operation::AllReduce, 4 * (7 + 7)),
                (Level::Node, Operation::AllReduce, 4 * (7 + 8)),
                (Level::Cluster, Operation::AllReduce, 4 * (8 + 8)),
                (Level::Cluster, Operation::AllReduce, 4 * (8 + 7)),
            ]
        );
        let send = entry(Transfer::Send { to: 2 });
        assert_eq!(
            sent_bytes(send, members.len(), 0, |i| members[i], frontier).collect::<Vec<_>>(),
            [(Level::Node, Operation::Send, 40)]
        );
    }

    #[test]
    fn an_all_to_all_sends_a_chunk_over_every_link() {
        let frontier = Topology { per_package: 2, per_node: Some(8), nodes_per_pod: None };
        let transfer = Transfer::Collective(Collective::AllToAll);
        let entry = Entry { group: Group::DATA, transfer, len: 2 * 4 * 5, dtype: DType::U8 };
        let members = [0, 1, 2, 8];
        let sent: Vec<_> = sent_bytes(entry, 4, 1, |i| members[i], frontier).collect();
        let [node, cluster, package] =
            [Level::Node, Level::Cluster, Level::Package].map(|level| (level, Operation::AllToAll, 5));
        assert_eq!(sent, [node, cluster, package]);
    }

    #[test]
    fn a_group_of_one_sends_nothing() {
        let transfer = Transfer::Collective(Collective::AllReduce);
        let entry = Entry { group: Group::TENSOR, transfer, len: 10, dtype: DType::F64 };
        let bytes: u64 = sent_bytes(entry, 1, 0, |_| 3, Topology::ONE_NODE).map(|(.., bytes)| bytes).sum();
        assert_eq!(bytes, 0);
    }
}
