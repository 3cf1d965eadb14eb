//! A tokenizer's own files, as any Hugging Face program loads them: kept beside token files and in the folder of a run,
//! so that a model can be given away with what reads its text.

use std::path::Path;

use kintsugi_spec::tokenizer_files;
use serde_json::{Map, Value, json};

use super::Tokenizer;
use super::describe::{END, byte_level, config_path, pretty};
use super::train::letters;
use crate::DataError;
use crate::tokens::write_whole;

/// What is in them.
#[derive(Clone)]
pub(super) struct Files {
    tokenizer: Vec<u8>,
    config: Vec<u8>,
}

impl Files {
    /// A description, with the configuration that came with it, or one that says what `transformers` must know.
    pub fn new(tokenizer: Vec<u8>, config: Option<Value>, end: Option<&str>) -> Files {
        let config = config.unwrap_or_else(|| {
            let mut config = Map::new();
            config.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
            config.insert("clean_up_tokenization_spaces".to_owned(), json!(false));
            config.extend(end.map(|word| ("eos_token".to_owned(), json!(word))));
            Value::Object(config)
        });
        Files { tokenizer, config: pretty(&config).into_bytes() }
    }

    /// The bytes of a text as a byte-level vocabulary without merges.
    pub fn of_bytes() -> Files {
        let vocab: Map<String, Value> =
            letters().iter().zip(0..).map(|(letter, byte)| (letter.to_string(), json!(byte))).collect();
        let description = byte_level(&Value::Object(vocab), &json!([]), Some(json!(256)));
        Files::new(pretty(&description).into_bytes(), None, Some(END))
    }

    /// Writes them, the tokenizer to `path` and its configuration beside it.
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
