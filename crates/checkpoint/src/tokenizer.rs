//! The tokenizer of weights: where it is stored, and how a conversion copies it.

use std::io;
use std::path::{Path, PathBuf};

use kintsugi_spec::input;
use kintsugi_spec::tokenizer_files::{ALL, CONFIG, GENERATION, SENTENCE_PIECE, TOKENIZER, VOCABULARY};
use serde_json::{Map, Value};

use crate::files::{self, write_json};
use crate::folder::places_of_tokenizer;
use crate::huggingface::HuggingFaceFolder;
use crate::{Checkpoint, CheckpointError, WeightsFolder};

/// The field of `generation_config.json` and of `config.json` with the tokens that end a text.
const END: &str = "eos_token_id";
/// The fields of a `config.json` that belong to the tokenizer, with their names in `tokenizer_config.json`.
const TOKENS: [(&str, &str); 3] =
    [("bos_token_id", "bos_token"), (END, "eos_token"), ("pad_token_id", "pad_token")];

impl WeightsFolder {
    /// The folder with the tokenizer of these weights, if it is known and still exists.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        match self {
            WeightsFolder::HuggingFace(folder) => Some(folder.path().to_owned()).filter(|path| has_one(path)),
            WeightsFolder::Checkpoint(checkpoint) => checkpoint.tokenizer(),
        }
    }

    /// The token that ended every document of the training data, if it is known.
    pub fn end_of_document(&self) -> Option<u32> {
        match self {
            WeightsFolder::HuggingFace(_) => None,
            WeightsFolder::Checkpoint(checkpoint) => checkpoint.plan().end_of_document(),
        }
    }

    /// The tokens that end a text: those in the `generation_config.json`, or else the `config.json`, of the Hugging Face folder
    /// of these weights. If they do not include the token that ended documents in training, only that token.
    pub fn end_tokens(&self) -> Vec<u32> {
        let folder = match self {
            WeightsFolder::HuggingFace(folder) => Some(folder.path().to_owned()),
            WeightsFolder::Checkpoint(checkpoint) => checkpoint.tokenizer(),
        };
        let named = |name: &str| folder.as_deref().map(|folder| numbers(&read(folder, name)[END]));
        let named = [GENERATION, "config.json"].into_iter().filter_map(named);
        let named = named.into_iter().find(|tokens| !tokens.is_empty()).unwrap_or_default();
        match self.end_of_document() {
            Some(end) if !named.contains(&end) => vec![end],
            _ => named,
        }
    }
}

/// Sets `end` as the token that ends a text, unless it already is one: in the `generation_config.json` of `folder`, and in
/// the fields of the `config.json` that will be written.
pub(crate) fn set_end(
    folder: &Path,
    config: &mut Map<String, Value>,
    end: u32,
) -> Result<(), CheckpointError> {
    let mut generation = match read(folder, GENERATION) {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    for fields in [config, &mut generation] {
        if !fields.get(END).is_some_and(|named| numbers(named).contains(&end)) {
            fields.insert(END.to_owned(), end.into());
        }
    }
    write_json(&folder.join(GENERATION), &Value::Object(generation))
}

/// The numbers of a JSON value that is a number or a list of numbers.
fn numbers(value: &Value) -> Vec<u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|value| value.as_u64()?.try_into().ok()).collect()
}

/// A JSON file in a folder, or null if there is none.
fn read(folder: &Path, name: &str) -> Value {
    whole(&folder.join(name)).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

fn whole(path: &Path) -> io::Result<Vec<u8>> {
    input::bytes(path, input::MAX_WRITTEN_BY_PROGRAMS)
}

impl Checkpoint {
    /// The folder of its tokenizer. Prefers the folder that training started from if its tokenizer is identical, because it may
    /// have more files. Otherwise it is the folder of the checkpoint or of its run.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        let init = self.plan().init.clone().filter(|init| HuggingFaceFolder::is_one(init) && has_one(init));
        let own = places_of_tokenizer(self.path()).into_iter().find(|path| has_one(path));
        let same = |own: &Path, init: &Path| match (whole(&own.join(TOKENIZER)), whole(&init.join(TOKENIZER)))
        {
            (Ok(own), Ok(init)) => own == init,
            _ => false,
        };
        match (own, init) {
            (Some(own), Some(init)) if !same(&own, &init) => Some(own),
            (Some(own), None) => Some(own),
            (_, init) => init,
        }
    }
}

/// Whether a folder has a tokenizer in it.
fn has_one(folder: &Path) -> bool {
    [TOKENIZER, VOCABULARY, SENTENCE_PIECE].iter().any(|name| folder.join(name).is_file())
}

/// Copies a tokenizer from one folder to another and syncs it to the disk.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    for name in ALL {
        let (file, copy) = (from.join(name), to.join(name));
        if file.is_file() {
            files::copy(&file, &copy).map_err(|error| CheckpointError::new(&file, error))?;
        }
    }
    Ok(())
}

/// The special tokens of the tokenizer in a folder, as fields of a `config.json`. They come from the folder's `config.json`,
/// or else from the tokenizer.
pub(crate) fn special_tokens(folder: &Path) -> Map<String, Value> {
    let (fields, config) = (read(folder, "config.json"), read(folder, CONFIG));
    let tokenizer = if fields.is_null() { read(folder, TOKENIZER) } else { Value::Null };
    let number = |word: &str| {
        let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
        let added = added.filter(|token| token["content"] == word).map(|token| &token["id"]);
        added.chain(tokenizer["model"]["vocab"].get(word)).next().cloned()
    };
    let token = |(field, role): (&str, &str)| {
        let word = config[role].as_str().or(config[role]["content"].as_str());
        let id = fields.get(field).cloned().or_else(|| number(word?))?;
        Some((field.to_owned(), id))
    };
    TOKENS.into_iter().filter_map(token).collect()
}
