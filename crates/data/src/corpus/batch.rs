//! Cuts files into pieces of about a mebibyte that end at the end of a line: what one worker encodes at a time.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::Refused;
use super::decompress;
use super::inputs::{Format, Input};
use crate::DataError;

/// Bytes of a piece, if its lines allow.
const PIECE: usize = 1 << 20;

/// A line of a text that is longer than this is cut: nobody reads such lines.
const MOST_TEXT: usize = 4 << 20;

/// A line of JSON that is longer than this is refused: it must be held in memory whole. Tests have less.
const MOST_JSON: usize = if cfg!(test) { 8 << 20 } else { 256 << 20 };

/// A piece of a file: whole lines.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Place in the order of all pieces.
    pub(crate) number: u64,
    /// Number of the input.
    pub(crate) file: usize,
    /// The first line, from 1.
    pub(crate) line: u64,
    /// The lines.
    pub(crate) bytes: Vec<u8>,
    /// Whether the file begins and ends with this piece.
    pub(crate) begins: bool,
    pub(crate) ends: bool,
    /// A line that is not among the bytes.
    pub(crate) refused: Option<Refused>,
}

/// The pieces of files, one after the other.
pub(crate) struct Batches<'a> {
    inputs: &'a [Input],
    counter: Arc<AtomicU64>,
    number: u64,
    file: usize,
    line: u64,
    open: Option<Box<dyn Read + Send>>,
    /// What was read beyond the last piece.
    rest: Vec<u8>,
}

impl<'a> Batches<'a> {
    /// The pieces of `inputs`; `counter` counts the bytes that are read from disk.
    pub(crate) fn new(inputs: &'a [Input], counter: Arc<AtomicU64>) -> Self {
        Batches { inputs, counter, number: 0, file: 0, line: 1, open: None, rest: Vec::new() }
    }

    /// Fills `batch` with the next piece; `false` if there is none.
    pub(crate) fn next(&mut self, batch: &mut Batch) -> Result<bool, DataError> {
        while let Some(input) = self.inputs.get(self.file) {
            let failed = |line, error: std::io::Error| match line {
                1 => DataError::file("read", &input.path, error),
                line => DataError::Line {
                    path: input.path.clone(),
                    line,
                    reason: format!("cannot read: {error}"),
                },
            };
            batch.begins = self.open.is_none();
            if self.open.is_none() {
                self.open = Some(decompress::open(input, &self.counter).map_err(|error| failed(1, error))?);
                self.line = 1;
            }
            self.fill(input.format, batch).map_err(|error| failed(self.line, error))?;
            batch.number = self.number;
            (batch.file, batch.line) = (self.file, self.line);
            self.line += memchr::memchr_iter(b'\n', &batch.bytes).count() as u64;
            self.line += u64::from(batch.refused.is_some());
            if batch.ends {
                self.open = None;
                self.file += 1;
            }
            if !batch.bytes.is_empty() || batch.refused.is_some() {
                self.number += 1;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads until there is a whole piece, or the file ends.
    fn fill(&mut self, format: Format, batch: &mut Batch) -> std::io::Result<()> {
        batch.bytes.clear();
        batch.bytes.append(&mut self.rest);
        batch.refused = None;
        let mut wanted = PIECE;
        loop {
            let missing = wanted.saturating_sub(batch.bytes.len()) as u64;
            let source = self.open.as_mut().expect("a file is open");
            let read = source.take(missing).read_to_end(&mut batch.bytes)?;
            batch.ends = (read as u64) < missing;
            if batch.begins && batch.bytes.starts_with(b"\xef\xbb\xbf") {
                batch.bytes.drain(..3);
            }
            if batch.ends {
                return Ok(());
            }
            let cut = match format {
                Format::Text => end_of_text(&batch.bytes),
                Format::JsonLines => memchr::memrchr(b'\n', &batch.bytes).map(|at| at + 1),
            };
            if let Some(cut) = cut {
                self.rest.extend_from_slice(&batch.bytes[cut..]);
                batch.bytes.truncate(cut);
                return Ok(());
            }
            if batch.bytes.len() >= MOST_JSON {
                return self.skip_line(batch);
            }
            // What the piece before left over may be any length.
            wanted = (2 * batch.bytes.len()).min(MOST_JSON);
        }
    }

    /// Reads past a line that is too long to be held.
    fn skip_line(&mut self, batch: &mut Batch) -> std::io::Result<()> {
        let reason = format!("the line is longer than {} MiB", MOST_JSON >> 20);
        batch.refused = Some(Refused { file: self.file, line: self.line, reason });
        loop {
            batch.bytes.clear();
            let source = self.open.as_mut().expect("a file is open");
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
