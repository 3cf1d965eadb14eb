//! What is wrong with a checkpoint, as a sentence with the path.

use std::io;
use std::path::{Path, PathBuf};

/// Something that cannot be read, written or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct CheckpointError {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

impl CheckpointError {
    pub(crate) fn new(path: &Path, reason: impl Into<String>) -> Self {
        CheckpointError { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn io(path: &Path, error: &io::Error) -> Self {
        CheckpointError::new(path, error.to_string())
    }
}
