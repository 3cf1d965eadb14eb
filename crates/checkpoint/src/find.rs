//! Finds a checkpoint: the newest, or that with the lowest validation loss.

use std::path::{Path, PathBuf};

use kintsugi_plan::DeviceKind;
use kintsugi_spec::output::parent;

use crate::manifest::MANIFEST;
use crate::{Checkpoint, CheckpointError, CheckpointFolder, Manifest, RunProgress};

/// The name that stands for the best checkpoint in the folder of a run or of checkpoints, as in `out/best`.
const BEST: &str = "best";

/// Opens a checkpoint, or the newest valid one of a run or of a folder of checkpoints. If `best` is added to such a folder's
/// path, opens the one with the lowest validation loss.
pub fn find(path: &Path, broken: impl FnMut(&CheckpointError)) -> Result<Checkpoint, CheckpointError> {
    if !path.exists() && path.file_name() == Some(BEST.as_ref()) && parent(path).is_dir() {
        let best = CheckpointFolder::inside(parent(path)).best(broken)?;
        let reason = "no checkpoint here has a validation loss";
        return best.ok_or_else(|| CheckpointError::new(parent(path), reason));
    }
    if !path.exists() {
        return Err(CheckpointError::new(path, "there is no such folder"));
    }
    if path.is_file() {
        return Err(CheckpointError::new(
            path,
            "a file, where the folder of a run or a checkpoint is needed",
        ));
    }
    if path.join(MANIFEST).exists() {
        return Checkpoint::open(path);
    }
    let newest = CheckpointFolder::inside(path).newest(broken)?;
    newest.ok_or_else(|| CheckpointError::new(path, "there is no checkpoint here"))
}

/// The device of the run whose checkpoint [`find`] would open: that of its newest manifest. Reads no weights. `None` if there
/// is no manifest.
pub fn device_of_run(path: &Path) -> Option<DeviceKind> {
    let device = |checkpoint: &Path| Some(Manifest::read(checkpoint).ok()?.plan.run.device);
    let path = if path.exists() { path } else { parent(path) };
    let newest = || CheckpointFolder::inside(path).list().ok()?.iter().find_map(|(_, path)| device(path));
    device(path).or_else(newest)
}

impl CheckpointFolder {
    /// The newest valid checkpoint. Calls `broken` for every newer one that is invalid. Fails if there are checkpoints but none
    /// is valid.
    pub fn newest(
        &self,
        broken: impl FnMut(&CheckpointError),
    ) -> Result<Option<Checkpoint>, CheckpointError> {
        self.first_valid(self.list()?.into_iter().map(|(_, path)| path), broken)
    }

    /// The newest valid checkpoint of the first `step` steps, if there is one.
    pub fn newest_up_to(&self, step: u64) -> Result<Option<Checkpoint>, CheckpointError> {
        let earlier = self.list()?.into_iter().filter(|(saved, _)| *saved <= step);
        Ok(self.first_valid(earlier.map(|(_, path)| path), |_| {}).unwrap_or(None))
    }

    /// The first valid one of these checkpoints. Calls `broken` for every one before it. Fails if none is valid.
    fn first_valid(
        &self,
        paths: impl Iterator<Item = PathBuf>,
        mut broken: impl FnMut(&CheckpointError),
    ) -> Result<Option<Checkpoint>, CheckpointError> {
        let mut last = None;
        for path in paths {
            match Checkpoint::open(&path) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(error) => {
                    broken(&error);
                    last = Some(error);
                }
            }
        }
        match last {
            Some(_) => Err(CheckpointError::new(self.path(), "none of its checkpoints is whole")),
            None => Ok(None),
        }
    }

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
