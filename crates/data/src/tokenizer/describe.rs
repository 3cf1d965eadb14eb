//! The JSON description of a tokenizer, from any of its file formats, checked before the library reads it.

use std::path::{Path, PathBuf};

use kintsugi_spec::{input, tokenizer_files};
use serde_json::{Value, json};
use tokenizers::canonicalize_value;

use super::unusable;
use crate::DataError;

/// A tokenizer's description.
pub(super) struct Description {
    /// Its file.
    pub(super) path: PathBuf,
    /// The description in the library's format.
    pub(super) value: Value,
    /// The description in the Hugging Face format.
    pub(super) file: Vec<u8>,
    /// The `tokenizer_config.json` beside it, if there is one.
    pub(super) config: Option<Value>,
    pub(super) vocab: usize,
    /// The word that ends a text, and its token.
    pub(super) end: Option<(String, u32)>,
}

/// The most bytes of a file: more than any tokenizer has, and small enough for memory.
const MAX_BYTES: u64 = 512 << 20;

/// The most bytes of a token, since the library builds its tables by recursion over them.
const MAX_TOKEN: usize = 1 << 10;
/// The most characters of a word of a `WordPiece` model. The usual limit is 100.
const MAX_WORD: u64 = 1 << 16;
/// The largest vocabulary that a model may have.
const MAX_TOKENS: u64 = 1 << 24;

/// Words that usually end a text, if no configuration names one.
pub(super) const END: &str = "<|endoftext|>";
const ENDS: [&str; 5] = [END, "<|end_of_text|>", "</s>", "<eos>", "[EOS]"];

impl Description {
    /// Reads a `tokenizer.json`, or the tokenizer in a folder.
    pub(super) fn read(given: &Path) -> Result<Description, DataError> {
        let (path, file) = find(given)?;
        let config = config(&path)?;
        Description::new(path, file, config)
    }

    /// A description of an existing or a future file.
    pub(super) fn new(path: PathBuf, file: String, config: Option<Value>) -> Result<Description, DataError> {
        let mut value = parse(&path, &file)?;
        canonicalize_value(&mut value).map_err(|error| unusable(&path, &error.to_string()))?;
        check_word_length(&path, &value)?;
        let tokens = tokens(&value);
        let vocab = vocab(&path, &tokens)?;
        let configured = config.as_ref().and_then(|config| word(config, "eos_token"));
        let known = |word: &str| tokens.iter().find(|(known, _)| *known == word);
        let end = match configured {
            Some(word) => known(word),
            None => ENDS.into_iter().find_map(known),
        };
        let end = end.map(|&(word, id)| (word.to_owned(), id as u32));
        Ok(Description { value, file: file.into_bytes(), config, path, vocab, end })
    }
}

/// The file and its exact text, since a copy must be the same tokenizer to the last digit.
fn find(given: &Path) -> Result<(PathBuf, String), DataError> {
    if !given.exists() {
        let (name, local) = (given.display(), given.file_name().unwrap_or_default().display());
        let cause = format!(
            "there is no such file or folder; a tokenizer of the Hugging Face hub has to be downloaded first, as with: \
             hf download {name} --local-dir {local}"
        );
        return Err(DataError::file("read", given, cause));
    }
    if !given.is_dir() {
        return Ok((given.to_owned(), read_text(given)?));
    }
    let names = [tokenizer_files::TOKENIZER, tokenizer_files::VOCABULARY, tokenizer_files::MERGES];
    let [whole, vocab, merges] = names.map(|name| given.join(name));
    if whole.is_file() {
        return Ok((whole.clone(), read_text(&whole)?));
    }
    if vocab.is_file() && merges.is_file() {
        return Ok((vocab.clone(), pretty(&gpt2(&read_json(&vocab)?, &read_text(&merges)?))));
    }
    let found = if vocab.is_file() { "only a vocab.json" } else { "none of them" };
    Err(DataError::foreign(given, found, "a tokenizer.json, or a vocab.json and a merges.txt"))
}

