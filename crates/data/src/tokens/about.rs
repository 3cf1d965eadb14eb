//! What is known of a pair of token files beside Megatron's own index: `PREFIX.meta.json`.
//!
//! Files of others do not have it; nothing but early and clear words about a vocabulary depends on it.

use std::io::ErrorKind;
use std::path::Path;

use kintsugi_spec::input;
use serde::{Deserialize, Serialize};

use crate::DataError;

/// A description of token files.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct About {
    /// Size of the vocabulary: every token is below it.
    pub vocab: usize,
    /// The tokenizer, as it was named.
    pub tokenizer: String,
    /// The token that ends every document, where one was appended.
    pub end_of_document: Option<u32>,
    /// Documents.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
}

/// It has a few short fields: what is longer is something else.
const MOST_BYTES: u64 = 1 << 20;

impl About {
    /// Reads the description, where there is one.
    pub(super) fn read(path: &Path) -> Result<Option<About>, DataError> {
        let text = match input::bytes(path, MOST_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::file("read", path, error)),
        };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| DataError::foreign(path, error.to_string(), "what `kintsugi prepare` writes"))
    }
}
