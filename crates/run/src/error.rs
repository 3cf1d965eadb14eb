//! Why a run's folder cannot be used.

use std::io;
use std::path::{Path, PathBuf};

use kintsugi_checkpoint::CheckpointError;

/// Why a run's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunFolderError {
    /// A file or folder that cannot be created, read, written or replaced.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A line of the metrics cannot be written. The run goes on.
    #[error("cannot write {}: {source}", path.display())]
    Metrics {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The folder has a file with the name of a run's, and no run has used it.
    #[error("{} exists, but no run has written it; a run would replace it, so set another run.out", .0.display())]
    Foreign(PathBuf),
    /// The user's configuration is the run's own file and would be changed.
    #[error("{} is the given configuration, and --set would change it; set another run.out", .0.display())]
    GivenConfig(PathBuf),
    /// The folder is in use, or its checkpoints cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl RunFolderError {
    pub(crate) fn file(action: &'static str, path: &Path, source: io::Error) -> Self {
        RunFolderError::File { action, path: path.to_owned(), source }
    }
}
