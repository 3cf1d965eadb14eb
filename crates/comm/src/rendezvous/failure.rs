//! How a job fails: who has found it, who prints it, and who is at the end of the chain of waits.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::frame::Kind;
use super::peer::Peer;
use super::{CurrentWait, Rendezvous};
use crate::RankFailure;
use crate::notice::report_failure;
use crate::waits::{ChainEnd, RankState, follow};

/// How long a rank waits for rank 0 to explain a stall.
const ANSWER: Duration = Duration::from_secs(2);

/// If rank 0 does not answer, the other ranks report a stall one after the other. The first one ends the job.
const TURN: Duration = Duration::from_millis(100);

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
            // If rank 0 is gone, all others notice, and the first of them says so.
            let prints = match source {
                FailureSource::Here => false,
                FailureSource::Peer(_) => self.rank == 0 && failure.stalled,
                FailureSource::Connection(lost) => lost != 0 || self.rank == 1,
            };
            if prints {
                report_failure(failure);
            }
            self.reported.store(source != FailureSource::Here, Ordering::Relaxed);
            failure.clone()
        });
        if is_first {
            // A rank that reports a stall waits for the explanation.
            let knows = |peer: &Peer| match source {
                FailureSource::Peer(rank) => rank == peer.rank && !failure.stalled,
                FailureSource::Connection(lost) => lost == peer.rank,
                FailureSource::Here => false,
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
                return Some(RankState { host: Some(self.host.clone()), wait, silent: Duration::ZERO });
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
