//! Messages from one rank to another.
//!
//! The first end that starts a message adds it, and the other end joins the oldest matching one. The end that waits first
//! moves the data, and the other end finds it done. So two ranks that both wait for their own send do not deadlock. Only the
//! end that found the message `Open` accesses the memory, and both ends leave when it is `Done`.

use super::ThreadsGroup;
use super::group::Activity;
use super::group_state::Transfers;
use super::memory::Region;
use crate::ring::Action;
use crate::{Communicator, Operation, Tag};

/// An end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageEnd {
    Sender,
    Receiver,
}

/// The state of a message's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageState {
    Open,
    Moving,
    Done,
}

/// An active message.
#[derive(Debug)]
pub(super) struct ActiveMessage {
    /// Its number in the group.
    sequence: u64,
    route: Route,
    /// The memory of sender and receiver, once they have started.
    ends: [Option<Region>; 2],
    state: MessageState,
    /// Ends that have finished.
    left: usize,
}

/// What the two ends of a message must agree on. Ranks are indices in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Route {
    from: usize,
    to: usize,
    tag: Tag,
}

impl Transfers {
    fn message(&mut self, sequence: u64) -> &mut ActiveMessage {
        let message = self.messages.iter_mut().find(|message| message.sequence == sequence);
        message.expect("a message is waited for in the group that started it")
    }

    /// The oldest message on this route that does not have this end yet, or a new one.
    fn join(&mut self, route: Route, end: MessageEnd) -> &mut ActiveMessage {
        let lacks_end =
            |message: &ActiveMessage| message.route == route && message.ends[end as usize].is_none();
        let index = self.messages.iter().position(lacks_end).unwrap_or_else(|| {
            let sequence = self.message_count;
            self.message_count += 1;
            self.messages.push(ActiveMessage {
                sequence,
                route,
                ends: [None; 2],
                state: MessageState::Open,
                left: 0,
            });
            self.messages.len() - 1
        });
        &mut self.messages[index]
    }

    /// An end has finished. The last one removes the message.
    fn leave_message(&mut self, sequence: u64) {
        let message = self.message(sequence);
        message.left += 1;
        if message.left == 2 {
            self.messages.retain(|message| message.sequence != sequence);
        }
    }
}

impl ThreadsGroup {
    /// Starts one end of a message: publishes the address of this rank's elements.
    pub(super) fn join_message(&self, end: MessageEnd, peer: usize, tag: Tag, region: Region) -> u64 {
        let route = match end {
            MessageEnd::Sender => Route { from: self.me, to: peer, tag },
            MessageEnd::Receiver => Route { from: peer, to: self.me, tag },
        };
        assert!(
            peer < self.size() && peer != self.me,
            "rank {} of group {} cannot exchange a message with rank {peer} of {}",
            self.me,
            self.shared.name,
            self.size()
        );
        self.assert_running(self.message(route));
        let mut transfers = self.shared.lock();
        let message = transfers.join(route, end);
        let (sequence, mut ends) = (message.sequence, message.ends);
        ends[end as usize] = Some(region);
        if let [Some(sent), Some(received)] = ends
            && (sent.len(), sent.dtype()) != (received.len(), received.dtype())
        {
            drop(transfers);
            let (sent, received) = (shape(sent), shape(received));
            self.fail(self.message(route), format!("{sent} are sent and {received} received"));
        }
        message.ends = ends;
        drop(transfers);
        self.shared.wake(peer);
        sequence
    }

    /// Moves the message's data, or waits until the other end has moved it.
    pub(super) fn pass_message(&self, sequence: u64, region: Region) {
        let route = {
            let mut transfers = self.shared.lock();
            let message = transfers.message(sequence);
            assert!(
                message.ends.contains(&Some(region)),
                "a message is waited for in the group that started it"
            );
            message.route
        };
        let during = self.message(route);
        let peer = if route.from == self.me { route.to } else { route.from };
        let ready = |transfers: &mut Transfers| {
            let message = transfers.message(sequence);
            match (message.state, message.ends) {
                (MessageState::Done, _) => Some(None),
                (MessageState::Open, [Some(from), Some(to)]) => {
                    message.state = MessageState::Moving;
                    Some(Some((from, to)))
                }
                _ => None,
            }
        };
        let missing = |transfers: &mut Transfers| match transfers.message(sequence).state {
            MessageState::Open => format!("not started by rank {}", self.global(peer)),
            MessageState::Moving | MessageState::Done => {
                format!("rank {} is still moving it", self.global(peer))
            }
        };
        if let Some((from, to)) = self.sleep_until(during, ready, missing) {
            let (from, to) = ((self.global(route.from), from), (self.global(route.to), to));
            self.move_elements(Operation::Send, Action::Copy, from, to);
            self.shared.lock().message(sequence).state = MessageState::Done;
            self.shared.wake(peer);
        }
        self.shared.lock().leave_message(sequence);
    }

    fn message(&self, Route { from, to, tag }: Route) -> Activity {
        Activity::Message { group: self.shared.name, from: self.global(from), to: self.global(to), tag }
    }
}

fn shape(region: Region) -> String {
    format!("{} {:?}", region.len(), region.dtype())
}
