//! A lock on a run's folder: two runs in one folder would overwrite each other.
//!
//! The system holds it for as long as the process lives, so that a run that was killed leaves none behind.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::Path;

use crate::CheckpointError;

/// Held for as long as this value lives.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

/// Name of the file in the run's folder.
const NAME: &str = "run.lock";

impl RunLock {
    /// Locks a run's folder, which must be there.
    pub fn take(out: &Path) -> Result<Self, CheckpointError> {
        let path = out.join(NAME);
        let io = |error| CheckpointError::io(&path, &error);
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                file.read_to_string(&mut holder).ok();
                let reason =
                    format!("another run, {}, is using this folder; give another run.out", holder.trim());
                return Err(CheckpointError::new(out, reason));
            }
            Err(TryLockError::Error(error)) => return Err(io(error)),
        }
        file.set_len(0).and_then(|()| writeln!(file, "process {}", std::process::id())).map_err(io)?;
        Ok(RunLock { _file: file })
    }
}
