//! Removes old checkpoints, and finds the checkpoints that must stay.

use std::fs;
use std::path::{Path, PathBuf};

use crate::best::best_first;
use crate::{CheckpointError, CheckpointFolder, Manifest, RunProgress};

impl CheckpointFolder {
    /// Removes all but the `keep` newest checkpoints and the `keep_best` with the lowest validation losses, counted from the
    /// one of `published`, which was just written.
    ///
    /// Keeps a folder if its manifest cannot be read or has another step, and keeps checkpoints of later steps. Weights that
    /// were saved during consecutive skipped steps may have diverged. So the newest checkpoint that has other weights, and was
    /// saved after a successful step, always stays.
    pub(crate) fn prune(
        &self,
        keep: u64,
        keep_best: u64,
        published: &RunProgress,
    ) -> Result<(), CheckpointError> {
        let mut older = self.older_than(published.step)?;
        let mut best = best_first(older.iter().map(|(progress, _)| progress).chain([published]));
        best.truncate(keep_best as usize);
        let kept = older.len().min(keep.saturating_sub(1) as usize);
        let mut surplus = older.split_off(kept);
        let good = |(progress, _): &(RunProgress, PathBuf)| is_good(progress, published);
        if published.skipped_in_a_row > 0
            && !older.iter().any(good)
            && let Some(last_good) = surplus.iter().position(good)
        {
            surplus.remove(last_good);
        }
        surplus.retain(|(progress, _)| !best.contains(&progress.step));
        surplus.iter().try_for_each(|(progress, path)| self.remove(progress.step, path))
    }

    /// The newest checkpoint that has other weights than that of `published` and was saved after a successful step.
    pub fn last_good(&self, published: &RunProgress) -> Result<Option<PathBuf>, CheckpointError> {
        let older = self.older_than(published.step)?.into_iter();
        Ok(older
            .map(|found| (is_good(&found.0, published), found.1))
            .find_map(|(good, path)| good.then_some(path)))
    }

    /// The checkpoints before a step whose names and manifests agree, newest first.
    fn older_than(&self, step: u64) -> Result<Vec<(RunProgress, PathBuf)>, CheckpointError> {
        let mut older = Vec::new();
        for (found, path) in self.list()?.into_iter().filter(|(found, _)| *found < step) {
            let manifest = Manifest::read(&path).ok().filter(|manifest| manifest.progress.step == found);
            older.extend(manifest.map(|manifest| (manifest.progress, path)));
        }
        Ok(older)
    }

    /// Removes a checkpoint. Renames the folder first, so that a reader never finds an incomplete checkpoint.
    fn remove(&self, step: u64, path: &Path) -> Result<(), CheckpointError> {
        let unfinished = self.unfinished(step);
        fs::rename(path, &unfinished)
            .and_then(|()| fs::remove_dir_all(&unfinished))
            .map_err(|error| CheckpointError::new(path, error))
    }
}

/// Whether an older checkpoint was saved after a successful step, with other weights than a newer one. A skipped step makes no
/// update, so checkpoints with the same number of updates have the same weights, and the last of these updates may have made
/// them diverge.
fn is_good(older: &RunProgress, newer: &RunProgress) -> bool {
    older.skipped_in_a_row == 0 && older.updates < newer.updates
}
