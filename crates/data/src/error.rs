//! The errors of data. A message has the file, what was found, and what was expected.

use std::error::Error;
use std::path::{Path, PathBuf};

use kintsugi_spec::Cause;

/// An error in the data, or a file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// A file or folder cannot be read or written.
    #[error("cannot {action} {}: {cause}", path.display())]
    File {
        /// The operation.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's error, or what is wrong.
        #[source]
        cause: Cause,
    },
    /// A file has unexpected contents.
    #[error("{}: found {found}, expected {expected}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A file could be read only up to some line.
    #[error("{}, {unit} {line}: cannot read: {cause}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What `line` counts: lines or rows.
        unit: &'static str,
        /// The line, from 1.
        line: u64,
        /// The system's error, or what is wrong with the file.
        #[source]
        cause: Cause,
    },
    /// A line cannot be used, and bad lines are not allowed.
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
    /// The system did not start a thread.
    #[error(
        "a thread that encodes text cannot be started: {cause}; raise the limit on processes and threads (ulimit -u)"
    )]
    Thread {
        /// The system's error.
        #[source]
        cause: Cause,
    },
    /// A value does not fit the others.
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
