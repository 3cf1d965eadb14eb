//! Removing old checkpoints, and finding the one that must stay.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{CheckpointError, Folder, Manifest, Progress};

impl Folder {
    /// Removes all but the `keep` newest checkpoints, counted from the one that was just published.
    ///
    /// Manifests decide what a folder is. A folder whose manifest cannot be read or belongs to another step, and a
    /// checkpoint of a later step, are not this run's to remove. Weights that were saved in a streak of skipped steps
    /// may have diverged; so the newest checkpoint that was saved after a good step always stays.
    pub(crate) fn prune(&self, keep: u64, published: &Progress) -> Result<(), CheckpointError> {
        let mut older = Vec::new();
        for (step, path) in self.list()?.into_iter().filter(|(step, _)| *step < published.step) {
            let manifest = Manifest::read(&path).ok().filter(|manifest| manifest.progress.step == step);
            older.extend(manifest.map(|manifest| (manifest.progress, path)));
        }
        let good = |progress: &Progress| progress.skipped_in_a_row == 0;
        let kept = older.len().min(keep.saturating_sub(1) as usize);
        let mut surplus = older.split_off(kept);
        if !good(published)
            && !older.iter().any(|(progress, _)| good(progress))
            && let Some(last_good) = surplus.iter().position(|(progress, _)| good(progress))
        {
            surplus.remove(last_good);
        }
        surplus.into_iter().try_for_each(|(progress, path)| self.remove(progress.step, &path))
    }

    /// The newest checkpoint before `step` that was saved after a good step, by its manifest.
    pub fn last_good(&self, step: u64) -> Result<Option<PathBuf>, CheckpointError> {
        let older = self.list()?.into_iter().filter(|(found, _)| *found < step);
        let is_good = |path: &PathBuf| {
            Manifest::read(path).is_ok_and(|manifest| manifest.progress.skipped_in_a_row == 0)
        };
        Ok(older.map(|(_, path)| path).find(is_good))
    }

    /// Removes a checkpoint. It loses its name first, so that nobody sees half of it.
    fn remove(&self, step: u64, path: &Path) -> Result<(), CheckpointError> {
        let unfinished = self.unfinished(step);
        fs::rename(path, &unfinished)
            .and_then(|()| fs::remove_dir_all(&unfinished))
            .map_err(|error| CheckpointError::new(path, error))
    }
}
