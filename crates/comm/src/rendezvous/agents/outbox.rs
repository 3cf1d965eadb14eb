//! What an agent sends to the launcher, and when: the first event at once, and what follows in one message. So the launcher of a large
//! job that fails gets few messages from every node.

use std::time::{Duration, Instant};

use super::RankEvent;

/// How often an agent says that it lives, if it has nothing else to say.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(2);

/// How long events that follow others are collected.
const COLLECT: Duration = Duration::from_millis(200);

/// A message of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Heartbeat,
    Events(Vec<RankEvent>),
}

/// The events that the launcher does not know yet.
pub(super) struct Outbox {
    events: Vec<RankEvent>,
    last_events: Option<Instant>,
    last_message: Option<Instant>,
}

impl Outbox {
    pub fn new() -> Self {
        Outbox { events: Vec::new(), last_events: None, last_message: None }
    }

    pub fn add(&mut self, events: Vec<RankEvent>) {
        self.events.extend(events);
    }

    /// Adds events before those that are there: a new connection begins with the ranks that are present.
    pub fn begin_with(&mut self, events: Vec<RankEvent>) {
        self.events.splice(0..0, events);
    }

    /// The message that is due.
    pub fn due(&mut self, now: Instant) -> Option<Message> {
        let passed = |since: Option<Instant>, limit| {
            since.is_none_or(|since| now.saturating_duration_since(since) >= limit)
        };
        if !self.events.is_empty() && passed(self.last_events, COLLECT) {
            (self.last_events, self.last_message) = (Some(now), Some(now));
            return Some(Message::Events(std::mem::take(&mut self.events)));
        }
        passed(self.last_message, HEARTBEAT).then(|| {
            self.last_message = Some(now);
            Message::Heartbeat
        })
    }

    /// The time until a message may be due, for `limit` at most.
    pub fn wait(&self, now: Instant, limit: Duration) -> Duration {
        let since = self.last_events.filter(|_| !self.events.is_empty());
        since.map_or(limit, |since| (since + COLLECT).saturating_duration_since(now).min(limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_event_is_sent_at_once_and_those_that_follow_together() {
        let (begun, mut outbox) = (Instant::now(), Outbox::new());
        let at = |ms| begun + Duration::from_millis(ms);
        let died = |rank| RankEvent::Died { rank, signal: None };
        assert_eq!(outbox.due(at(0)), Some(Message::Heartbeat));
        assert_eq!(outbox.due(at(1000)), None);
        outbox.add(vec![died(1)]);
        assert_eq!(outbox.due(at(1001)), Some(Message::Events(vec![died(1)])));
        outbox.add(vec![died(2)]);
        outbox.add(vec![died(3)]);
        assert_eq!(
            (outbox.due(at(1100)), outbox.wait(at(1100), HEARTBEAT)),
            (None, Duration::from_millis(101))
        );
        outbox.begin_with(vec![RankEvent::Began { rank: 4 }]);
        let collected = vec![RankEvent::Began { rank: 4 }, died(2), died(3)];
        assert_eq!(outbox.due(at(1201)), Some(Message::Events(collected)));
        assert_eq!([3000, 3201].map(|ms| outbox.due(at(ms))), [None, Some(Message::Heartbeat)]);
    }
}
