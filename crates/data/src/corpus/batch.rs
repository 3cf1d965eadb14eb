//! Cuts files into pieces of about a mebibyte that end at the end of a line or a row: what one worker encodes at a
//! time.

use std::error::Error;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kintsugi_spec::Cause;

use super::Refused;
use super::decompress;
use super::inputs::{Format, Input};
use super::table::Table;
use crate::DataError;

/// Bytes of a piece, if its lines allow.
pub(super) const PIECE: usize = 1 << 20;

/// A line of a text that is longer than this is cut: nobody reads such lines.
const MOST_TEXT: usize = 4 << 20;

/// A line of JSON or a row that is longer than this is refused: it must be held in memory whole. Tests have less.
pub(super) const MOST_BYTES: usize = if cfg!(test) { 8 << 20 } else { 256 << 20 };

/// A piece of a file: whole lines or rows.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Place in the order of all pieces.
    pub(crate) number: u64,
    /// Number of the input.
    pub(crate) file: usize,
    /// The first line or row, from 1.
    pub(crate) line: u64,
    /// The lines, or the texts of the rows, end to end.
    pub(crate) bytes: Vec<u8>,
    /// The number of every row that has text, and where that ends.
    pub(crate) rows: Vec<(u64, usize)>,
    /// Whether the file begins and ends with this piece.
    pub(crate) begins: bool,
    pub(crate) ends: bool,
    /// Lines or rows that are not among the bytes.
    pub(crate) refused: Vec<Refused>,
}

/// The pieces of files, one after the other.
pub(crate) struct Batches<'a> {
    inputs: &'a [Input],
    key: &'a str,
    counter: Arc<AtomicU64>,
    number: u64,
    file: usize,
    line: u64,
    open: Option<Source>,
    /// What was read beyond the last piece.
    rest: Vec<u8>,
}

/// A file that is being read.
enum Source {
    Lines(Box<dyn Read + Send>),
    Rows(Box<Table>),
}

impl<'a> Batches<'a> {
    /// The pieces of `inputs`, of tables the column `key`; `counter` counts the bytes that are read from disk.
    pub(crate) fn new(inputs: &'a [Input], key: &'a str, counter: Arc<AtomicU64>) -> Self {
        Batches { inputs, key, counter, number: 0, file: 0, line: 1, open: None, rest: Vec::new() }
    }

    /// Fills `batch` with the next piece; `false` if there is none.
    pub(crate) fn next(&mut self, batch: &mut Batch) -> Result<bool, DataError> {
        while let Some(input) = self.inputs.get(self.file) {
            batch.begins = self.open.is_none();
            let mut source = match self.open.take() {
                Some(source) => source,
                None => self.open(input)?,
            };
            batch.bytes.clear();
            batch.rows.clear();
            batch.refused.clear();
            batch.ends = false;
            (batch.number, batch.file, batch.line) = (self.number, self.file, self.line);
            match &mut source {
                Source::Lines(lines) => self.fill(lines, input.format, batch).map_err(Into::into),
                Source::Rows(table) => table.fill(batch),
            }
            .map_err(|cause| unreadable(input, self.line, cause))?;
            let lines = match source {
                Source::Lines(_) => memchr::memchr_iter(b'\n', &batch.bytes).count(),
                Source::Rows(_) => batch.rows.len(),
            };
            self.line += (lines + batch.refused.len()) as u64;
            if batch.ends {
                self.file += 1;
            } else {
                self.open = Some(source);
            }
            if !batch.bytes.is_empty() || !batch.rows.is_empty() || !batch.refused.is_empty() {
                self.number += 1;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Opens the next file.
    fn open(&mut self, input: &Input) -> Result<Source, DataError> {
        self.line = 1;
        if input.format == Format::Parquet {
            return Table::open(input, self.key, &self.counter).map(|table| Source::Rows(Box::new(table)));
        }
        decompress::open(&input.path, input.compression, &self.counter)
            .map(Source::Lines)
            .map_err(|error| DataError::file("read", &input.path, error))
    }

    /// Reads until there is a whole piece, or the file ends.
    fn fill(
        &mut self,
        source: &mut (dyn Read + Send),
        format: Format,
        batch: &mut Batch,
    ) -> std::io::Result<()> {
        batch.bytes.append(&mut self.rest);
        let mut wanted = PIECE;
        loop {
            let missing = wanted.saturating_sub(batch.bytes.len()) as u64;
            let read = source.take(missing).read_to_end(&mut batch.bytes)?;
            batch.ends = (read as u64) < missing;
            if batch.begins && batch.bytes.starts_with(b"\xef\xbb\xbf") {
                batch.bytes.drain(..3);
            }
            if batch.ends {
                return Ok(());
            }
            let cut = if format == Format::Text {
                end_of_text(&batch.bytes)
            } else {
                memchr::memrchr(b'\n', &batch.bytes).map(|at| at + 1)
            };
            if let Some(cut) = cut {
                self.rest.extend_from_slice(&batch.bytes[cut..]);
                batch.bytes.truncate(cut);
                return Ok(());
            }
            if batch.bytes.len() >= MOST_BYTES {
                return self.skip_line(source, batch);
            }
            // What the piece before left over may be any length.
            wanted = (2 * batch.bytes.len()).min(MOST_BYTES);
        }
    }

    /// Reads past a line that is too long to be held.
    fn skip_line(&mut self, source: &mut (dyn Read + Send), batch: &mut Batch) -> std::io::Result<()> {
        let reason = format!("the line is longer than {} MiB", MOST_BYTES >> 20);
        batch.refused.push(Refused { file: self.file, line: self.line, reason });
        loop {
            batch.bytes.clear();
            let read = source.take(PIECE as u64).read_to_end(&mut batch.bytes)?;
            let end = memchr::memchr(b'\n', &batch.bytes);
            if end.is_some() || read < PIECE {
                self.rest.extend_from_slice(&batch.bytes[end.map_or(read, |at| at + 1)..]);
                batch.bytes.clear();
                return Ok(());
            }
        }
    }
}

/// A file that could be read up to some line.
fn unreadable(input: &Input, line: u64, cause: Box<dyn Error + Send + Sync>) -> DataError {
    match line {
        1 => DataError::file("read", &input.path, cause),
        line => DataError::Unreadable {
            path: input.path.clone(),
            unit: input.format.unit(),
            line,
            cause: Cause::new(cause),
        },
    }
}

/// Where a text may be cut so that no tokenizer's words are: before the first word of a line. A text without lines is
/// cut after a space, or between two characters.
fn end_of_text(text: &[u8]) -> Option<usize> {
    let line_begins = |at: &usize| text[at - 1] == b'\n' && !text[*at].is_ascii_whitespace();
    let mut newlines = memchr::memrchr_iter(b'\n', &text[..text.len() - 1]).map(|at| at + 1);
    if let Some(cut) = newlines.find(line_begins) {
        return Some(cut);
    }
    if text.len() < MOST_TEXT {
        return None;
    }
    let between = |at: &usize| text[*at] & 0b1100_0000 != 0b1000_0000;
    let space = memchr::memrchr(b' ', text).filter(|&at| at > 0);
    space.or_else(|| (1..text.len()).rev().find(between)).or(Some(text.len()))
}
