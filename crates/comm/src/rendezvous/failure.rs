//! How a job fails: who has found it, who prints it, and who is at the end of the chain of waits.
//!
//! A connection that closes says that a process has ended, and not that it is the cause: the launcher may have ended it, or it has given
//! up this process, which was stopped, or another has ended before it. So a process accuses another only if nothing else can be the
//! reason, and leaves it to the agent of its node if there is one.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::agents;
use super::error::list;
use super::frame::{FrameError, Kind};
use super::heartbeat::HEARTBEAT;
use super::peer::Peer;
use super::{CurrentWait, Rendezvous};
use crate::notice::report_failure;
use crate::waits::{ChainEnd, RankState, follow};
use crate::{Blame, RankFailure};

/// How long a rank waits for rank 0 to explain a stall.
const ANSWER: Duration = Duration::from_secs(2);

/// If rank 0 does not answer, the other ranks report a stall one after the other. The first one ends the job.
const TURN: Duration = Duration::from_millis(100);

/// How long a rank whose transfer has failed waits for the cause: the connection of a process that has ended closes meanwhile.
const CAUSE: Duration = Duration::from_millis(300);

/// How much longer a process waits that no longer reaches the host of rank 0. If it is itself cut off, rank 0 knows.
const CUT_OFF: Duration = Duration::from_secs(3);

/// Who has found that the job fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureSource {
    /// The rank of this process, which returns it to its caller.
    Here,
    /// Another process, which has sent it.
    Peer(usize),
    /// The thread that receives from a rank: the connection is lost.
    Connection(usize),
}

impl Rendezvous {
    /// Keeps the first failure, prints it if nobody else does, and tells the other processes.
    pub(super) fn fail(&self, failure: &RankFailure, source: FailureSource) {
        let mut is_first = false;
        self.failure.get_or_init(|| {
            is_first = true;
            let prints = match source {
                FailureSource::Here => false,
                FailureSource::Peer(_) => self.rank == 0 && failure.stalled,
                FailureSource::Connection(lost) => lost != 0 || self.turn().is_some(),
            };
            if prints {
                report_failure(failure);
            }
            self.reported.store(source != FailureSource::Here, Ordering::Relaxed);
            failure.clone()
        });
        if is_first {
            // A rank that reports a stall waits for the explanation. One that is silent learns that it was given up, should it continue.
            let knows = |peer: &Peer| match source {
                FailureSource::Peer(rank) => rank == peer.rank && !failure.stalled,
                FailureSource::Connection(_) | FailureSource::Here => false,
            };
            let bytes = postcard::to_stdvec(failure).unwrap_or_default();
            for peer in self.peers.iter().filter(|peer| !knows(peer)) {
                peer.write(Kind::Abort, &bytes).ok();
            }
        }
        for peer in &self.peers {
            peer.arrived.notify_all();
        }
    }

    /// Ends the job because the connection to a process is lost. If rank 0 is gone, all others notice, and take turns: the first of them
    /// prints it, and the launcher may end the job as soon as any process has ended.
    pub(super) fn lose(&self, peer: &Peer, lost: &FrameError) {
        // With agents nobody ends this process soon, and the connection of another one that is the cause may close meanwhile.
        if *lost == FrameError::Closed && agents::watches_this_node() && peer.host != self.host {
            thread::sleep(CAUSE);
        }
        let failure = self.lost(peer, lost);
        if peer.rank == 0 {
            let begun = Instant::now();
            let is_cut_off = *lost == FrameError::Silent && peer.is_cut_off();
            let first = if is_cut_off { CUT_OFF } else { Duration::ZERO };
            let turn = first + TURN * self.turn().unwrap_or(self.size.ilog2() + 1);
            while !self.has_failed() && begun.elapsed() < turn {
                thread::sleep(TURN / 10);
            }
        }
        self.fail(&failure, FailureSource::Connection(peer.rank));
    }

    /// When this rank may print that rank 0 is gone: ranks 1, 2, 4, 8, … one after the other, so that some are on other nodes.
    fn turn(&self) -> Option<u32> {
        self.rank.is_power_of_two().then(|| self.rank.ilog2())
    }

