//! Copies of the states that a rank owns: their way to the next node, and from a copy back into a rank.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::rc::Rc;

use kintsugi_comm::{Pending, Tag};
use kintsugi_plan::{COPY_ALIGNMENT, COPY_PIECE, Coordinate, Group, Plan};
use kintsugi_tensor::{Buffer, Category, DType, View};

use crate::rank::Rank;
use crate::unit::UnitState;

/// Bytes that go from the device to the host, or back, at a time.
const HOST_PIECE: usize = 1 << 18;

/// Keeps copies on the host. The bytes of each come in order. It reports its failures itself.
pub trait CopyKeeper {
    /// Bytes of the states that this rank owns.
    fn keep_own(&mut self, bytes: &[u8]);
    /// Bytes of the states of the rank at the same place of the previous node.
    fn keep_received(&mut self, bytes: &[u8]);
}

/// What a rank does with a copy that passes from node to node, to the rank whose states they are.
pub enum PassedCopy<'a> {
    /// It has the copy.
    From(&'a mut dyn Read),
    /// It passes the copy on.
    Through,
    /// It needs the copy.
    To(&'a mut dyn Write),
}

/// The copies that a rank sends and receives.
#[derive(Default)]
pub(crate) struct Replication {
    /// Bytes of its own states.
    own: usize,
    /// Bytes of those that it receives.
    received: usize,
    keeper: Option<Rc<RefCell<dyn CopyKeeper>>>,
    /// Memory of the host, kept for the next time.
    host: Vec<u8>,
    sending: Option<Pending>,
    receiving: Option<Pending>,
}

impl Replication {
    pub fn new(plan: &Plan, at: Coordinate) -> Self {
        if !plan.copies_states() {
            return Replication::default();
        }
        let from = plan.rank_before(plan.mesh.rank(at), 1);
        let received = plan.copied_bytes(plan.mesh.coordinate(from).pp());
        Replication { own: plan.copied_bytes(at.pp()), received, ..Replication::default() }
    }

    /// Gives a piece of the states of a rank to the keeper, and copies it to `to`.
    fn keep_own(&mut self, rank: &Rank, piece: &Range<usize>, to: &Buffer) {
        let Some(keeper) = &self.keeper else { return };
        for (start, state) in rank.owned_states() {
            let end = start + state.bytes().next_multiple_of(COPY_ALIGNMENT);
            let (first, end) = (piece.start.max(start), piece.end.min(end));
            for at in (first..end).step_by(HOST_PIECE) {
                let bytes = &mut self.host[..HOST_PIECE.min(end - at)];
                let (part, len) = part(state, at - start, bytes.len());
                rank.backend.download(part, &mut bytes[..len]);
                bytes[len..].fill(0);
                keeper.borrow_mut().keep_own(bytes);
                let place = at - piece.start;
                rank.backend.upload_bytes(bytes, to.slice(place..place + bytes.len()));
            }
        }
    }

    /// Gives a received piece of `len` bytes to the keeper.
    fn keep_received(&mut self, rank: &Rank, len: usize, from: &Buffer) {
        let Some(keeper) = &self.keeper else { return };
        for start in (0..len).step_by(HOST_PIECE) {
            let bytes = &mut self.host[..HOST_PIECE.min(len - start)];
            rank.backend.download(from.slice(start..start + bytes.len()), bytes);
            keeper.borrow_mut().keep_received(bytes);
        }
    }
}

impl Rank {
    /// Gives all copies to a keeper from now on.
    pub fn keep_copies(&mut self, keeper: Rc<RefCell<dyn CopyKeeper>>) {
        self.replication.keeper = Some(keeper);
        self.replication.host.resize(HOST_PIECE, 0);
    }

    /// Sends a piece of this rank's states to the next node, and receives one from the previous node. A rank whose states are shorter
    /// than those of others has nothing to send in the last pieces.
    pub(crate) fn replicate_start(&mut self, number: usize) {
        let mut replication = std::mem::take(&mut self.replication);
        let group = self.groups.get(Group::Nodes);
        let (me, nodes) = (group.rank(), group.size());
        if let Some(piece) = piece_of(replication.own, number) {
            let buffer = self.copy_buffer();
            replication.keep_own(self, &piece, &buffer);
            replication.sending = Some(group.send((me + 1) % nodes, tag(number), buffer));
        }
        if piece_of(replication.received, number).is_some() {
            let from = (me + nodes - 1) % nodes;
            replication.receiving = Some(group.receive(from, tag(number), self.copy_buffer()));
        }
        self.replication = replication;
    }

    pub(crate) fn replicate_wait(&mut self, number: usize) {
        let mut replication = std::mem::take(&mut self.replication);
        let group = self.groups.get(Group::Nodes);
        let received = replication.receiving.take().map(|pending| group.wait(pending));
        drop(replication.sending.take().map(|pending| group.wait(pending)));
        if let Some((piece, buffer)) = piece_of(replication.received, number).zip(received) {
            replication.keep_received(self, piece.len(), &buffer);
        }
        self.replication = replication;
    }

    /// Passes a copy of `bytes` bytes along the nodes. All ranks from the one that has it to the one that needs it call this.
    pub fn pass_copy(&self, bytes: usize, mut part: PassedCopy) -> io::Result<()> {
        let group = self.groups.get(Group::Nodes);
        let (me, nodes) = (group.rank(), group.size());
        let mut host = vec![0; HOST_PIECE];
        for number in 0..bytes.div_ceil(COPY_PIECE) {
            let len = piece_of(bytes, number).map_or(0, |piece| piece.len());
            let mut buffer = self.copy_buffer();
            if let PassedCopy::From(file) = &mut part {
                for start in (0..len).step_by(HOST_PIECE) {
                    let bytes = &mut host[..HOST_PIECE.min(len - start)];
                    file.read_exact(bytes)?;
                    self.backend.upload_bytes(bytes, buffer.slice(start..start + bytes.len()));
                }
            } else {
                buffer = group.wait(group.receive((me + nodes - 1) % nodes, tag(number), buffer));
            }
            if let PassedCopy::To(file) = &mut part {
                for start in (0..len).step_by(HOST_PIECE) {
                    let bytes = &mut host[..HOST_PIECE.min(len - start)];
                    self.backend.download(buffer.slice(start..start + bytes.len()), bytes);
                    file.write_all(bytes)?;
                }
            } else {
                drop(group.wait(group.send((me + 1) % nodes, tag(number), buffer)));
            }
        }
        Ok(())
    }

    /// Sets the states that this rank owns to those of a copy, and the weights that follow from them. The other weights are those of
    /// other ranks: see [`Plan::restoration`].
    pub fn restore(&self, copy: &mut dyn Read) -> io::Result<()> {
        let mut host = vec![0; HOST_PIECE];
        for (_, state) in self.owned_states() {
            let end = state.bytes().next_multiple_of(COPY_ALIGNMENT);
            for at in (0..end).step_by(HOST_PIECE) {
                let bytes = &mut host[..HOST_PIECE.min(end - at)];
                copy.read_exact(bytes)?;
                let (part, len) = part(state, at, bytes.len());
                self.backend.upload_bytes(&bytes[..len], part);
            }
        }
        self.units.iter().for_each(|unit| unit.set_owned_weights(&*self.backend));
        Ok(())
    }

    /// The states that this rank owns, each with the place of its first byte in a copy.
    fn owned_states(&self) -> impl Iterator<Item = (usize, View<'_>)> {
        self.units.iter().flat_map(UnitState::owned_states).scan(0, |next, state| {
            let start = *next;
            *next += state.bytes().next_multiple_of(COPY_ALIGNMENT);
            Some((start, state))
        })
    }

    fn copy_buffer(&self) -> Buffer {
        self.backend.allocate(COPY_PIECE, DType::U8, Category::Communication)
    }
}

/// Up to `len` bytes of a state from byte `at` on, and how many there are.
fn part(state: View<'_>, at: usize, len: usize) -> (View<'_>, usize) {
    let element = state.dtype().bytes();
    let end = state.bytes().min(at + len);
    (state.slice(at / element..end / element), end - at)
}

/// The range of a piece of a copy of `bytes` bytes, if it has so many.
fn piece_of(bytes: usize, number: usize) -> Option<Range<usize>> {
    let start = number * COPY_PIECE;
    (start < bytes).then(|| start..bytes.min(start + COPY_PIECE))
}

/// All pieces go one way, so the lowest bit of their tags is zero.
fn tag(piece: usize) -> Tag {
    2 * piece as Tag
}
