//! What can be wrong with data, in one sentence: the file, what was found, and what was expected.

use std::error::Error;
use std::path::{Path, PathBuf};

use kintsugi_spec::Cause;

/// A mistake in the data, or a file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// A file or folder that cannot be read or written.
    #[error("cannot {action} {}: {cause}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system says, or what is wrong with it.
        #[source]
        cause: Cause,
    },
    /// A file that is not what it should be.
    #[error("{}: found {found}, expected {expected}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// A file that could be read up to some line.
    #[error("{}, {unit} {line}: cannot read: {cause}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What `line` counts: lines or rows.
        unit: &'static str,
        /// The line, from 1.
        line: u64,
        /// What the system says, or what is wrong with the file.
        #[source]
        cause: Cause,
    },
    /// A line that cannot be used, where none is allowed.
    #[error("{}, {unit} {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// What `line` counts: lines or rows.
        unit: &'static str,
        /// The line, from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A thread that the system did not start.
    #[error(
        "a thread that encodes text cannot be started: {cause}; raise the limit on processes and threads (ulimit -u)"
    )]
    Thread {
        /// What the system says.
        #[source]
        cause: Cause,
    },
    /// A value that does not go with the others.
    #[error("{0}")]
    Value(String),
}

impl DataError {
    pub(crate) fn file(
        action: &'static str,
        path: &Path,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        DataError::File { action, path: path.to_owned(), cause: Cause::new(cause) }
    }

    pub(crate) fn foreign(path: &Path, found: impl Into<String>, expected: impl Into<String>) -> Self {
        DataError::Foreign { path: path.to_owned(), found: found.into(), expected: expected.into() }
    }
}
