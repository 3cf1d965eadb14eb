//! Messages from one rank to another.
//!
//! The first end that starts a message adds it, and the other end joins the oldest matching one. If an end waits, it moves the
//! data. Otherwise the receiver's progress thread does. So two ranks that both wait for their own send do not deadlock. Only
//! the one that found the message `Open` accesses the memory, and both ends leave when it is `Done`.

use std::time::Instant;

use super::group::{Member, Next};
use super::group_state::Transfers;
use super::shared_gpu::SharedGpu;
use crate::activity::Activity;
use crate::region::Region;
use crate::ring::Action;
use crate::{Operation, Tag};

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
    /// The data is on an emulated link until then.
    Arriving(Instant),
    Done,
}

/// What is left to do for a message.
#[derive(Clone, Copy, Debug)]
enum Work {
    /// Moves its data. `ready` is when both ends had started.
    Move { from: Region, to: Region, ready: Instant },
    /// Ends it: its data has arrived.
    Finish,
}

/// An active message.
#[derive(Debug)]
pub(super) struct ActiveMessage {
    /// Its number in the group.
    sequence: u64,
    route: Route,
    /// The memory of sender and receiver, once they have started.
    ends: [Option<Region>; 2],
    /// When the last of them started.
    ready: Instant,
    /// Whether the sender and the receiver wait for it.
    waits: [bool; 2],
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

impl ActiveMessage {
    /// Takes what is to be done next; `None` if the message is done. Whoever takes it does it.
    fn take_work(&mut self) -> Next<Option<Work>> {
        match (self.state, self.ends) {
            (MessageState::Done, _) => Next::Now(None),
            (MessageState::Open, [Some(from), Some(to)]) => {
                self.state = MessageState::Moving;
                Next::Now(Some(Work::Move { from, to, ready: self.ready }))
            }
            (MessageState::Arriving(arrival), _) if arrival > Instant::now() => Next::At(arrival),
            (MessageState::Arriving(_), _) => {
                self.state = MessageState::Moving;
                Next::Now(Some(Work::Finish))
            }
            (MessageState::Open | MessageState::Moving, _) => Next::AfterOthers,
        }
    }

    /// The ends that wait, as members of the group.
    fn waiting(&self) -> impl Iterator<Item = usize> {
        let (ends, waits) = ([self.route.from, self.route.to], self.waits);
        ends.into_iter().zip(waits).filter(|(_, waits)| *waits).map(|(member, _)| member)
    }
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
                ready: Instant::now(),
                waits: [false; 2],
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

impl Member {
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
        (message.ends, message.ready) = (ends, Instant::now());
        let (complete, waiting) = (ends.iter().all(Option::is_some), message.waiting().next());
        drop(transfers);
        if complete {
            self.wake(waiting.unwrap_or(route.to), waiting.is_some());
        }
        sequence
    }

    /// Waits until the message's data has been moved, or moves it. Returns when nobody else uses this rank's elements, even after
    /// a failure.
    pub(super) fn pass_message(&self, sequence: u64, region: Region, gpu: Option<&SharedGpu>) {
        if self.move_message(sequence, region, gpu).is_none() {
            self.leave_after_failure(|transfers| {
                let mut messages = transfers.messages.iter();
                !messages.any(|message| message.sequence == sequence && message.state == MessageState::Moving)
            });
        }
    }

    /// `None` if the world stops.
    fn move_message(&self, sequence: u64, region: Region, gpu: Option<&SharedGpu>) -> Option<()> {
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
            message.waits[usize::from(message.route.to == self.me)] = true;
            message.route
        };
        let during = self.message(route);
        let peer = if route.from == self.me { route.to } else { route.from };
        let ready = |transfers: &mut Transfers| transfers.message(sequence).take_work();
        let describe = |transfers: &mut Transfers| match transfers.message(sequence).state {
            MessageState::Open => format!("not started by rank {}", self.global(peer)),
            MessageState::Moving | MessageState::Arriving(_) | MessageState::Done => {
                format!("rank {} is still moving it", self.global(peer))
            }
        };
        while let Some(work) = self.sleep_until(during, ready, |_| peer, describe)? {
            self.perform_message(sequence, route, work, gpu);
        }
        self.shared.lock().leave_message(sequence);
        Some(())
    }

    /// Moves the messages to this rank that neither end waits for. Returns when the next one arrives, if it is on an emulated
    /// link.
    pub(super) fn advance_messages(&self) -> Option<Instant> {
        loop {
            let (mut arrival, mut found) = (None, None);
            let mut transfers = self.shared.lock();
            if self.has_failed() {
                return None;
            }
            let is_mine = |message: &&mut ActiveMessage| {
                message.route.to == self.me && message.waiting().next().is_none()
            };
            for message in transfers.messages.iter_mut().filter(is_mine) {
                match message.take_work() {
                    Next::Now(Some(work)) => {
                        found = Some((message.sequence, message.route, work));
                        break;
                    }
                    Next::At(next) => arrival = [arrival, Some(next)].into_iter().flatten().min(),
                    Next::Now(None) | Next::AfterOthers => {}
                }
            }
            drop(transfers);
            match found {
                Some((sequence, route, work)) => self.perform_message(sequence, route, work, None),
                None => return arrival,
            }
        }
    }

    /// Does what [`ActiveMessage::take_work`] returned.
    fn perform_message(&self, sequence: u64, route: Route, work: Work, gpu: Option<&SharedGpu>) {
        let mut moving = Moving { member: self, sequence, ends_in: MessageState::Done };
        if let Work::Move { from, to, ready } = work {
            let (from, to) = ((route.from, from), (route.to, to));
            let arrival = self.move_elements(Operation::Send, Action::Copy, from, to, ready, gpu);
            moving.ends_in = arrival.map_or(MessageState::Done, MessageState::Arriving);
        }
        drop(moving);
        for member in [route.from, route.to] {
            self.shared.wake(member);
        }
    }

    fn message(&self, Route { from, to, tag }: Route) -> Activity {
        Activity::Message { group: self.shared.group, from: self.global(from), to: self.global(to), tag }
    }
}

/// The number of a message that was never started because of a failure.
const UNREGISTERED: u64 = u64::MAX;

/// Ends the move of a message, even if it panics, so that the ends do not wait for it for ever.
struct Moving<'a> {
    member: &'a Member,
    sequence: u64,
    ends_in: MessageState,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.member.shared.lock().message(self.sequence).state = self.ends_in;
    }
}

fn shape(region: Region) -> String {
    format!("{} {:?}", region.len(), region.dtype())
}
