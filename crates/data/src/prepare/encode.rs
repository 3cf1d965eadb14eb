//! Encodes the documents of a chunk as tokens.

use crate::corpus::{Format, Input, LineCounts, TextChunk, documents};
use crate::{DataError, TokenType, Tokenizer};

/// A chunk of text and its tokens. Its memory is reused.
#[derive(Debug, Default)]
pub(super) struct EncodedChunk {
    pub(super) chunk: TextChunk,
    /// Tokens of all documents, in the type of the file.
    pub(super) tokens: Vec<u8>,
    /// Number of tokens of each sequence.
    pub(super) lengths: Vec<u32>,
    /// The numbers of lines or rows of the chunk.
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

/// The most memory that a chunk keeps for reuse. Memory for a very long line is freed.
const KEEP: usize = 8 << 20;

/// The most rows, documents or refused lines whose memory a chunk keeps.
const KEEP_ROWS: usize = 1 << 12;

impl Encode<'_> {
    /// Encodes the documents of a chunk.
    pub(super) fn run(
        self,
        encoder: &mut crate::Encoder,
        input: &Input,
        encoded: &mut EncodedChunk,
    ) -> Result<(), DataError> {
        encoded.clear();
        let EncodedChunk { chunk, tokens, lengths, empty, .. } = encoded;
        let format = input.format;
        // A document ends with every JSON line or row, and with the last chunk of a text.
        let end = self.end_of_document.filter(|_| format != Format::Text || chunk.ends);
        encoded.parsed = documents(chunk, format, self.key, |line, text| {
            let encoded = encoder.encode(text).map_err(|error| DataError::Line {
                path: input.path.clone(),
                unit: format.unit(),
                line,
                reason: error.to_string(),
            })?;
            let whole = format != Format::Text || chunk.begins;
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

impl EncodedChunk {
    fn clear(&mut self) {
        self.tokens.clear();
        self.lengths.clear();
        self.parsed = LineCounts::default();
        for bytes in [&mut self.tokens, &mut self.chunk.bytes] {
            bytes.shrink_to(KEEP);
        }
        self.lengths.shrink_to(KEEP_ROWS);
        self.chunk.rows.shrink_to(KEEP_ROWS);
        self.chunk.refused.shrink_to(KEEP_ROWS);
        self.empty = 0;
    }
}
