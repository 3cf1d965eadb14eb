//! Prepares a folder that another run has used: moves that run's checkpoints and files to a folder beside it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kintsugi_spec::output::{parent, sync_folder};

use crate::folder::same;
use crate::{Checkpoint, CheckpointError, CheckpointFolder, files, tokenizer};

/// Where a run continues that has written to a folder before.
#[derive(Clone, Copy, Debug)]
pub struct Continued<'a> {
    /// The step after which it continues.
    pub step: u64,
    /// The newest of its checkpoints that is valid, if there is one.
    pub checkpoint: Option<&'a Path>,
}

impl<'a> From<&'a Checkpoint> for Continued<'a> {
    fn from(checkpoint: &'a Checkpoint) -> Self {
        Continued { step: checkpoint.progress().step, checkpoint: Some(checkpoint.path()) }
    }
}

impl CheckpointFolder {
    /// Prepares this folder for a run that continues its own checkpoints, or starts at step 0 (`None`). Moves later
    /// checkpoints, which the run will write again, to another folder and returns its path. If the run starts at step 0, also
    /// moves `run_files`, which belong to the earlier run. Removes what interrupted saves have left behind.
    pub fn set_aside(
        &self,
        continued: Option<Continued>,
        run_files: &[PathBuf],
    ) -> Result<Option<PathBuf>, CheckpointError> {
        for path in self.remains_beside(continued)? {
            fs::remove_dir_all(&path).map_err(|error| CheckpointError::new(&path, error))?;
        }
        let run_files = run_files.iter().filter(|path| continued.is_none() && path.exists()).cloned();
        let moving: Vec<PathBuf> = self.beyond(continued)?.into_iter().chain(run_files).collect();
        if moving.is_empty() {
            return Ok(None);
        }
        let aside = self.new_aside()?;
        let moved = moving.iter().try_for_each(|path| {
            let name = path.file_name().expect("a file or checkpoint has a name");
            move_to(path, &aside.join(name)).map_err(|error| CheckpointError::new(path, error))
        });
        // Removes the new folder if it is empty. It stays if some files were moved before the failure.
        moved.inspect_err(|_| drop(fs::remove_dir(&aside)))?;
        // The new run may replace the run's tokenizer.
        tokenizer::copy(parent(self.path()), &aside)?;
        let synced = sync_folder(&aside).and_then(|()| sync_folder(parent(&aside)));
        synced.map_err(|error| CheckpointError::new(&aside, error))?;
        Ok(Some(aside))
    }

    /// Whether [`CheckpointFolder::set_aside`] would move or remove anything here.
    pub fn would_set_aside(&self, continued: Option<Continued>) -> Result<bool, CheckpointError> {
        Ok(!self.remains_beside(continued)?.is_empty() || !self.beyond(continued)?.is_empty())
    }

    /// What interrupted saves have left behind, except the folder that the run resumes from.
    fn remains_beside(&self, continued: Option<Continued>) -> Result<Vec<PathBuf>, CheckpointError> {
        let checkpoint = continued.and_then(|continued| continued.checkpoint);
        let stays = |path: &Path| checkpoint.is_some_and(|checkpoint| same(path, checkpoint));
        Ok(self.remains()?.into_iter().filter(|path| !stays(path)).collect())
    }

    /// The checkpoints after the step that the run continues from, or all of them.
    fn beyond(&self, continued: Option<Continued>) -> Result<Vec<PathBuf>, CheckpointError> {
        let beyond = |step: u64| continued.is_none_or(|continued| step > continued.step);
        let found = self.list()?.into_iter().filter(|(step, _)| beyond(*step));
        Ok(found.map(|(_, path)| path).collect())
    }

    /// Creates a folder for what is set aside. It is beside this folder, or beside the target if this is a link.
    fn new_aside(&self) -> Result<PathBuf, CheckpointError> {
        let target =
            if self.path().is_symlink() { self.path().canonicalize() } else { Ok(self.path().to_owned()) };
        let target = target.map_err(|error| CheckpointError::new(self.path(), error))?;
        let name = target.file_name().unwrap_or("checkpoints".as_ref()).to_string_lossy();
        let aside = (1..u64::MAX)
            .map(|number| target.with_file_name(format!("{name}-{number}")))
            .find(|path| !path.exists())
            .expect("there are numbers enough");
        fs::create_dir(&aside).map_err(|error| CheckpointError::new(&aside, error))?;
        Ok(aside)
    }
}

/// Moves a file or folder. If a file goes to another disk, copies it, syncs the copy and removes the original.
fn move_to(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices && from.is_file() => {
            files::copy(from, to)?;
            fs::remove_file(from)
        }
        result => result,
    }
}