    /// The failure of a job whose connection to a process is lost.
    pub(super) fn lost(&self, peer: &Peer, lost: &FrameError) -> RankFailure {
        // What it was doing is not known.
        let failure = |rank, host: &str, blame, reason| {
            let host = Some(host.to_owned());
            RankFailure { host, op: None, blame, ..RankFailure::new(rank, "", reason) }
        };
        let ended = || format!("the process of rank {} has ended", peer.rank);
        if let Some(stopped) = self.given_up() {
            let reason =
                format!("its process was stopped for {} s, and meanwhile {}", stopped.as_secs(), ended());
            return failure(self.rank, &self.host, Blame::Rank, reason);
        }
        let found = |blame, reason| failure(peer.rank, &peer.host, blame, reason);
        match lost {
            FrameError::Closed if peer.host == self.host && agents::watches_this_node() => {
                found(Blame::Agents, "its process has ended; launch says which rank is the cause".to_owned())
            }
            FrameError::Closed => {
                let has_ended = |other: &&Peer| {
                    other.rank != peer.rank && !other.inbox().said_goodbye && other.has_hung_up()
                };
                let others: Vec<usize> =
                    self.peers.iter().filter(has_ended).map(|other| other.rank).collect();
                if others.is_empty() {
                    return found(Blame::Rank, "its process has ended".to_owned());
                }
                // Which of them was the first is not known.
                found(
                    Blame::Nobody,
                    format!("its process has ended, and so has that of rank {}", list(&others)),
                )
            }
            FrameError::Silent if peer.is_cut_off() => {
                let silent = peer.inbox().silent.as_secs();
                let reason = format!(
                    "its host {} and {} have not reached each other for {silent} s",
                    peer.host, self.host
                );
                found(if self.blames_host_of(peer) { Blame::Rank } else { Blame::Nobody }, reason)
            }
            FrameError::Silent => found(
                Blame::Rank,
                format!("its process has sent nothing for {} s", peer.inbox().silent.as_secs()),
            ),
            FrameError::Invalid => {
                found(Blame::Rank, "its connection carries bytes that it did not send".to_owned())
            }
        }
    }

    /// Whether the host of a process is cut off, and not that of this one: rank 0 still hears of a third host, or there is none.
    fn blames_host_of(&self, peer: &Peer) -> bool {
        let mut others = self.peers.iter().filter(|other| other.host != self.host && other.host != peer.host);
        let is_here = |other: &Peer| other.inbox().silent < CUT_OFF;
        self.rank == 0 && (others.clone().next().is_none() || others.any(is_here))
    }

    /// How long this process was stopped until a moment ago, if that is so long that the others have given it up.
    fn given_up(&self) -> Option<Duration> {
        let stopped = self.stops.look();
        (stopped + HEARTBEAT >= self.longest_silence()).then_some(stopped)
    }

    /// Ends the job because of a failure that this rank has found. Returns the first failure of the job, which is the cause of later
    /// ones. Rank 0 explains a stall, because it knows who waits for whom.
    pub(crate) fn abort(&self, failure: RankFailure) -> RankFailure {
        if failure.stalled
            && let Some(first) = self.peers.first().filter(|peer| peer.rank == 0)
            && self.failure().is_none()
        {
            let bytes = postcard::to_stdvec(&failure).unwrap_or_default();
            first.write(Kind::Abort, &bytes).ok();
            let begun = Instant::now();
            while self.failure().is_none() && begun.elapsed() < ANSWER + TURN * self.rank.min(50) as u32 {
                thread::sleep(Duration::from_millis(5));
            }
        }
        if failure.blame == Blame::Nobody && !failure.stalled {
            let begun = Instant::now();
            while self.failure().is_none() && begun.elapsed() < CAUSE {
                thread::sleep(Duration::from_millis(5));
            }
        }
        self.fail(&self.explained(failure), FailureSource::Here);
        self.failure().expect("it has just been set")
    }

    /// Names the end of the chain of waits in a failure of a rank that has waited too long.
    pub(super) fn explained(&self, failure: RankFailure) -> RankFailure {
        if !failure.stalled {
            return failure;
        }
        let ChainEnd { rank, blame, words } = self.chain(failure.rank, failure.peer);
        let reason = format!("after {:?} it still waits for {words}", self.limit());
        RankFailure { peer: rank.or(failure.peer), blame, reason, ..failure }
    }

    /// The chain of waits from the rank that `waiting` waits for.
    pub(super) fn chain(&self, waiting: usize, peer: Option<usize>) -> ChainEnd {
        follow(waiting, peer, self.size, |rank| {
            if rank == self.rank {
                let wait = self.current_wait().map(CurrentWait::described);
                let silent = self.given_up().unwrap_or_default();
                return Some(RankState { host: Some(self.host.clone()), wait, silent });
            }
            let peer = self.peers.iter().find(|peer| peer.rank == rank)?;
            let inbox = peer.inbox();
            Some(RankState {
                host: Some(peer.host.clone()),
                wait: inbox.status.wait.clone(),
                silent: inbox.silent,
            })
        })
    }

    /// Why the job failed, if it did.
    pub(crate) fn failure(&self) -> Option<RankFailure> {
        self.failure.get().cloned()
    }

    /// Whether the job failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Prints the failure of the job, unless that was done.
    pub(super) fn report(&self) {
        if let Some(failure) = self.failure()
            && !self.reported.swap(true, Ordering::Relaxed)
        {
            report_failure(&failure);
        }
    }
}
