//! A tokenizer's files in the Hugging Face format. They are stored with token files and in the folder of a run, so that a
//! model can be distributed with its tokenizer.

use std::path::Path;

use kintsugi_spec::tokenizer_files;
use serde_json::{Map, Value, json};

use super::Tokenizer;
use super::describe::{END, byte_level, config_path, pretty};
use super::train::letters;
use crate::DataError;
use crate::tokens::write_whole;

/// The contents of a tokenizer's files.
#[derive(Clone)]
pub(super) struct TokenizerFiles {
    tokenizer: Vec<u8>,
    config: Vec<u8>,
}

impl TokenizerFiles {
    /// The files of a description, with its configuration, or a minimal one for the `transformers` library.
    pub fn new(tokenizer: Vec<u8>, config: Option<Value>, end: Option<&str>) -> TokenizerFiles {
        let config = config.unwrap_or_else(|| {
            let mut config = Map::new();
            config.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
            config.insert("clean_up_tokenization_spaces".to_owned(), json!(false));
            config.extend(end.map(|word| ("eos_token".to_owned(), json!(word))));
            Value::Object(config)
        });
        TokenizerFiles { tokenizer, config: pretty(&config).into_bytes() }
    }

    /// The tokenizer of bytes, as a byte-level vocabulary without merges.
    pub fn of_bytes() -> TokenizerFiles {
        let vocab: Map<String, Value> =
            letters().iter().zip(0..).map(|(letter, byte)| (letter.to_string(), json!(byte))).collect();
        let description = byte_level(&Value::Object(vocab), &json!([]), Some(json!(256)));
        TokenizerFiles::new(pretty(&description).into_bytes(), None, Some(END))
    }

    /// Writes the tokenizer to `path`, and its configuration beside it.
    pub fn write(&self, path: &Path) -> Result<(), DataError> {
        write_whole(&config_path(path), &self.config)?;
        write_whole(path, &self.tokenizer)
    }
}

impl Tokenizer {
    /// Its files, under the names of [`tokenizer_files::WRITTEN`].
    pub(crate) fn files(&self) -> [&[u8]; 2] {
        [&self.files.tokenizer, &self.files.config]
    }

    /// Writes its files into a folder.
    pub fn save(&self, folder: &Path) -> Result<(), DataError> {
        self.files.write(&folder.join(tokenizer_files::TOKENIZER))
    }
}
