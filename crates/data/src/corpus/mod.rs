//! Text on disk: finds files, decompresses them, and divides them into chunks for the workers.

mod chunks;
mod decompress;
mod inputs;
mod lines;
mod magic;
mod table;

pub(crate) use chunks::{TextChunk, TextChunks};
pub use inputs::{Format, Input};
pub(crate) use lines::{LineCounts, documents};

/// A line, or a row of a table, that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RefusedLine {
    /// Index of the input.
    pub(crate) file: usize,
    /// The line or row, from 1.
    pub(crate) line: u64,
    /// What is wrong with it.
    pub(crate) reason: String,
}

#[cfg(test)]
mod tests;
