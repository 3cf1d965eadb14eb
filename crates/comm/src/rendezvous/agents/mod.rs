//! An agent per node outlives the ranks: it sees how they end, stops them when it is told to, and reports to the launcher.
//!
//! Ranks connect to the agent of their node by a Unix socket (`rank`, `local_ranks`). The system closes that connection when a
//! process dies, whatever killed it, so the agent knows which rank of its node died first. Agents are connected to the launcher by
//! the authenticated frames of the rendezvous (`server`, `agent`). The launcher adds the reports up (`evidence`).

mod agent;
mod evidence;
#[allow(unsafe_code, reason = "it asks the kernel")]
mod exit_status;
mod local_ranks;
mod node_folder;
mod outbox;
mod rank;
mod server;
pub mod simulation;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Invitation;

pub use agent::run;
pub use evidence::{Evidence, Report, ReportKind};
use node_folder::{NodeFolder, job_folder};
pub(crate) use rank::watches_this_node;
pub use rank::{node_folder, register, report_end};
pub use server::AgentServer;

/// The variable with the folder of the job, in the memory of each node. The agent listens in it.
pub const FOLDER: &str = "KINTSUGI_AGENT";

/// How long an agent may send nothing. If it ends, its connection closes at once.
const SILENCE: Duration = Duration::from_secs(30);

/// What an agent is told when it starts, by its standard input, which nobody else can read.
#[derive(Serialize, Deserialize)]
pub struct AgentTask {
    invitation: Invitation,
    /// The folder of the job in the memory of the node.
    folder: PathBuf,
}

impl AgentTask {
    /// The folder of the job in the memory of the node.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// What an agent has seen of a rank of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are what their names say")]
pub enum RankEvent {
    /// Its process has begun.
    Began { rank: usize },
    /// It comes to its end, with this exit code. If it is a failure, whether the rank has named the cause, which may be another rank.
    Ended { rank: usize, code: u8, names_cause: bool },
    /// Its process has gone without a word, or goes. The signal that ends it, if the agent could see it.
    Died { rank: usize, signal: Option<u8> },
    /// Its process is stopped (SIGSTOP).
    Stopped { rank: usize },
    /// It runs again.
    Continued { rank: usize },
}

impl RankEvent {
    /// The rank.
    pub fn rank(self) -> usize {
        let (RankEvent::Began { rank }
        | RankEvent::Ended { rank, .. }
        | RankEvent::Died { rank, .. }
        | RankEvent::Stopped { rank }
        | RankEvent::Continued { rank }) = self;
        rank
    }
}

/// What the launcher tells the agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Kill all ranks of the node (SIGKILL).
    Kill,
    /// The job is over.
    End,
}

#[cfg(test)]
mod tests;
