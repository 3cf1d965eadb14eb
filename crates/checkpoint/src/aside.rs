//! Making room for a run in a folder that another run has used: its checkpoints and files are moved to a folder beside it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kintsugi_spec::output::{parent, sync_folder};

use crate::folder::same;
use crate::{Checkpoint, CheckpointError, Folder, files, tokenizer};

impl Folder {
    /// Makes room for a run that goes on from one of these checkpoints, or starts (`None`). Checkpoints beyond that one,
    /// which the run will write again, are moved to another folder, whose path is given. If the run starts, so are
    /// `run_files`, which belong to the earlier run. What is left of interrupted saves is removed.
    pub fn set_aside(
        &self,
        resumed_from: Option<&Checkpoint>,
        run_files: &[PathBuf],
    ) -> Result<Option<PathBuf>, CheckpointError> {
        for path in self.remains_beside(resumed_from)? {
            fs::remove_dir_all(&path).map_err(|error| CheckpointError::new(&path, error))?;
        }
        let run_files = run_files.iter().filter(|path| resumed_from.is_none() && path.exists()).cloned();
        let moving: Vec<PathBuf> = self.beyond(resumed_from)?.into_iter().chain(run_files).collect();
        if moving.is_empty() {
            return Ok(None);
        }
        let aside = self.new_aside()?;
        let moved = moving.iter().try_for_each(|path| {
            let name = path.file_name().expect("a file or checkpoint has a name");
            move_to(path, &aside.join(name)).map_err(|error| CheckpointError::new(path, error))
        });
        // It may still be needed for what was moved before; if nothing was, it is empty and goes.
        moved.inspect_err(|_| drop(fs::remove_dir(&aside)))?;
        // The run's own tokenizer may make way for another's.
        tokenizer::copy(parent(self.path()), &aside)?;
        let synced = sync_folder(&aside).and_then(|()| sync_folder(parent(&aside)));
        synced.map_err(|error| CheckpointError::new(&aside, error))?;
        Ok(Some(aside))
    }

    /// Whether [`Folder::set_aside`] would move or remove anything here.
    pub fn is_in_the_way(&self, resumed_from: Option<&Checkpoint>) -> Result<bool, CheckpointError> {
        Ok(!self.remains_beside(resumed_from)?.is_empty() || !self.beyond(resumed_from)?.is_empty())
    }

    /// What interrupted saves have left, but for the folder that is resumed from.
    fn remains_beside(&self, resumed_from: Option<&Checkpoint>) -> Result<Vec<PathBuf>, CheckpointError> {
        let stays = |path: &Path| resumed_from.is_some_and(|checkpoint| same(path, checkpoint.path()));
        Ok(self.remains()?.into_iter().filter(|path| !stays(path)).collect())
    }

    /// The checkpoints beyond the one that is resumed from; all of them if none is.
    fn beyond(&self, resumed_from: Option<&Checkpoint>) -> Result<Vec<PathBuf>, CheckpointError> {
        let beyond = |step: u64| resumed_from.is_none_or(|checkpoint| step > checkpoint.progress().step);
        let found = self.list()?.into_iter().filter(|(step, _)| beyond(*step));
        Ok(found.map(|(_, path)| path).collect())
    }

    /// Makes a folder for what is set aside: beside this one, or where this is a link to, which may be another disk.
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

/// Moves a file or folder. A file may go to another disk: it is copied there, and removed when that disk has it.
fn move_to(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices && from.is_file() => {
            files::copy(from, to)?;
            fs::remove_file(from)
        }
        result => result,
    }
}