/// The description of GPT-2's two files: a byte-level vocabulary, and merges in the order of the list.
fn gpt2(vocab: &Value, merges: &str) -> Value {
    let merges: Vec<&str> =
        merges.lines().filter(|line| !line.starts_with("#version") && !line.trim().is_empty()).collect();
    byte_level(vocab, &json!(merges), vocab.get(END).cloned())
}

/// The description of a byte-level BPE tokenizer with GPT-2's pre-tokenizer. `end` is the token of `<|endoftext|>`.
pub(super) fn byte_level(vocab: &Value, merges: &Value, end: Option<Value>) -> Value {
    let added = end.map(|id| {
        json!({ "id": id, "content": END, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
    });
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": Vec::from_iter(added),
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": bytes,
        "decoder": bytes,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges,
        },
    })
}

/// Every word of the model and every added word, with its token.
pub(super) fn tokens(value: &Value) -> Vec<(&str, u64)> {
    let vocab = &value["model"]["vocab"];
    let named = vocab.as_object().into_iter().flatten();
    let named = named.filter_map(|(word, id)| Some((word.as_str(), id.as_u64()?)));
    // A unigram model's vocabulary is a list of words and scores.
    let listed = vocab.as_array().into_iter().flatten().zip(0..);
    let listed = listed.map(|(entry, id)| (entry[0].as_str().unwrap_or_default(), id));
    let added = value["added_tokens"].as_array().into_iter().flatten();
    let added = added.filter_map(|token| Some((token["content"].as_str()?, token["id"].as_u64()?)));
    named.chain(listed).chain(added).collect()
}

/// The size of the vocabulary. Fails if a token id is much larger than the number of words, since the library's tables are as
/// long as the largest id.
fn vocab(path: &Path, tokens: &[(&str, u64)]) -> Result<usize, DataError> {
    let Some(largest) = tokens.iter().map(|&(_, id)| id).max() else {
        return Err(DataError::foreign(path, "a vocabulary without words", "a tokenizer"));
    };
    if let Some((token, id)) = tokens.iter().find(|(token, _)| token.len() > MAX_TOKEN) {
        let found = format!("token {id} of {} bytes", token.len());
        return Err(DataError::foreign(path, found, format!("at most {MAX_TOKEN}")));
    }
    let most = MAX_TOKENS.min(4 * tokens.len() as u64 + (1 << 16));
    if largest >= most {
        let found = format!("token {largest} in a vocabulary of {} words", tokens.len());
        return Err(DataError::foreign(path, found, format!("tokens below {most}")));
    }
    Ok(largest as usize + 1)
}

/// Fails if a `WordPiece` model allows very long words, since the library allocates memory for the longest.
fn check_word_length(path: &Path, value: &Value) -> Result<(), DataError> {
    match value["model"]["max_input_chars_per_word"].as_u64() {
        Some(longest) if longest > MAX_WORD => {
            let found = format!("max_input_chars_per_word = {longest}");
            Err(DataError::foreign(path, found, format!("at most {MAX_WORD}")))
        }
        _ => Ok(()),
    }
}

/// A description in the format of the file.
pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// The configuration beside a tokenizer: `tokenizer_config.json`, and `book.tokenizer_config.json` for a
/// `book.tokenizer.json`.
pub(super) fn config_path(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let prefix = name.strip_suffix(tokenizer_files::TOKENIZER).unwrap_or_default();
    path.with_file_name(format!("{prefix}{}", tokenizer_files::CONFIG))
}

fn config(path: &Path) -> Result<Option<Value>, DataError> {
    let config = config_path(path);
    if config.is_file() { read_json(&config).map(Some) } else { Ok(None) }
}

/// A special word that a configuration names.
fn word<'a>(config: &'a Value, role: &str) -> Option<&'a str> {
    let word = &config[role];
    word.as_str().or(word["content"].as_str())
}

fn read_json(path: &Path) -> Result<Value, DataError> {
    parse(path, &read_text(path)?)
}

fn parse(path: &Path, text: &str) -> Result<Value, DataError> {
    serde_json::from_str(text)
        .map_err(|error| DataError::foreign(path, format!("no JSON ({error})"), "a tokenizer.json"))
}

fn read_text(path: &Path) -> Result<String, DataError> {
    input::text(path, MAX_BYTES).map_err(|error| DataError::file("read", path, error))
}
