//! Tokenizers: any Hugging Face `tokenizer.json`, GPT-2's `vocab.json` with `merges.txt`, or bytes.

mod compare;
mod describe;
mod files;
mod growth;
mod pipeline;
mod train;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::pipeline::PipelineToken;

use self::describe::Description;
use self::files::TokenizerFiles;
use self::pipeline::{Pipeline, Scratch};
use crate::DataError;
use crate::guard::catch_panic;

pub use train::{TrainedTokenizer, train_tokenizer};

/// The most characters of a library's message.
const MAX_REASON: usize = 200;

/// A tokenizer.
#[derive(Clone)]
pub struct Tokenizer {
    name: String,
    kind: TokenizerKind,
    vocab: usize,
    end_of_document: Option<u32>,
    files: TokenizerFiles,
}

#[derive(Clone)]
enum TokenizerKind {
    Bytes,
    Pipeline { path: PathBuf, pipeline: Arc<Pipeline> },
}

/// Encodes texts one after the other and reuses its memory.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    scratch: Option<Scratch>,
    tokens: Vec<PipelineToken>,
}

impl Tokenizer {
    /// The name of the tokenizer whose tokens are the bytes of the text, and one for the end of a document.
    pub const BYTES: &'static str = "bytes";

    /// Opens a tokenizer by name: `bytes`, a `tokenizer.json`, a folder with one, or a folder with `vocab.json` and
    /// `merges.txt`.
    pub fn open(name: &str) -> Result<Tokenizer, DataError> {
        if name == Self::BYTES {
            let (kind, end_of_document) = (TokenizerKind::Bytes, Some(256));
            let files = TokenizerFiles::of_bytes();
            return Ok(Tokenizer { name: name.to_owned(), kind, vocab: 257, end_of_document, files });
        }
        Tokenizer::described(name.to_owned(), Description::read(Path::new(name))?)
    }

    fn described(name: String, description: Description) -> Result<Tokenizer, DataError> {
        let Description { path, value, file, config, vocab, end } = description;
        let files = TokenizerFiles::new(file, config, end.as_ref().map(|(word, _)| word.as_str()));
        let pipeline = guarded(&path, || Pipeline::new(&value))?;
        // The library assigns the ids of added tokens that are not in the vocabulary, and ignores those in the file.
        let added = pipeline.library().get_added_vocabulary();
        let end_of_document = end.map(|(word, id)| added.token_to_id(&word).unwrap_or(id));
        let vocab = added.get_vocab().into_values().map(|id| id as usize + 1).fold(vocab, usize::max);
        let kind = TokenizerKind::Pipeline { path, pipeline: Arc::new(pipeline) };
        Ok(Tokenizer { name, kind, vocab, end_of_document, files })
    }

    /// The name that it was opened with.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size of the vocabulary: every token is below it.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The token that ends a document, if it is known.
    pub fn end_of_document(&self) -> Option<u32> {
        self.end_of_document
    }

    /// The token of a special word, such as `<|endoftext|>`.
    pub fn special(&self, word: &str) -> Option<u32> {
        match &self.kind {
            TokenizerKind::Bytes => None,
            TokenizerKind::Pipeline { pipeline, .. } => {
                pipeline.library().get_added_vocabulary().token_to_id(word)
            }
        }
    }

    /// An encoder, one per thread.
    pub fn encoder(&self) -> Encoder<'_> {
        let scratch = match &self.kind {
            TokenizerKind::Bytes => None,
            TokenizerKind::Pipeline { pipeline, .. } => Some(pipeline.scratch()),
        };
        Encoder { tokenizer: self, scratch, tokens: Vec::new() }
    }

    /// Decodes tokens. An incomplete character becomes U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        match &self.kind {
            TokenizerKind::Bytes => {
                let bytes: Vec<u8> = tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            TokenizerKind::Pipeline { path, pipeline } => {
                guarded(path, || pipeline.library().decode(tokens, false))
            }
        }
    }
}

impl Encoder<'_> {
    /// The tokens of a text, without special tokens. The code that packs documents appends the end of a document.
    pub fn encode(&mut self, text: &str) -> Result<&[u32], DataError> {
        self.encode_with(text, false)
    }

    /// The tokens of a prompt, with the special tokens of the tokenizer's post-processor, such as one at the beginning of every
    /// text.
    pub fn encode_prompt(&mut self, text: &str) -> Result<&[u32], DataError> {
        self.encode_with(text, true)
    }

    fn encode_with(&mut self, text: &str, add_special_tokens: bool) -> Result<&[u32], DataError> {
        self.tokens.clear();
        match (&self.tokenizer.kind, &mut self.scratch) {
            (TokenizerKind::Pipeline { path, pipeline }, Some(scratch)) => {
                guarded(path, || pipeline.encode(text, add_special_tokens, scratch, &mut self.tokens))?;
            }
            _ => self.tokens.extend(text.bytes().map(|byte| PipelineToken::from(u32::from(byte)))),
        }
        let tokens = PipelineToken::cast_slice(&self.tokens);
        match tokens.iter().find(|&&token| token as usize >= self.tokenizer.vocab) {
            Some(token) => Err(DataError::Value(format!(
                "the tokenizer {} made token {token} of a vocabulary of {}",
                self.tokenizer.name, self.tokenizer.vocab
            ))),
            None => Ok(tokens),
        }
    }
}

/// Calls the library on the file `path`, which is untrusted.
fn guarded<T>(path: &Path, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, DataError> {
    catch_panic("tokenizers", work).map_err(|error| unusable(path, &error.to_string()))
}

fn unusable(path: &Path, reason: &str) -> DataError {
    // A message of the library may have several lines or list every byte. Ours is one sentence.
    let line = reason.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let short: String = line.chars().take(MAX_REASON).collect();
    let more = if short.len() < line.len() { "…" } else { "" };
    DataError::file("use", path, format!("{short}{more}"))
}

#[cfg(test)]
mod tests;
