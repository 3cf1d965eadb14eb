//! Goes back to the last good checkpoint after a spike, inside the running processes.
//!
//! A checkpoint is good if the step after it was: the update before it may have been the cause of the spike. Every rank knows which
//! steps were saved and good. Only the process of rank 0 knows which of these checkpoints were written, so it tells the others.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use kintsugi_checkpoint::{Checkpoint, CheckpointFolder, Continued};
use kintsugi_comm::{RankFailure, World};

use crate::RankError;
use crate::reported::Reported;

/// Where the ranks of a process learn to which checkpoints they go back.
#[derive(Default)]
pub(crate) struct RollbackBoard {
    /// The steps of the checkpoints, oldest rollback first. `None` if the run begins anew.
    steps: Mutex<Vec<Option<u64>>>,
    changed: Condvar,
}

impl RollbackBoard {
    /// The checkpoint that all ranks go back to: that which `find` returns in the process of rank 0. This is the rollback number
    /// `number` of this run, from 0. Every rank calls it. `None` if there is no good checkpoint.
    pub fn agree(
        &self,
        number: usize,
        rank: usize,
        world: &dyn World,
        find: impl FnOnce() -> Result<Option<u64>, RankError>,
    ) -> Result<Option<u64>, RankError> {
        if rank > world.local_ranks().start {
            return Ok(self.wait_for(number, world)?);
        }
        let found = if world.is_first() { find()? } else { None };
        let bytes = postcard::to_stdvec(&found).expect("a number");
        let step = postcard::from_bytes(&world.broadcast(bytes)?).expect("all processes run one version");
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).push(step);
        self.changed.notify_all();
        Ok(step)
    }

    /// Waits for the first rank of this process.
    fn wait_for(&self, number: usize, world: &dyn World) -> Result<Option<u64>, RankFailure> {
        const POLL: Duration = Duration::from_millis(100);
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(&step) = steps.get(number) {
                return Ok(step);
            }
            if let Some(failure) = world.failure() {
                return Err(failure);
            }
            steps = self.changed.wait_timeout(steps, POLL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// In rank 0: the newest checkpoint of the first `last_good` steps that was written. Waits until the caller knows the step of the
/// spike and the end of all `saves`, and moves later checkpoints away, since these steps run again.
pub(crate) fn find_checkpoint(
    folder: &CheckpointFolder,
    last_good: u64,
    spike_step: u64,
    saves: u64,
    reported: &Reported,
) -> Result<Option<Checkpoint>, RankError> {
    reported.wait_for_saves(spike_step, saves);
    let found = folder.newest_up_to(last_good)?;
    folder.set_aside(found.as_ref().map(Continued::from), &[])?;
    Ok(found)
}
