//! What the launcher knows from its agents about the ranks of an attempt: whether it has failed, and which rank is the cause.
//!
//! An agent reports the ends of its ranks in the order of their causes: a process that a signal ends comes before its peers that end
//! with an error or are aborted because of it, even if they are gone first. Between nodes the order is that of arrival. So ends that
//! arrive nearly at the same time from two nodes accuse nobody; and if the first one may be a consequence, a single process of another
//! node that was killed is the cause. Several were killed by their launcher.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::RankEvent;
use crate::{Blame, RankFailure};

/// How long a rank may be stopped while others run.
const STOPPED: Duration = Duration::from_secs(6);

/// A rank that was stopped for so long when the others failed is the cause.
const STOPPED_BEFORE: Duration = Duration::from_secs(4);

/// Ends on two nodes whose reports arrive within this time have no known order.
const SAME_TIME: Duration = Duration::from_millis(50);

/// How long after the first end one of another node may be seen that was its cause.
const SETTLE: Duration = Duration::from_millis(900);

/// The signal of a process that has aborted itself, as communication libraries do when a peer has died.
const SIGABRT: u8 = 6;

/// Signals that ask a process to end: SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGTERM.
const REQUESTS: [u8; 5] = [1, 2, 10, 12, 15];

/// Something that the launcher has learned.
#[derive(Clone, Debug)]
pub struct Report {
    /// When it arrived.
    pub at: Instant,
    /// The name of the node.
    pub host: String,
    /// What it is.
    pub kind: ReportKind,
}

/// What the launcher learns of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportKind {
    /// It has connected.
    Connected,
    /// What it has seen, in this order.
    Events(Vec<RankEvent>),
    /// Its connection is lost.
    Lost,
}

/// The reports about one attempt.
#[derive(Default)]
pub struct Evidence {
    /// Number of ranks of the job. Those on nodes without an agent never begin here.
    size: usize,
    ranks: BTreeMap<usize, RankState>,
    /// Ends that are failures, in the order of arrival.
    failures: Vec<FailedEnd>,
    /// Agents that were lost and have not come back.
    lost: BTreeSet<String>,
    /// When a rank ran again after all were stopped, as a suspended job is.
    resumed: Option<Instant>,
}

struct RankState {
    host: String,
    stopped: Option<Instant>,
    has_ended: bool,
}

struct FailedEnd {
    at: Instant,
    host: String,
    rank: usize,
    how: HowEnded,
}

