//! What is wrong with a checkpoint, as a sentence with the path.

use std::error::Error;
use std::path::{Path, PathBuf};

use kintsugi_spec::Cause;

/// Something that cannot be read, written or used.
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
    /// A sentence about a file or folder, or the underlying error.
    pub(crate) fn new(path: &Path, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        CheckpointError { path: path.to_owned(), cause: Cause::new(cause) }
    }
}
