//! A lock on a run's folder, since two runs in one folder would overwrite each other.
//!
//! The operating system releases the lock when the process ends, even if it was killed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kintsugi_spec::input;
use kintsugi_spec::output::parent;

use crate::CheckpointError;

/// A lock that is held until this value is dropped.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

/// Name of the file in the run's folder.
const RUN: &str = "run.lock";
/// The text in the file before the process id.
const HOLDER: &str = "process ";
/// Name of the file among the run's checkpoints.
const CHECKPOINTS: &str = ".run.lock";

impl RunLock {
    /// Locks a run's folder, which must exist. If the file system has no locks, calls `unguarded` with the reason and continues
    /// without a lock.
    pub fn take(out: &Path, unguarded: impl FnOnce(&CheckpointError)) -> Result<Self, CheckpointError> {
        let advice = "is using this folder; set another run.out";
        Self::take_by(File::try_lock, &out.join(RUN), advice, unguarded)
    }

    /// Locks the folder of a run's checkpoints.
    pub(crate) fn take_checkpoints(
        folder: &Path,
        unguarded: impl FnOnce(&CheckpointError),
    ) -> Result<Self, CheckpointError> {
        let advice = "writes its checkpoints to this folder; link to another folder, or set another run.out";
        Self::take_by(File::try_lock, &folder.join(CHECKPOINTS), advice, unguarded)
    }

    /// The path of a run's lock file, and whether a run wrote it: it is then empty or names a process.
    pub fn of_run(out: &Path) -> (PathBuf, bool) {
        let path = out.join(RUN);
        let ours = input::open(&path).is_ok_and(|file| is_ours(&file));
        (path, ours)
    }

    fn take_by(
        try_lock: impl FnOnce(&File) -> Result<(), TryLockError>,
        path: &Path,
        advice: &str,
        unguarded: impl FnOnce(&CheckpointError),
    ) -> Result<Self, CheckpointError> {
        let (io, folder) = (|error| CheckpointError::new(path, error), parent(path));
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        match try_lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                file.read_to_string(&mut holder).ok();
                return Err(CheckpointError::new(
                    folder,
                    format!("another run, {}, {advice}", holder.trim()),
                ));
            }
            Err(TryLockError::Error(error)) => {
                let reason =
                    format!("it cannot be locked ({error}), so nothing prevents another run from using it");
                unguarded(&CheckpointError::new(folder, reason));
            }
        }
        file.set_len(0).and_then(|()| writeln!(file, "{HOLDER}{}", std::process::id())).map_err(io)?;
        Ok(RunLock { _file: file })
    }
}

fn is_ours(file: &File) -> bool {
    let mut start = [0; HOLDER.len()];
    match file.read_at(&mut start, 0) {
        Ok(read) => start[..read] == HOLDER.as_bytes()[..read],
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_run_goes_on_where_there_are_no_locks() {
        let out = std::env::temp_dir().join(format!("kintsugi-{}-no-locks", std::process::id()));
        std::fs::create_dir_all(&out).expect("a folder for tests");
        let none = |_: &File| Err(TryLockError::Error(io::ErrorKind::Unsupported.into()));
        let mut said = None;
        RunLock::take_by(none, &out.join(RUN), "", |error| said = Some(error.to_string()))
            .expect("it goes on");
        let said = said.expect("it is said");
        assert!(
            said.ends_with(
                "it cannot be locked (unsupported), so nothing prevents another run from using it"
            ),
            "{said}"
        );
        std::fs::remove_dir_all(&out).expect("it can be removed");
    }
}
