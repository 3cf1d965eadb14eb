//! What the engine needs of the ranks of a job: groups, small exchanges between processes, and how a job fails.

use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use kintsugi_spec::Group;
use kintsugi_tensor::Backend;
use serde::{Deserialize, Serialize};

use crate::{Communicator, Traffic};

/// The ranks of a job, as one process sees them.
///
/// Some of the ranks run in this process. Methods that exchange data between processes are called by every process of the
/// job, in the same order.
pub trait World: Send + Sync {
    /// Number of ranks of the job.
    fn ranks(&self) -> usize;

    /// The ranks of this process.
    fn local_ranks(&self) -> Range<usize>;

    /// The membership of rank `me`, a rank of this process, in the group of `members`: ranks of the job, in group order.
    /// `backend` is the rank's device. Every member must use the same group and members.
    fn group(
        &self,
        group: Group,
        members: &[usize],
        me: usize,
        backend: &Rc<dyn Backend>,
    ) -> Box<dyn Communicator>;

    /// Takes note of a group of `size` ranks that this process is not in, and that other processes make now. Every process
    /// makes or skips the same kinds of groups in the same order.
    fn skip_group(&self, group: Group, size: usize) {
        let _ = (group, size);
    }

    /// Whether transfers run on the device alone, so that the host never waits for one.
    fn is_on_device(&self) -> bool {
        false
    }

    /// Bytes of a rank's device that the transport itself holds after the groups were made. Every process calls it.
    fn transport_bytes(&self) -> Result<u64, RankFailure> {
        Ok(0)
    }

    /// The bytes that a rank of this process has sent so far. After a wait, they include all bytes of that transfer.
    fn traffic(&self, rank: usize) -> Traffic;

    /// Brings every process's bytes to the process of rank 0, in order of rank. Other processes get `None`.
    fn gather(&self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, RankFailure>;

    /// Gives every process the bytes of the process of rank 0.
    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>, RankFailure>;

    /// Sends bytes to the process of rank 0 that belong to no gather. For processes of other ranks.
    fn post(&self, bytes: &[u8]);

    /// In the process of rank 0: the oldest bytes that the process of rank `from` has posted and that were not taken yet.
    fn take_post(&self, from: usize) -> Option<Vec<u8>>;

    /// Waits until every process has come here.
    fn barrier(&self) -> Result<(), RankFailure> {
        self.gather(Vec::new())?;
        self.broadcast(Vec::new()).map(|_| ())
    }

    /// Stops the ranks of this process: every transfer that waits now or starts later fails, with the first reason.
    fn abort(&self, reason: RankFailure);

    /// Sets how long ranks may wait in a step while nobody makes progress, once it is known how long steps usually take. `None` if
    /// no step runs. Ranks that are threads of one process have no such limit: none of them can die alone.
    fn set_step_limit(&self, limit: Option<Duration>) {
        let _ = limit;
    }

    /// Tells rank 0 how long the rank of this process computes in a step, without its waits.
    fn set_compute_time(&self, time: Duration) {
        let _ = time;
    }

    /// In the process of rank 0: the last such times of all ranks, zero for those that have told none. Empty if ranks are threads.
    fn compute_times(&self) -> Vec<Duration> {
        Vec::new()
    }

    /// In the process of rank 0: the host of a rank, if ranks may be on several.
    fn host_of(&self, rank: usize) -> Option<String> {
        let _ = rank;
        None
    }

    /// Finished pieces of work of all processes that this one knows of: see [`kintsugi_spec::work`].
    fn finished_pieces(&self) -> u64;

    /// Why the job stopped, if it did.
    fn failure(&self) -> Option<RankFailure>;

    /// The name of this process's host, if ranks may be on several.
    fn host(&self) -> Option<String> {
        None
    }

    /// Whether this process has rank 0, which writes the files and the output of the job.
    fn is_first(&self) -> bool {
        self.local_ranks().contains(&0)
    }
}

/// Which rank of a failure is its cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blame {
    /// It is not known, or ranks wait for each other.
    Nobody,
    /// The rank that failed.
    Rank,
    /// The rank that it waited for.
    Peer,
    /// The agent of its node sees how its process has ended, and knows whether that was the cause.
    Agents,
}

/// Why a rank failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("rank {rank}{} failed{}: {reason}", on(host.as_deref()), during(op.as_deref(), transfer.as_deref()))]
pub struct RankFailure {
    /// The rank that failed or detected the failure.
    pub rank: usize,
    /// Its host, if ranks may be on several.
    pub host: Option<String>,
    /// The op or phase that it was in, if the failure is not known from the transfer alone.
    pub op: Option<String>,
    /// The collective or message that it was in.
    pub transfer: Option<Box<str>>,
    /// The rank that it waited for.
    pub peer: Option<usize>,
    /// Whether it has waited too long, so that the cause is another rank.
    pub stalled: bool,
    /// Who is the cause.
    pub blame: Blame,
    /// What went wrong.
    pub reason: String,
}

impl RankFailure {
    /// A failure of a rank outside of any transfer.
    pub fn new(rank: usize, op: impl Into<String>, reason: impl Into<String>) -> Self {
        let (op, reason) = (Some(op.into()), reason.into());
        let blame = Blame::Rank;
        RankFailure { rank, host: None, op, transfer: None, peer: None, stalled: false, blame, reason }
    }

    /// A failure of a rank in a collective or a message.
    pub fn in_transfer(
        rank: usize,
        transfer: impl Into<Box<str>>,
        peer: usize,
        reason: impl Into<String>,
    ) -> Self {
        let (transfer, reason) = (Some(transfer.into()), reason.into());
        let (peer, blame) = (Some(peer), Blame::Nobody);
        RankFailure { rank, host: None, op: None, transfer, peer, stalled: false, blame, reason }
    }

    /// A failure of a rank that has waited too long in a transfer or call, for a rank that may be known.
    pub(crate) fn stalled(rank: usize, transfer: impl Into<Box<str>>, peer: Option<usize>) -> Self {
        let (transfer, reason) = (Some(transfer.into()), "it has waited too long".to_owned());
        let blame = Blame::Nobody;
        RankFailure { rank, host: None, op: None, transfer, peer, stalled: true, blame, reason }
    }

    /// The rank that is the cause, if it is known.
    pub fn culprit(&self) -> Option<usize> {
        match self.blame {
            Blame::Nobody | Blame::Agents => None,
            Blame::Rank => Some(self.rank),
            Blame::Peer => self.peer,
        }
    }
}

fn on(host: Option<&str>) -> String {
    host.map(|host| format!(" on {host}")).unwrap_or_default()
}

fn during(op: Option<&str>, transfer: Option<&str>) -> String {
    let during = [op, transfer].into_iter().flatten().collect::<Vec<_>>().join(", ");
    if during.is_empty() { during } else { format!(" in {during}") }
}
