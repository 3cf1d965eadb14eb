//! The folder that a run is about to write to. Nothing of the user is replaced, and the files of an earlier run are moved to a
//! folder beside it.

use std::fs;
use std::path::{Path, PathBuf};

use kintsugi_checkpoint::{
    CheckpointError, CheckpointFolder, Continued, Manifest, RunLock, with_absolute_paths,
};
use kintsugi_plan::{Plan, Resume};
use kintsugi_spec::output::{parent, sync_folder, write_target};
use kintsugi_spec::tokenizer_files;

use crate::RunFolderError;
use crate::files::{self, CONFIG};
use crate::metrics::remove;

/// The folder of a run, with locks on it and on that of its checkpoints, if the file system supports locks.
#[derive(Debug)]
pub struct OutputFolder {
    out: PathBuf,
    /// The configuration that the user gave, by its canonical path.
    given: Option<PathBuf>,
    checkpoints: CheckpointFolder,
    /// Held until the run ends.
    locks: Vec<RunLock>,
    are_checkpoints_locked: bool,
}

impl OutputFolder {
    /// Creates the folder, if there is none, and syncs its name to the disk. `given` is the user's configuration file, which may be in
    /// the folder. Refuses a folder that has files with the names of a run's files but was never used by a run.
    pub fn create(out: &Path, given: Option<&Path>) -> Result<Self, RunFolderError> {
        if !out.is_dir() {
            let created = fs::create_dir_all(out).and_then(|()| sync_folder(parent(out)));
            created.map_err(|error| RunFolderError::file("create", out, error))?;
        }
        let folder = OutputFolder {
            out: out.to_owned(),
            given: given.and_then(|path| path.canonicalize().ok()),
            checkpoints: CheckpointFolder::of_run(out),
            locks: Vec::new(),
            are_checkpoints_locked: false,
        };
        folder.check_files()?;
        Ok(folder)
    }

    /// The run's checkpoints.
    pub fn checkpoints(&self) -> &CheckpointFolder {
        &self.checkpoints
    }

    /// Locks the folder, and that of the checkpoints if the run saves any. Calls `unguarded` with the reason if the file system has
    /// no locks.
    pub fn lock(&mut self, saves: bool, unguarded: fn(&CheckpointError)) -> Result<(), RunFolderError> {
        self.locks.push(RunLock::take(&self.out, unguarded)?);
        if saves { self.lock_checkpoints(unguarded) } else { Ok(()) }
    }

    fn lock_checkpoints(&mut self, unguarded: fn(&CheckpointError)) -> Result<(), RunFolderError> {
        self.locks.push(self.checkpoints.lock(unguarded)?);
        self.are_checkpoints_locked = true;
        Ok(())
    }

    /// Refuses to overwrite the user's own configuration by a changed one, if it is in the folder.
    pub fn check_config(&self, is_changed: bool) -> Result<(), RunFolderError> {
        let path = self.out.join(CONFIG);
        if is_changed && self.is_given(&path) { Err(RunFolderError::GivenConfig(path)) } else { Ok(()) }
    }

    /// Moves the files of an earlier run that this run does not continue to a separate folder, and returns its path. `own` is where this
    /// run continues the one in this folder.
    pub fn set_aside(
        &mut self,
        own: Option<Continued>,
        unguarded: fn(&CheckpointError),
    ) -> Result<Option<PathBuf>, RunFolderError> {
        if !self.are_checkpoints_locked && self.checkpoints.would_set_aside(own)? {
            self.lock_checkpoints(unguarded)?;
        }
        let (copied, moved): (Vec<PathBuf>, Vec<PathBuf>) =
            files::written(&self.out).into_iter().partition(|path| self.is_given(path));
        let Some(aside) = self.checkpoints.set_aside(own, &moved)? else { return Ok(None) };
        if own.is_none() {
            for path in copied {
                let copy = aside.join(path.file_name().expect("a file has a name"));
                fs::copy(&path, &copy).map_err(|error| RunFolderError::file("write", &copy, error))?;
            }
        }
        Ok(Some(aside))
    }

    /// Writes the whole configuration to the folder, unless that is the user's own file.
    pub fn write_config(&self, plan: &Plan) -> Result<(), RunFolderError> {
        let path = self.out.join(CONFIG);
        if self.is_given(&path) {
            return Ok(());
        }
        let mut plan = with_absolute_paths(plan);
        // It repeats the run from the beginning.
        plan.run.resume = Resume::No;
        let written = write_target(&path, plan.to_toml().as_bytes());
        written.map_err(|error| RunFolderError::file("write", &path, error))
    }

    /// Removes the tokenizer of another run.
    pub fn remove_tokenizer(&self) -> Result<(), RunFolderError> {
        tokenizer_files::WRITTEN.iter().try_for_each(|name| remove(&self.out.join(name)))
    }

    fn check_files(&self) -> Result<(), RunFolderError> {
        let (lock, _) = RunLock::of_run(&self.out);
        let tokenizer = tokenizer_files::WRITTEN.map(|name| self.out.join(name));
        let own = files::written(&self.out).into_iter().chain(tokenizer).chain([lock]);
        let mut found = own.filter(|path| path.symlink_metadata().is_ok() && !self.is_given(path));
        let Some(path) = found.next() else { return Ok(()) };
        // A run locks its folder before it writes a file, so this check comes second.
        let (_, is_lock_ours) = RunLock::of_run(&self.out);
        let has_checkpoint = || {
            Ok::<_, CheckpointError>(
                self.checkpoints.list()?.iter().any(|(_, path)| Manifest::read(path).is_ok()),
            )
        };
        if is_lock_ours || has_checkpoint()? { Ok(()) } else { Err(RunFolderError::Foreign(path)) }
    }

    /// Whether a path leads to the configuration that the user gave.
    fn is_given(&self, path: &Path) -> bool {
        self.given.is_some() && self.given == path.canonicalize().ok()
    }
}
