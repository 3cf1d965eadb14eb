//! Divides files into chunks of about a mebibyte that end at the end of a line or a row. A worker encodes a chunk at a time.

use std::error::Error;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kintsugi_spec::Cause;

use super::RefusedLine;
use super::decompress;
use super::inputs::{Format, Input};
use super::table::Table;
use crate::DataError;

/// Bytes of a chunk, unless a line is longer.
pub(super) const PIECE: usize = 1 << 20;

/// A longer line of a text is divided.
const MAX_TEXT: usize = 4 << 20;

/// A longer line of JSON or row is refused, since it must fit into memory. Tests use a smaller limit.
pub(super) const MAX_BYTES: usize = if cfg!(test) { 8 << 20 } else { 256 << 20 };

/// A chunk of a file: complete lines or rows.
#[derive(Debug, Default)]
pub(crate) struct TextChunk {
    /// Its number among all chunks.
    pub(crate) number: u64,
    /// Index of the input.
    pub(crate) file: usize,
    /// The first line or row, from 1.
    pub(crate) line: u64,
    /// The lines, or the concatenated texts of the rows.
    pub(crate) bytes: Vec<u8>,
    /// The number of every row with text, and the end of its text in `bytes`.
    pub(crate) rows: Vec<(u64, usize)>,
    /// Whether the file begins, and whether it ends, with this chunk.
    pub(crate) begins: bool,
    pub(crate) ends: bool,
    /// Lines or rows that are not in `bytes`.
    pub(crate) refused: Vec<RefusedLine>,
}

/// Reads files chunk by chunk.
pub(crate) struct TextChunks<'a> {
    inputs: &'a [Input],
    key: &'a str,
    counter: Arc<AtomicU64>,
    number: u64,
    file: usize,
    line: u64,
    open: Option<OpenFile>,
    /// Bytes that were read after the last chunk.
    rest: Vec<u8>,
}

/// A file that is being read.
enum OpenFile {
    Lines(Box<dyn Read + Send>),
    Rows(Box<Table>),
}

impl<'a> TextChunks<'a> {
    /// Reads the chunks of `inputs`, and of tables the column `key`. Counts the bytes read from disk in `counter`.
    pub(crate) fn new(inputs: &'a [Input], key: &'a str, counter: Arc<AtomicU64>) -> Self {
        TextChunks { inputs, key, counter, number: 0, file: 0, line: 1, open: None, rest: Vec::new() }
    }

    /// Fills `chunk` with the next chunk. Returns `false` if there is none.
    pub(crate) fn next(&mut self, chunk: &mut TextChunk) -> Result<bool, DataError> {
        while let Some(input) = self.inputs.get(self.file) {
            chunk.begins = self.open.is_none();
            let mut source = match self.open.take() {
                Some(source) => source,
                None => self.open(input)?,
            };
            chunk.bytes.clear();
            chunk.rows.clear();
            chunk.refused.clear();
            chunk.ends = false;
            (chunk.number, chunk.file, chunk.line) = (self.number, self.file, self.line);
            match &mut source {
                OpenFile::Lines(lines) => self.fill(lines, input.format, chunk).map_err(Into::into),
                OpenFile::Rows(table) => table.fill(chunk),
            }
            .map_err(|cause| unreadable(input, self.line, cause))?;
            let lines = match source {
                OpenFile::Lines(_) => memchr::memchr_iter(b'\n', &chunk.bytes).count(),
                OpenFile::Rows(_) => chunk.rows.len(),
            };
            self.line += (lines + chunk.refused.len()) as u64;
            if chunk.ends {
                self.file += 1;
            } else {
                self.open = Some(source);
            }
            if !chunk.bytes.is_empty() || !chunk.rows.is_empty() || !chunk.refused.is_empty() {
                self.number += 1;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Opens the next file.
    fn open(&mut self, input: &Input) -> Result<OpenFile, DataError> {
        self.line = 1;
        if input.format == Format::Parquet {
            return Table::open(input, self.key, &self.counter).map(|table| OpenFile::Rows(Box::new(table)));
        }
        decompress::open(&input.path, input.compression, &self.counter)
            .map(OpenFile::Lines)
            .map_err(|error| DataError::file("read", &input.path, error))
    }

    /// Reads until the chunk is full or the file ends.
    fn fill(
        &mut self,
        source: &mut (dyn Read + Send),
        format: Format,
        chunk: &mut TextChunk,
    ) -> std::io::Result<()> {
        chunk.bytes.append(&mut self.rest);
        let mut wanted = PIECE;
        loop {
            let missing = wanted.saturating_sub(chunk.bytes.len()) as u64;
            let read = source.take(missing).read_to_end(&mut chunk.bytes)?;
            chunk.ends = (read as u64) < missing;
            if chunk.begins && chunk.bytes.starts_with(b"\xef\xbb\xbf") {
                chunk.bytes.drain(..3);
            }
            if chunk.ends {
                return Ok(());
            }
            let cut = if format == Format::Text {
                end_of_text(&chunk.bytes)
            } else {
                memchr::memrchr(b'\n', &chunk.bytes).map(|at| at + 1)
            };
            if let Some(cut) = cut {
                self.rest.extend_from_slice(&chunk.bytes[cut..]);
                chunk.bytes.truncate(cut);
                return Ok(());
            }
            if chunk.bytes.len() >= MAX_BYTES {
                return self.skip_line(source, chunk);
            }
            // The bytes left over from the previous chunk may have any length.
            wanted = (2 * chunk.bytes.len()).min(MAX_BYTES);
        }
    }

    /// Skips a line that is too long for memory.
    fn skip_line(&mut self, source: &mut (dyn Read + Send), chunk: &mut TextChunk) -> std::io::Result<()> {
        let reason = format!("the line is longer than {} MiB", MAX_BYTES >> 20);
        chunk.refused.push(RefusedLine { file: self.file, line: self.line, reason });
        loop {
            chunk.bytes.clear();
            let read = source.take(PIECE as u64).read_to_end(&mut chunk.bytes)?;
            let end = memchr::memchr(b'\n', &chunk.bytes);
            if end.is_some() || read < PIECE {
                self.rest.extend_from_slice(&chunk.bytes[end.map_or(read, |at| at + 1)..]);
                chunk.bytes.clear();
                return Ok(());
            }
        }
    }
}

/// The error of a file that could be read only up to some line.
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

/// Where a text can be divided without dividing a tokenizer's word: before the first word of a line. A text without lines is
/// divided after a space, or between two characters.
fn end_of_text(text: &[u8]) -> Option<usize> {
    let line_begins = |at: &usize| text[at - 1] == b'\n' && !text[*at].is_ascii_whitespace();
    let mut newlines = memchr::memrchr_iter(b'\n', &text[..text.len() - 1]).map(|at| at + 1);
    if let Some(cut) = newlines.find(line_begins) {
        return Some(cut);
    }
    if text.len() < MAX_TEXT {
        return None;
    }
    let between = |at: &usize| text[*at] & 0b1100_0000 != 0b1000_0000;
    let space = memchr::memrchr(b' ', text).filter(|&at| at > 0);
    space.or_else(|| (1..text.len()).rev().find(between)).or(Some(text.len()))
}
