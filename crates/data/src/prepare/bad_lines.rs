//! Lines that cannot be used: the first ones are reported, and a file with too many is refused.

use super::{BadLine, PrepareOptions};
use crate::DataError;
use crate::corpus::{Input, LineCounts};

/// Bad lines that are reported individually. The others are only counted.
const MAX_SHOWN: usize = 20;

/// A file is refused if more than one in this many lines is bad, since it probably has another format.
const ONE_IN: u64 = 10;

/// The bad lines of all files so far.
pub(super) struct BadLines<'a> {
    options: &'a PrepareOptions,
    first: Vec<BadLine>,
    count: u64,
    /// The current file, with the number of its lines and bad lines, and its first bad line.
    file: usize,
    lines: u64,
    bad: u64,
    example: Option<BadLine>,
}

impl<'a> BadLines<'a> {
    pub(super) fn new(options: &'a PrepareOptions) -> Self {
        BadLines { options, first: Vec::new(), count: 0, file: 0, lines: 0, bad: 0, example: None }
    }

    /// Number of bad lines.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The first bad lines.
    pub(super) fn into_first(self) -> Vec<BadLine> {
        self.first
    }

    /// Adds the bad lines of a chunk. Chunks come in the order of the files.
    pub(super) fn add(&mut self, file: usize, parsed: &LineCounts) -> Result<(), DataError> {
        if file != self.file {
            self.end_file()?;
            self.file = file;
        }
        self.lines += parsed.lines;
        for refused in &parsed.refused {
            let Input { path, format, .. } = &self.options.inputs[file];
            let (file, unit) = (path.clone(), format.unit());
            let bad = BadLine { file, unit, line: refused.line, reason: refused.reason.clone() };
            if self.options.strict {
                let BadLine { file: path, unit, line, reason } = bad;
                return Err(DataError::Line { path, unit, line, reason });
            }
            (self.bad, self.count) = (self.bad + 1, self.count + 1);
            if self.first.len() < MAX_SHOWN {
                self.first.push(bad.clone());
            }
            self.example.get_or_insert(bad);
        }
        Ok(())
    }

    /// Fails if too many lines of the current file are bad.
    pub(super) fn end_file(&mut self) -> Result<(), DataError> {
        let (lines, bad) = (std::mem::take(&mut self.lines), std::mem::take(&mut self.bad));
        match self.example.take() {
            Some(first) if bad * ONE_IN > lines && !self.options.allow_bad_lines => {
                let BadLine { unit, line, reason, .. } = first;
                let share = 100 / ONE_IN;
                Err(DataError::file(
                    "use",
                    &first.file,
                    format!(
                        "{bad} of its {lines} {unit}s are bad, more than {share} %; the first is {unit} {line}: {reason}; \
                         add --allow-bad-lines to skip them"
                    ),
                ))
            }
            _ => Ok(()),
        }
    }
}
