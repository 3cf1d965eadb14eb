//! Why the processes of a job do not meet.

use std::time::Duration;

use super::{ADDRESS, SECRET};

/// Why the processes do not meet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RendezvousError {
    /// A variable is missing.
    #[error("{ADDRESS} is set, but not {0}; kintsugi launch --no-mpi sets them all")]
    Variable(&'static str),
    /// The secret is empty.
    #[error("{SECRET} is empty; set it to random text, the same for all processes of the job")]
    EmptySecret,
    /// The rank is not one of the job's.
    #[error("this process has rank {rank}, and the job has {size} processes: ranks are 0 to {}", size - 1)]
    Rank {
        /// The rank of this process.
        rank: usize,
        /// Number of processes.
        size: usize,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen at {address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// The system's message.
        reason: String,
    },
    /// Rank 0 cannot be reached.
    #[error("rank {rank} did not reach rank 0 at {address} in {limit:?}: {reason}")]
    Connect {
        /// The rank of this process.
        rank: usize,
        /// The address.
        address: String,
        /// How long it tried.
        limit: Duration,
        /// The system's message.
        reason: String,
    },
    /// Rank 0 does not accept this process.
    #[error("the process at {address} is not rank 0 of this job: {reason} ({SECRET})")]
    Refused {
        /// The address.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// Some processes have not come.
    #[error("rank {} did not connect to rank 0 in {limit:?}{}", list(ranks), because(reason.as_deref()))]
    Missing {
        /// Their ranks.
        ranks: Vec<usize>,
        /// How long rank 0 waited.
        limit: Duration,
        /// Why rank 0 could not accept a connection, if that happened.
        reason: Option<String>,
    },
    /// The processes do not fit together.
    #[error("{0}")]
    Mismatch(String),
}

/// Names ranks, but not too many of them.
pub(super) fn list(ranks: &[usize]) -> String {
    const NAMED: usize = 8;
    let names = ranks.iter().take(NAMED).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len().saturating_sub(NAMED) {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

/// Why connections were not accepted, as the end of a sentence.
fn because(reason: Option<&str>) -> String {
    reason.map_or_else(String::new, |reason| {
        format!(
            "; rank 0 could not accept all connections: {reason}; raise the limit of open files (ulimit -n)"
        )
    })
}
