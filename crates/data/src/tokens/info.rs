//! Information about token files that Megatron's index does not have: `PREFIX.meta.json`.
//!
//! It is optional, since files of other programs do not have it. It allows early and clear errors about the vocabulary.

use std::io::ErrorKind;
use std::path::Path;

use kintsugi_spec::input;
use serde::{Deserialize, Serialize};

use crate::DataError;

/// A description of token files.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct TokenFileInfo {
    /// Size of the vocabulary: every token is below it.
    pub vocab: usize,
    /// The tokenizer, as it was named.
    pub tokenizer: String,
    /// The token that ends every document, if one was appended.
    pub end_of_document: Option<u32>,
    /// Documents.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
    /// The documents at the end that `prepare` has drawn for validation, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationPart>,
}

/// The documents at the end of token files that are for validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct ValidationPart {
    /// Documents.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
}

/// The most bytes of the file. A longer file is something else.
const MAX_BYTES: u64 = 1 << 20;

impl TokenFileInfo {
    /// Reads the description, if there is one.
    pub(super) fn read(path: &Path) -> Result<Option<TokenFileInfo>, DataError> {
        let text = match input::bytes(path, MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::file("read", path, error)),
        };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| DataError::foreign(path, error.to_string(), "what `kintsugi prepare` writes"))
    }
}
