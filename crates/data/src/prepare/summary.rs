//! The progress and the summary of a preparation.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::PrepareOptions;
use crate::tokens::OutputPaths;
use crate::{TokenType, Tokenizer, ValidationPart};

/// The progress of a preparation.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrepareProgress {
    /// Bytes on disk in total.
    pub total: u64,
    /// Bytes read from disk.
    pub read: u64,
    /// Bytes of text, after decompression.
    pub text: u64,
    /// Documents written.
    pub documents: u64,
    /// Tokens written.
    pub tokens: u64,
    /// Documents without text, which are left out.
    pub empty: u64,
    /// Lines that could not be used.
    pub bad_lines: u64,
}

/// A line that could not be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadLine {
    /// The file.
    #[serde(serialize_with = "displayed")]
    pub file: PathBuf,
    /// What `line` counts: lines or rows.
    #[serde(skip)]
    pub unit: &'static str,
    /// The line, from 1.
    pub line: u64,
    /// What is wrong with it.
    pub reason: String,
}

/// The summary of a preparation.
#[derive(Clone, Debug, Serialize)]
pub struct PrepareSummary {
    /// Files read.
    pub files: usize,
    /// Bytes of text, after decompression.
    pub text_bytes: u64,
    /// Documents.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
    /// The documents at the end that were drawn for validation. `None` if the order of the text was kept, or if the documents
    /// are too few to draw from.
    pub validation: Option<ValidationPart>,
    /// Documents without text, which are left out.
    pub empty_documents: u64,
    /// Lines that could not be used, which are skipped.
    pub bad_lines: u64,
    /// The first lines that could not be used.
    pub bad: Vec<BadLine>,
    /// The tokenizer.
    pub tokenizer: String,
    /// Size of its vocabulary.
    pub vocab: usize,
    /// How a token is stored.
    pub token_type: String,
    /// The token appended to every document.
    pub end_of_document: Option<u32>,
    /// The tokens.
    #[serde(serialize_with = "displayed")]
    pub bin: PathBuf,
    /// The index.
    #[serde(serialize_with = "displayed")]
    pub idx: PathBuf,
    /// Seconds in total.
    pub seconds: f64,
    /// Million bytes of text per second.
    pub mb_per_s: f64,
}

impl PrepareSummary {
    pub(super) fn new(
        progress: &PrepareProgress,
        bad: Vec<BadLine>,
        options: &PrepareOptions,
        tokenizer: &Tokenizer,
        kind: TokenType,
        outputs: &OutputPaths,
        took: Duration,
    ) -> PrepareSummary {
        let seconds = took.as_secs_f64();
        PrepareSummary {
            files: options.inputs.len(),
            text_bytes: progress.text,
            documents: progress.documents,
            tokens: progress.tokens,
            validation: None,
            empty_documents: progress.empty,
            bad_lines: progress.bad_lines,
            bad,
            tokenizer: tokenizer.name().to_owned(),
            vocab: tokenizer.vocab(),
            token_type: kind.to_string(),
            end_of_document: options.end_of_document,
            bin: outputs.bin.clone(),
            idx: outputs.idx.clone(),
            seconds,
            mb_per_s: progress.text as f64 / 1e6 / seconds,
        }
    }
}

/// A path as text, since JSON cannot represent paths that are not UTF-8.
fn displayed<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}
