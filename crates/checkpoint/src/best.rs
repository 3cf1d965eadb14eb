//! Finds the checkpoint with the lowest validation loss.

use crate::{Checkpoint, CheckpointError, CheckpointFolder, Manifest, RunProgress};

/// The name that stands for the best checkpoint in the folder of a run or of checkpoints, as in `out/best`.
pub(crate) const BEST: &str = "best";

impl CheckpointFolder {
    /// The valid checkpoint with the lowest validation loss, and the earliest of several. Calls `broken` for every invalid one
    /// that may be better. `None` if no checkpoint has a validation loss.
    pub fn best(
        &self,
        mut broken: impl FnMut(&CheckpointError),
    ) -> Result<Option<Checkpoint>, CheckpointError> {
        let mut found = Vec::new();
        for (step, path) in self.list()? {
            match Manifest::read(&path) {
                Ok(manifest) => found.push(RunProgress { step, ..manifest.progress }),
                Err(error) => broken(&error),
            }
        }
        self.first_valid(best_first(&found).into_iter().map(|step| self.of_step(step)), broken)
    }
}

/// The steps that have a validation loss, those with the lowest losses first. Of equal losses the earlier step is first.
pub(crate) fn best_first<'a>(found: impl IntoIterator<Item = &'a RunProgress>) -> Vec<u64> {
    let evaluated = found.into_iter().filter_map(|progress| Some((progress.validation_loss?, progress.step)));
    let mut evaluated: Vec<(f64, u64)> = evaluated.collect();
    evaluated.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    evaluated.into_iter().map(|(_, step)| step).collect()
}
