//! How the records of checkpoint shards travel between the processes of a job: over the connections beside its collectives.

use std::thread;
use std::time::Duration;

use kintsugi_checkpoint::{ShardRecord, ShardRecordError, ShardRecords};
use kintsugi_comm::World;
use kintsugi_spec::Cause;

const POLL: Duration = Duration::from_millis(10);

/// The records of the shards of a job.
pub(crate) struct JobRecords<'a> {
    /// The ranks of the job.
    pub world: &'a dyn World,
    /// How long the process of rank 0 waits for a record while no process makes progress.
    pub limit: Duration,
}

impl ShardRecords for JobRecords<'_> {
    fn send(&self, record: &ShardRecord) {
        self.world.post(&postcard::to_stdvec(record).expect("records have lengths that are known"));
    }

    fn receive(&self, step: u64, rank: usize) -> Result<ShardRecord, ShardRecordError> {
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