impl FailedEnd {
    fn has_aborted(&self) -> bool {
        self.how == HowEnded::Died(Some(SIGABRT))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum HowEnded {
    /// By itself, with an error, and it has named the cause.
    WithCause,
    /// By itself, with an error that may be a consequence.
    WithoutCause,
    Died(Option<u8>),
}

impl HowEnded {
    /// Whether no other end can be the reason for this one.
    fn is_certain(self) -> bool {
        match self {
            HowEnded::WithCause => true,
            HowEnded::WithoutCause | HowEnded::Died(None) => false,
            HowEnded::Died(Some(signal)) => signal != SIGABRT && !REQUESTS.contains(&signal),
        }
    }

    /// Whether a death may be the cause as much as another one that is taken for it.
    fn may_be_cause_beside(self, other: HowEnded) -> bool {
        matches!(self, HowEnded::Died(signal) if signal.is_none() || self.is_certain() || !other.is_certain())
    }
}

impl Evidence {
    /// For an attempt of so many ranks.
    pub fn of(size: usize) -> Self {
        Evidence { size, ..Evidence::default() }
    }

    /// Adds a report.
    pub fn add(&mut self, report: &Report) {
        match &report.kind {
            ReportKind::Connected => drop(self.lost.remove(&report.host)),
            ReportKind::Lost => drop(self.lost.insert(report.host.clone())),
            ReportKind::Events(events) => events.iter().for_each(|event| self.add_event(report, *event)),
        }
    }

    fn add_event(&mut self, report: &Report, event: RankEvent) {
        let Report { at, ref host, .. } = *report;
        // What an agent sends late may be about a process of the attempt before.
        let is_of_attempt = |rank| self.ranks.get(&rank).is_some_and(|state| state.host == *host);
        if !matches!(event, RankEvent::Began { .. }) && !is_of_attempt(event.rank()) {
            return;
        }
        if let RankEvent::Ended { rank, .. } | RankEvent::Died { rank, .. } = event
            && let Some(state) = self.ranks.get_mut(&rank)
        {
            state.has_ended = true;
        }
        let mut fail = |rank, how| self.failures.push(FailedEnd { at, host: host.clone(), rank, how });
        match event {
            RankEvent::Began { rank } => {
                self.ranks.insert(rank, RankState { host: host.clone(), stopped: None, has_ended: false });
            }
            RankEvent::Ended { code: 0, .. } => {}
            RankEvent::Ended { rank, names_cause: true, .. } => fail(rank, HowEnded::WithCause),
            RankEvent::Ended { rank, names_cause: false, .. } => fail(rank, HowEnded::WithoutCause),
            RankEvent::Died { rank, signal } => fail(rank, HowEnded::Died(signal)),
            RankEvent::Stopped { rank } => self.set_stopped(rank, Some(at)),
            RankEvent::Continued { rank } => {
                if self.are_all_stopped() {
                    self.resumed = Some(at);
                }
                self.set_stopped(rank, None);
            }
        }
    }

    /// Whether the end of every rank that has begun is known, but for those whose agent is lost.
    pub fn knows_all_ends(&self) -> bool {
        self.ranks.values().all(|state| state.has_ended || self.lost.contains(&state.host))
    }

    fn set_stopped(&mut self, rank: usize, since: Option<Instant>) {
        if let Some(state) = self.ranks.get_mut(&rank) {
            state.stopped = since;
        }
    }

    fn are_all_stopped(&self) -> bool {
        self.ranks.values().all(|state| state.stopped.is_some())
    }

    /// How long ago the attempt failed, if it did.
    pub fn failed_since(&self, now: Instant) -> Option<Duration> {
        let overdue = || {
            let since =
                self.stopped_for(now, STOPPED).into_iter().filter_map(|rank| self.stopped_since(rank));
            since.min().map(|since| since + STOPPED)
        };
        let at = self.failures.first().map(|end| end.at).or_else(overdue)?;
        Some(now.saturating_duration_since(at))
    }

    /// The ranks that have been stopped for so long at a time, if any rank is not stopped.
    fn stopped_for(&self, at: Instant, limit: Duration) -> Vec<usize> {
        if self.are_all_stopped() {
            return Vec::new();
        }
        let is_stopped = |rank: &usize| {
            let since = self.stopped_since(*rank);
            since.is_some_and(|since| at.saturating_duration_since(since) >= limit)
        };
        self.ranks.keys().copied().filter(is_stopped).collect()
    }

    /// Since when a rank has been stopped while others ran.
    fn stopped_since(&self, rank: usize) -> Option<Instant> {
        let since = self.ranks.get(&rank)?.stopped?;
        Some(self.resumed.map_or(since, |resumed| since.max(resumed)))
    }

    /// Why the attempt failed, if the agents know it better than a rank could say.
    pub fn failure(&self, now: Instant) -> Option<RankFailure> {
        let first = self.failures.first();
        let (at, limit) = first.map_or((now, STOPPED), |first| (first.at, STOPPED_BEFORE));
        if let [rank, others @ ..] = &self.stopped_for(at, limit)[..] {
            let blame = if others.is_empty() { Blame::Rank } else { Blame::Nobody };
            let seconds =
                self.stopped_since(*rank).map_or(0, |since| at.saturating_duration_since(since).as_secs());
            let reason = format!("its process was stopped for {seconds} s");
            return Some(self.found(*rank, &self.ranks[rank].host, blame, reason));
        }
        self.of_end(self.cause()?)
    }

    /// The end that caused the others, as far as it is known.
    fn cause(&self) -> Option<&FailedEnd> {
        let first = self.failures.first()?;
        let is_soon = |end: &&FailedEnd| end.at.duration_since(first.at) < SETTLE;
        let mut killed = self.failures.iter().filter(is_soon).filter(|end| end.how.is_certain());
        match (killed.next(), killed.next()) {
            // Launchers do not kill the others at once when a rank has aborted itself, as they do when it asks for it.
            (Some(only), None)
                if first.has_aborted() || only.host != first.host && !first.how.is_certain() =>
            {
                Some(only)
            }
            _ => Some(first),
        }
    }

    fn of_end(&self, end: &FailedEnd) -> Option<RankFailure> {
        let HowEnded::Died(signal) = end.how else { return None };
        let reason = match signal {
            Some(signal) => format!("signal {signal} ended its process"),
            None => "its process has ended".to_owned(),
        };
        let is_rival = |other: &&FailedEnd| {
            // Deaths of one report have no known order: a launcher may kill the others before the connection of the first one closes.
            let then = if other.host == end.host {
                other.at == end.at && other.rank != end.rank
            } else {
                other.at.max(end.at) - other.at.min(end.at) < SAME_TIME
            };
            then && other.how.may_be_cause_beside(end.how)
        };
        if let Some(rival) = self.failures.iter().find(is_rival) {
            let reason =
                format!("{reason}, at the same time as that of rank {} on {}", rival.rank, rival.host);
            return Some(self.found(end.rank, &end.host, Blame::Nobody, reason));
        }
        let blame = if self.may_be_consequence(end) { Blame::Nobody } else { Blame::Rank };
        Some(self.found(end.rank, &end.host, blame, reason))
    }

    /// Whether another rank, which no agent has seen end, may be the reason for this end.
    fn may_be_consequence(&self, end: &FailedEnd) -> bool {
        let sees_all = self.ranks.len() >= self.size && self.lost.is_empty();
        match end.how {
            HowEnded::Died(Some(SIGABRT)) => {
                let has_died = |end: &&FailedEnd| matches!(end.how, HowEnded::Died(_));
                !sees_all || self.failures.iter().filter(has_died).count() > 1
            }
            HowEnded::Died(Some(signal)) => REQUESTS.contains(&signal),
            HowEnded::Died(None) | HowEnded::WithCause | HowEnded::WithoutCause => false,
        }
    }

    fn found(&self, rank: usize, host: &str, blame: Blame, mut reason: String) -> RankFailure {
        if self.lost.contains(host) {
            reason += "; the agent of its node does not answer either";
        }
        RankFailure { host: Some(host.to_owned()), op: None, blame, ..RankFailure::new(rank, "", reason) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    /// An attempt of four ranks on two nodes.
    struct Attempt {
        begun: Instant,
        evidence: Evidence,
    }

    impl Attempt {
        fn new() -> Self {
            let mut attempt = Attempt { begun: Instant::now(), evidence: Evidence::of(4) };
            for rank in 0..4 {
                attempt.add(Duration::ZERO, RankEvent::Began { rank });
            }
            attempt
        }

        /// Two ranks a node.
        fn add(&mut self, at: Duration, event: RankEvent) {
            self.report(at, event.rank() / 2, ReportKind::Events(vec![event]));
        }

        fn report(&mut self, at: Duration, node: usize, kind: ReportKind) {
            let (at, host) = (self.begun + at, format!("n{node}"));
            self.evidence.add(&Report { at, host, kind });
        }

        fn failure(&self, at: Duration) -> Option<(Option<usize>, String)> {
            let failure = self.evidence.failure(self.begun + at)?;
            Some((failure.culprit(), failure.to_string()))
        }

        fn has_failed(&self, at: Duration) -> bool {
            self.evidence.failed_since(self.begun + at).is_some()
        }
    }

    fn died(rank: usize) -> RankEvent {
        RankEvent::Died { rank, signal: None }
    }

    fn because_of_others(rank: usize) -> RankEvent {
        RankEvent::Ended { rank, code: 1, names_cause: false }
    }

    fn signalled(rank: usize, signal: u8) -> RankEvent {
        RankEvent::Died { rank, signal: Some(signal) }
    }

    #[test]
    fn the_first_rank_that_dies_is_the_cause_and_not_those_that_the_launcher_ends() {
        let mut attempt = Attempt::new();
        attempt.add(SECOND, RankEvent::Died { rank: 1, signal: Some(9) });
        attempt.add(SECOND + MS, died(0));
        attempt.add(SECOND + 10 * MS, because_of_others(3));
        attempt.add(SECOND + 80 * MS, died(2));
        let expected = "rank 1 on n0 failed: signal 9 ended its process".to_owned();
        assert_eq!(attempt.failure(2 * SECOND), Some((Some(1), expected)));
        assert_eq!(attempt.evidence.failed_since(attempt.begun + 3 * SECOND), Some(2 * SECOND));
        assert!(attempt.evidence.knows_all_ends());
    }

    #[test]
    fn a_rank_of_another_node_that_was_killed_is_the_cause_though_others_have_ended_before() {
        let culprit = |attempt: &Attempt| attempt.failure(3 * SECOND).and_then(|(culprit, _)| culprit);
        for first in [because_of_others(1), signalled(1, SIGABRT), signalled(1, 15)] {
            for signal in [9, 11] {
                let mut attempt = Attempt::new();
                attempt.add(SECOND, first);
                attempt.add(SECOND + 200 * MS, signalled(2, signal));
                assert_eq!(culprit(&attempt), Some(2), "{first:?}");
                // The launcher kills the others.
                attempt.add(2 * SECOND, signalled(0, 9));
                attempt.add(2 * SECOND, signalled(3, 9));
                assert_eq!(culprit(&attempt), Some(2), "{first:?}");
            }
            let mut ended = Attempt::new();
            ended.add(SECOND, first);
            ended.add(SECOND + 100 * MS, signalled(2, 9));
            ended.add(SECOND + 100 * MS, signalled(3, 9));
            assert_ne!(culprit(&ended), Some(2), "the launcher has killed both");
            assert_ne!(culprit(&ended), Some(3), "the launcher has killed both");
        }
    }

    #[test]
    fn a_rank_that_aborts_itself_is_the_cause_if_no_other_can_be() {
        let mut alone = Attempt::new();
        alone.add(SECOND, signalled(1, SIGABRT));
        alone.add(SECOND + MS, because_of_others(0));
        let culprit = |attempt: &Attempt| attempt.failure(3 * SECOND).expect("it has failed").0;
        assert_eq!(culprit(&alone), Some(1));
        alone.add(SECOND + 2 * MS, signalled(3, SIGABRT));
        assert_eq!(culprit(&alone), None, "two have aborted");
        let mut killed = Attempt::new();
        killed.add(SECOND, signalled(1, SIGABRT));
        killed.add(SECOND + 50 * MS, signalled(0, 9));
        assert_eq!(culprit(&killed), Some(0), "its peer was killed");
        let mut elsewhere = Attempt { begun: Instant::now(), evidence: Evidence::of(8) };
        (0..4).for_each(|rank| elsewhere.add(Duration::ZERO, RankEvent::Began { rank }));
        elsewhere.add(SECOND, signalled(1, SIGABRT));
        assert_eq!(culprit(&elsewhere), None, "a rank without an agent may have died");
        let mut asked = Attempt::new();
        asked.add(SECOND, signalled(1, 15));
        assert_eq!(culprit(&asked), None, "somebody has asked it to end");
    }

    #[test]
    fn ranks_of_two_nodes_that_die_at_the_same_time_are_not_accused() {
        let mut attempt = Attempt::new();
        attempt.add(SECOND, died(1));
        attempt.add(SECOND + 10 * MS, died(2));
        let expected =
            "rank 1 on n0 failed: its process has ended, at the same time as that of rank 2 on n1".to_owned();
        assert_eq!(attempt.failure(2 * SECOND), Some((None, expected)));
        assert!(!attempt.evidence.knows_all_ends(), "ranks 0 and 3 are there");
    }

    #[test]
    fn of_ranks_that_are_dying_in_one_report_none_is_accused() {
        let mut attempt = Attempt::new();
        let both = ReportKind::Events(vec![signalled(1, 9), signalled(0, 9)]);
        attempt.report(SECOND, 0, both);
        assert_eq!(attempt.failure(2 * SECOND).expect("it has failed").0, None);
    }

    #[test]
    fn a_rank_that_has_reported_an_error_is_not_accused_again_nor_are_those_that_it_ends() {
        let mut attempt = Attempt::new();
        attempt.add(SECOND, RankEvent::Ended { rank: 1, code: 1, names_cause: true });
        attempt.add(SECOND + 200 * MS, died(2));
        assert!(attempt.has_failed(2 * SECOND));
        assert_eq!(attempt.failure(2 * SECOND), None);
    }

    #[test]
    fn ends_of_the_attempt_before_that_come_late_do_not_count() {
        let (begun, mut evidence) = (Instant::now(), Evidence::default());
        let mut add = |host: &str, event| {
            let kind = ReportKind::Events(vec![event]);
            evidence.add(&Report { at: begun, host: host.to_owned(), kind });
        };
        add("n0", died(0));
        add("n0", RankEvent::Began { rank: 0 });
        add("n1", died(0));
        assert_eq!(evidence.failed_since(begun), None);
    }

    #[test]
    fn ranks_that_come_to_their_end_are_no_failure() {
        let mut attempt = Attempt::new();
        for rank in 0..4 {
            attempt.add(SECOND, RankEvent::Ended { rank, code: 0, names_cause: true });
        }
        assert!(!attempt.has_failed(60 * SECOND));
        assert_eq!(attempt.failure(60 * SECOND), None);
    }

    #[test]
    fn a_stopped_rank_is_the_cause_unless_all_are_stopped() {
        let mut attempt = Attempt::new();
        attempt.add(SECOND, RankEvent::Stopped { rank: 3 });
        assert!(!attempt.has_failed(6 * SECOND));
        assert_eq!(attempt.evidence.failed_since(attempt.begun + 9 * SECOND), Some(2 * SECOND));
        let expected = "rank 3 on n1 failed: its process was stopped for 8 s".to_owned();
        assert_eq!(attempt.failure(9 * SECOND), Some((Some(3), expected)));
        // The others may end before, because they wait for it.
        attempt.add(7 * SECOND, because_of_others(0));
        attempt.add(7 * SECOND + MS, died(1));
        assert_eq!(attempt.failure(7 * SECOND).and_then(|(culprit, _)| culprit), Some(3));
        let mut job = Attempt::new();
        for rank in 0..4 {
            job.add(SECOND, RankEvent::Stopped { rank });
        }
        assert!(!job.has_failed(60 * SECOND), "a job that is suspended");
        for rank in 0..4 {
            job.add(61 * SECOND, RankEvent::Continued { rank });
            assert!(!job.has_failed(62 * SECOND), "it goes on");
        }
    }

    #[test]
    fn a_lost_agent_is_no_failure_but_it_is_said() {
        let mut attempt = Attempt::new();
        attempt.report(SECOND, 1, ReportKind::Lost);
        assert!(!attempt.has_failed(60 * SECOND));
        attempt.add(2 * SECOND, died(2));
        let (culprit, text) = attempt.failure(3 * SECOND).expect("it has failed");
        assert!(
            culprit == Some(2) && text.ends_with("the agent of its node does not answer either"),
            "{text}"
        );
        attempt.report(4 * SECOND, 1, ReportKind::Connected);
        let (_, text) = attempt.failure(5 * SECOND).expect("it has failed");
        assert!(text.ends_with("its process has ended"), "{text}");
    }
}
