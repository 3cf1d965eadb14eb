//! Messages from one rank to one other.
//!
//! The first end to start a message posts it, the other end joins the oldest one that fits. Then whichever end waits
//! first moves the data and the other finds it done; so two ranks that each wait for their own send do not block each
//! other. Only the end that found the message `Open` touches the memory, and both ends leave when it is `Done`.

use super::ThreadsGroup;
use super::board::Posts;
use super::group::Activity;
use super::memory::Region;
use crate::ring::Action;
use crate::{Communicator, Operation, Tag};

/// Which end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Sender,
    Receiver,
}

/// How far the data of a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Moving,
    Done,
}

/// A message that is under way.
#[derive(Debug)]
pub(super) struct Message {
    /// Its number in the group.
    sequence: u64,
    route: Route,
    /// The memory of sender and receiver, once they have started.
    ends: [Option<Region>; 2],
    state: State,
    /// Ends that are done with it.
    left: usize,
}

/// What the two ends have to agree on to meet; ranks are indices in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Route {
    from: usize,
    to: usize,
    tag: Tag,
}

impl Posts {
    fn message(&mut self, sequence: u64) -> &mut Message {
        let message = self.messages.iter_mut().find(|message| message.sequence == sequence);
        message.expect("a message is waited for in the group that started it")
    }

    /// The oldest message on this route that lacks this end, or a new one.
    fn join(&mut self, route: Route, end: End) -> &mut Message {
        let lacks_end = |message: &Message| message.route == route && message.ends[end as usize].is_none();
        let index = self.messages.iter().position(lacks_end).unwrap_or_else(|| {
            let sequence = self.message_count;
            self.message_count += 1;
            self.messages.push(Message { sequence, route, ends: [None; 2], state: State::Open, left: 0 });
            self.messages.len() - 1
        });
        &mut self.messages[index]
    }

    /// An end is done; the last one clears the message away.
    fn leave_message(&mut self, sequence: u64) {
        let message = self.message(sequence);
        message.left += 1;
        if message.left == 2 {
            self.messages.retain(|message| message.sequence != sequence);
        }
    }
}

impl ThreadsGroup {
    /// Starts one end of a message: posts where this rank's elements are.
    pub(super) fn post_message(&self, end: End, peer: usize, tag: Tag, region: Region) -> u64 {
        let route = match end {
            End::Sender => Route { from: self.me, to: peer, tag },
            End::Receiver => Route { from: peer, to: self.me, tag },
        };
        assert!(
            peer < self.size() && peer != self.me,
            "rank {} of group {} cannot exchange a message with rank {peer} of {}",
            self.me,
            self.board.name,
            self.size()
        );
        self.assert_running(self.message(route));
        let mut posts = self.board.lock();
        let message = posts.join(route, end);
        let (sequence, mut ends) = (message.sequence, message.ends);
        ends[end as usize] = Some(region);
        if let [Some(sent), Some(received)] = ends
            && (sent.len(), sent.dtype()) != (received.len(), received.dtype())
        {
            drop(posts);
            let (sent, received) = (shape(sent), shape(received));
            self.fail(self.message(route), format!("{sent} are sent and {received} received"));
        }
        message.ends = ends;
        drop(posts);
        self.board.ring(peer);
        sequence
    }

    /// Waits until the message has passed, or passes it.
    pub(super) fn pass_message(&self, sequence: u64, region: Region) {
        let route = {
            let mut posts = self.board.lock();
            let message = posts.message(sequence);
            assert!(
                message.ends.contains(&Some(region)),
                "a message is waited for in the group that started it"
            );
            message.route
        };
        let during = self.message(route);
        let peer = if route.from == self.me { route.to } else { route.from };
        let ready = |posts: &mut Posts| {
            let message = posts.message(sequence);
            match (message.state, message.ends) {
                (State::Done, _) => Some(None),
                (State::Open, [Some(from), Some(to)]) => {
                    message.state = State::Moving;
                    Some(Some((from, to)))
                }
                _ => None,
            }
        };
        let missing = |posts: &mut Posts| match posts.message(sequence).state {
            State::Open => format!("not started by rank {}", self.global(peer)),
            State::Moving | State::Done => format!("rank {} is still moving it", self.global(peer)),
        };
        if let Some((from, to)) = self.sleep_until(during, ready, missing) {
            let (from, to) = ((self.global(route.from), from), (self.global(route.to), to));
            self.carry(Operation::Send, Action::Copy, from, to);
            self.board.lock().message(sequence).state = State::Done;
            self.board.ring(peer);
        }
        self.board.lock().leave_message(sequence);
    }

    fn message(&self, Route { from, to, tag }: Route) -> Activity {
        Activity::Message { group: self.board.name, from: self.global(from), to: self.global(to), tag }
    }
}

fn shape(region: Region) -> String {
    format!("{} {:?}", region.len(), region.dtype())
}
