//! Text as it lies on disk: which files, how they are packed, and pieces of them for workers to encode.

mod batch;
mod decompress;
mod inputs;
mod lines;
mod magic;
mod table;

pub(crate) use batch::{Batch, Batches};
pub use inputs::{Format, Input};
pub(crate) use lines::{LineCounts, documents};

/// A line, or a row of a table, that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Number of the input.
    pub(crate) file: usize,
    /// The line or row, from 1.
    pub(crate) line: u64,
    /// What is wrong with it.
    pub(crate) reason: String,
}

#[cfg(test)]
mod tests;
