//! The errors of checkpoints, with the path.

use std::error::Error;
use std::path::{Path, PathBuf};

use kintsugi_spec::Cause;

/// A file or folder cannot be read, written or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {cause}", path.display())]
pub struct CheckpointError {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub cause: Cause,
}

impl CheckpointError {
    /// An error of a file or folder with this message or cause.
    pub(crate) fn new(path: &Path, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        CheckpointError { path: path.to_owned(), cause: Cause::new(cause) }
    }
}
