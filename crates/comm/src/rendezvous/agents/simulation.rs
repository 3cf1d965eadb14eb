//! The agents of a large job on paper: what arrives at the launcher when a rank dies, and when it knows the cause.
//!
//! Agents and launcher decide by the code of a real job (`Outbox`, `Evidence`). Only the network and the ranks are made up: a message
//! takes 0.05 to 2 ms, and after the death the other ranks end with an error, at a time that is drawn from the next seconds.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::outbox::{Message, Outbox};
use super::{Evidence, RankEvent, Report, ReportKind};

/// A job and its failure.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedJob {
    /// Number of nodes, with an agent each.
    pub nodes: usize,
    /// Ranks of a node.
    pub ranks_per_node: usize,
    /// The rank that dies.
    pub victim: usize,
    /// In which time after it the other ranks end.
    pub ends_within: Duration,
    /// The seed of all times that are drawn.
    pub seed: u64,
}

/// What the launcher has seen.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedOutcome {
    /// The rank that the launcher names.
    pub culprit: Option<usize>,
    /// From the death until the launcher knows the cause.
    pub known_after: Duration,
    /// Messages a second before the failure.
    pub usual_messages: f64,
    /// The most messages in a tenth of a second, from the failure on.
    pub most_messages: usize,
    /// All messages from the failure until all ranks have ended.
    pub messages: usize,
}

/// When the rank dies.
const DEATH: Duration = Duration::from_secs(20);

/// How often an agent looks whether a message is due.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Something happens on a node, or its agent looks whether a message is due.
    Node(usize, Option<usize>),
    /// A message arrives at the launcher.
    Arrival(usize, Option<Vec<usize>>),
}

/// Plays a failure.
pub fn simulate(job: &SimulatedJob) -> SimulatedOutcome {
    let mut draw = Draw(job.seed);
    let (begun, ranks) = (Instant::now(), job.nodes * job.ranks_per_node);
    let mut evidence = Evidence::of(ranks);
    for rank in 0..ranks {
        let (host, kind) =
            (host(rank / job.ranks_per_node), ReportKind::Events(vec![RankEvent::Began { rank }]));
        evidence.add(&Report { at: begun, host, kind });
    }
    let end = DEATH + job.ends_within + Duration::from_secs(1);
    let mut queue = BinaryHeap::new();
    for rank in 0..ranks {
        let at = if rank == job.victim { DEATH } else { DEATH + draw.between(LOOK, job.ends_within) };
        queue.push(Reverse((at, Event::Node(rank / job.ranks_per_node, Some(rank)))));
    }
    for node in 0..job.nodes {
        queue.push(Reverse((draw.between(Duration::ZERO, LOOK), Event::Node(node, None))));
    }
    let mut outboxes: Vec<Outbox> = (0..job.nodes).map(|_| Outbox::new()).collect();
    let (mut arrivals, mut known) = (Vec::new(), None);
    while let Some(Reverse((at, event))) = queue.pop() {
        match event {
            Event::Node(node, ended) => {
                let outbox = &mut outboxes[node];
                outbox.add(ended.map(|rank| end_of(rank, job.victim)).into_iter().collect());
                if let Some(message) = outbox.due(begun + at) {
                    let ended = match message {
                        Message::Heartbeat => None,
                        Message::Events(events) => Some(events.into_iter().map(RankEvent::rank).collect()),
                    };
                    let latency = draw.between(Duration::from_micros(50), Duration::from_millis(2));
                    queue.push(Reverse((at + latency, Event::Arrival(node, ended))));
                }
                if ended.is_none() && at < end {
                    queue.push(Reverse((at + LOOK, Event::Node(node, None))));
                }
            }
            Event::Arrival(node, ended) => {
                arrivals.push(at);
                let Some(ended) = ended else { continue };
                let events = ended.into_iter().map(|rank| end_of(rank, job.victim)).collect();
                evidence.add(&Report { at: begun + at, host: host(node), kind: ReportKind::Events(events) });
                if known.is_none() && evidence.failure(begun + at).is_some() {
                    known = Some(at);
                }
            }
        }
    }
    let later: Vec<Duration> = arrivals.iter().copied().filter(|&at| at >= DEATH).collect();
    let within = |from: Duration| later.iter().filter(|&&at| at >= from && at < from + LOOK * 2).count();
    SimulatedOutcome {
        culprit: evidence.failure(begun + end).and_then(|failure| failure.culprit()),
        known_after: known.map_or(Duration::MAX, |known| known.saturating_sub(DEATH)),
        usual_messages: (arrivals.len() - later.len()) as f64 / DEATH.as_secs_f64(),
        most_messages: later
            .iter()
            .step_by(1 + later.len() / 1000)
            .map(|&from| within(from))
            .max()
            .unwrap_or(0),
        messages: later.len(),
    }
}

fn host(node: usize) -> String {
    format!("node{node}")
}

fn end_of(rank: usize, victim: usize) -> RankEvent {
    if rank == victim {
        RankEvent::Died { rank, signal: None }
    } else {
        RankEvent::Ended { rank, code: 1, names_cause: false }
    }
}

/// Numbers that look random, by SplitMix64.
struct Draw(u64);

impl Draw {
    fn between(&mut self, from: Duration, to: Duration) -> Duration {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let share = ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64;
        from + to.saturating_sub(from).mul_f64(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_has_died_is_known_at_once_and_every_agent_sends_few_messages() {
        for seed in 0..4 {
            let ends_within = Duration::from_secs(2);
            let job = SimulatedJob { nodes: 50, ranks_per_node: 8, victim: 123, ends_within, seed };
            let outcome = simulate(&job);
            assert_eq!(outcome.culprit, Some(123));
            assert!(outcome.known_after <= Duration::from_millis(2), "{outcome:?}");
            assert!((20.0..30.0).contains(&outcome.usual_messages), "50 agents, one in 2 s: {outcome:?}");
            // At most one in a fifth of a second from each agent, of 8 ends.
            assert!(outcome.messages <= 50 * 11 && outcome.most_messages <= 100, "{outcome:?}");
        }
    }
}
