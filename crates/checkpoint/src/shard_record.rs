//! The records of shards that other processes have written: how the process that publishes a checkpoint learns their checksums.
//! They travel over the connections of the processes beside the collectives.

use std::thread;
use std::time::Duration;

use kintsugi_comm::World;
use kintsugi_spec::Cause;
use serde::{Deserialize, Serialize};

use crate::manifest::FileRecord;

/// How long a network file system may take to show a file that another machine has written.
pub const SHARED_FOLDER_DELAY: Duration = Duration::from_secs(90);

const POLL: Duration = Duration::from_millis(10);

/// The shard of a rank at a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShardRecord {
    /// The step of the checkpoint.
    pub step: u64,
    /// The rank.
    pub rank: usize,
    /// The file, or why it could not be written.
    pub written: Result<FileRecord, Cause>,
}

/// Why the record of another process's shard did not come.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ShardRecordError {
    #[error("the record of rank {rank}: {cause}")]
    Unreadable {
        rank: usize,
        #[source]
        cause: Cause,
    },
    #[error("the run has failed")]
    RunFailed,
    #[error("rank {rank} did not report its shard in {limit:?}")]
    TooLate { rank: usize, limit: Duration },
}

/// How the records of the shards of a job travel.
pub struct ShardRecords<'a> {
    /// The ranks of the job.
    pub world: &'a dyn World,
    /// How long the process of rank 0 waits for a record while no process makes progress.
    pub limit: Duration,
}

impl ShardRecords<'_> {
    /// Sends a record to the process of rank 0. Does not wait.
    pub(crate) fn send(&self, record: &ShardRecord) {
        self.world.post(&postcard::to_stdvec(record).expect("records have lengths that are known"));
    }

    /// In the process of rank 0: waits for the record of a rank of another process.
    pub(crate) fn receive(&self, step: u64, rank: usize) -> Result<ShardRecord, ShardRecordError> {
        let (mut left, mut pieces) = (self.limit, self.world.finished_pieces());
        loop {
            while let Some(bytes) = self.world.take_post(rank) {
                let record: ShardRecord = postcard::from_bytes(&bytes)
                    .map_err(|error| ShardRecordError::Unreadable { rank, cause: Cause::new(error) })?;
                // A checkpoint that was given up before all of its records had come has left some.
                if record.step == step && record.rank == rank {
                    return Ok(record);
                }
            }
            if self.world.failure().is_some() {
                return Err(ShardRecordError::RunFailed);
            }
            if left.is_zero() {
                return Err(ShardRecordError::TooLate { rank, limit: self.limit });
            }
            thread::sleep(POLL);
            let before = std::mem::replace(&mut pieces, self.world.finished_pieces());
            left = if pieces == before { left.saturating_sub(POLL) } else { self.limit };
        }
    }
}
