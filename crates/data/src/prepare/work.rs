//! What a worker does: the documents of a piece, as tokens.

use crate::corpus::{Batch, Format, Input, LineCounts, documents};
use crate::{DataError, TokenType, Tokenizer};

/// A piece of text, and what became of it. Its memory is used again and again.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) batch: Batch,
    /// Tokens of all documents, as they are stored.
    pub(super) tokens: Vec<u8>,
    /// Tokens of each sequence.
    pub(super) lengths: Vec<u32>,
    /// The lines or rows of the piece.
    pub(super) parsed: LineCounts,
    /// Documents without text.
    pub(super) empty: u64,
}

/// How to encode.
#[derive(Clone, Copy)]
pub(super) struct Encode<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) kind: TokenType,
    pub(super) key: &'a str,
    pub(super) end_of_document: Option<u32>,
}

/// Memory that a piece may keep; what a very long line took is given back.
const KEEP: usize = 8 << 20;

/// Rows, documents or refused lines whose memory a piece may keep.
const KEEP_ROWS: usize = 1 << 12;

impl Encode<'_> {
    /// Encodes the documents of a piece.
    pub(super) fn run(
        self,
        encoder: &mut crate::Encoder,
        input: &Input,
        work: &mut Work,
    ) -> Result<(), DataError> {
        work.clear();
        let Work { batch, tokens, lengths, empty, .. } = work;
        let format = input.format;
        // The end is appended where a document ends: every JSON line or row, and the last piece of a text.
        let end = self.end_of_document.filter(|_| format != Format::Text || batch.ends);
        work.parsed = documents(batch, format, self.key, |line, text| {
            let encoded = encoder.encode(text).map_err(|error| DataError::Line {
                path: input.path.clone(),
                unit: format.unit(),
                line,
                reason: error.to_string(),
            })?;
            let whole = format != Format::Text || batch.begins;
            if encoded.is_empty() && whole {
                *empty += 1;
                return Ok(());
            }
            self.kind.write(encoded, tokens);
            self.kind.write(end.as_slice(), tokens);
            let length = encoded.len() + usize::from(end.is_some());
            if length > 0 {
                lengths.push(length as u32);
            }
            Ok(())
        })?;
        Ok(())
    }
}

impl Work {
    fn clear(&mut self) {
        self.tokens.clear();
        self.lengths.clear();
        self.parsed = LineCounts::default();
        for bytes in [&mut self.tokens, &mut self.batch.bytes] {
            bytes.shrink_to(KEEP);
        }
        self.lengths.shrink_to(KEEP_ROWS);
        self.batch.rows.shrink_to(KEEP_ROWS);
        self.batch.refused.shrink_to(KEEP_ROWS);
        self.empty = 0;
    }
}
