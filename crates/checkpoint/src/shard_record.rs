//! The record of a shard that another process has written: how the process that publishes a checkpoint learns its checksum.

use std::time::Duration;

use kintsugi_spec::Cause;
use serde::{Deserialize, Serialize};

use crate::manifest::FileRecord;

/// How long a network file system may take to show a file that another machine has written.
pub const SHARED_FOLDER_DELAY: Duration = Duration::from_secs(90);

/// The shard of a rank at a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// The step of the checkpoint.
    pub step: u64,
    /// The rank.
    pub rank: usize,
    /// The file, or why it could not be written.
    pub written: Result<FileRecord, Cause>,
}

/// Why the record of another process's shard did not come.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardRecordError {
    /// It is not readable.
    #[error("the record of rank {rank}: {cause}")]
    Unreadable {
        /// The rank.
        rank: usize,
        /// Why.
        #[source]
        cause: Cause,
    },
    /// The run has failed.
    #[error("the run has failed")]
    RunFailed,
    /// The rank has not sent it.
    #[error("rank {rank} did not report its shard in {limit:?}")]
    TooLate {
        /// The rank.
        rank: usize,
        /// How long it was waited for.
        limit: Duration,
    },
}

/// How the records of shards travel to the process that publishes a checkpoint.
pub trait ShardRecords {
    /// Sends a record to the process of rank 0. It does not wait.
    fn send(&self, record: &ShardRecord);

    /// In the process of rank 0: waits for the record of a rank of another process. Fails if the run has failed, or if it has waited
    /// too long.
    fn receive(&self, step: u64, rank: usize) -> Result<ShardRecord, ShardRecordError>;
}
