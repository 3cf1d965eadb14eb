//! Messages from one rank to another.
//!
//! The first end that starts a message adds it, and the other end joins the oldest matching one. The end that waits first
//! moves the data, and the other end finds it done. So two ranks that both wait for their own send do not deadlock. Only the
//! end that found the message `Open` accesses the memory, and both ends leave when it is `Done`.

use super::ThreadsGroup;
use super::group_state::Transfers;
use crate::activity::Activity;
use crate::region::Region;
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
    /// Starts one end of a message: publishes the address of this rank's elements. After a failure it does nothing.
    pub(super) fn join_message(&self, end: MessageEnd, peer: usize, tag: Tag, region: Region) -> u64 {
        let route = match end {
            MessageEnd::Sender => Route { from: self.me, to: peer, tag },
            MessageEnd::Receiver => Route { from: peer, to: self.me, tag },
        };
        assert!(
            peer < self.size() && peer != self.me,
            "rank {} of group {} cannot exchange a message with rank {peer} of {}",
            self.me,
            self.shared.group,
            self.size()
        );
        let mut transfers = self.shared.lock();
        if self.has_failed() {
            return UNREGISTERED;
        }
        let message = transfers.join(route, end);
        let (sequence, mut ends) = (message.sequence, message.ends);
        ends[end as usize] = Some(region);
        if let [Some(sent), Some(received)] = ends
            && (sent.len(), sent.dtype()) != (received.len(), received.dtype())
        {
            drop(transfers);
            let (sent, received) = (shape(sent), shape(received));
            self.fail(self.message(route), peer, format!("{sent} are sent and {received} received"));
            return UNREGISTERED;
        }
        message.ends = ends;
        drop(transfers);
        self.shared.wake(peer);
        sequence
    }

    /// Moves the message's data, or waits until the other end has moved it. Returns when the other end does not use this rank's
    /// elements, even after a failure.
    pub(super) fn pass_message(&self, sequence: u64, region: Region) {
        if self.move_message(sequence, region).is_none() {
            self.leave_after_failure(|transfers| {
                let mut messages = transfers.messages.iter();
                !messages.any(|message| message.sequence == sequence && message.state == MessageState::Moving)
            });
        }
    }

    /// `None` if the world stops.
    fn move_message(&self, sequence: u64, region: Region) -> Option<()> {
        let route = {
            let mut transfers = self.shared.lock();
            if self.has_failed() {
                return None;
            }
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
            MessageState::Open => (peer, format!("not started by rank {}", self.global(peer))),
            MessageState::Moving | MessageState::Done => {
                (peer, format!("rank {} is still moving it", self.global(peer)))
            }
        };
        if let Some((from, to)) = self.sleep_until(during, ready, missing)? {
            let moving = Moving { group: self, sequence };
            let (from, to) = ((self.global(route.from), from), (self.global(route.to), to));
            self.move_elements(Operation::Send, Action::Copy, from, to);
            drop(moving);
            self.shared.wake(peer);
        }
        self.shared.lock().leave_message(sequence);
        Some(())
    }

    fn message(&self, Route { from, to, tag }: Route) -> Activity {
        Activity::Message { group: self.shared.group, from: self.global(from), to: self.global(to), tag }
    }
}

/// The number of a message that was never started because of a failure.
const UNREGISTERED: u64 = u64::MAX;

/// Ends the move of a message, even if it panics, so that the other end does not wait for it for ever.
struct Moving<'a> {
    group: &'a ThreadsGroup,
    sequence: u64,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.group.shared.lock().message(self.sequence).state = MessageState::Done;
    }
}

fn shape(region: Region) -> String {
    format!("{} {:?}", region.len(), region.dtype())
}
