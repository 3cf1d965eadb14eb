//! Trains a tokenizer: byte-level BPE (arXiv 1508.07909) with GPT-2's pre-tokenizer.

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use serde_json::{Map, Value, json};
use tokenizers::pipeline::{PipelinePreTokenizer, PreTokenizer, PreTokenizerScratch};
use tokenizers::trainers::BpeTrainer;
use tokenizers::vocab::bucket_added_vocabulary::AddedToken;
use tokenizers::{Trainer, canonicalize_value};

use super::describe::{Description, END, byte_level, pretty};
use super::{Tokenizer, unusable};
use crate::DataError;
use crate::corpus::{Input, TextChunk, TextChunks, documents};

/// A trained tokenizer.
pub struct TrainedTokenizer {
    /// The tokenizer. Its vocabulary may be smaller than requested if the text is short.
    pub tokenizer: Tokenizer,
    /// Bytes of text that it was trained on.
    pub text: u64,
}

/// The smallest vocabulary: all bytes, and the end of a document.
const MIN_VOCAB: usize = 257;
const MAX_VOCAB: usize = 1 << 24;

/// The most bytes to train on. More text changes few merges, and its words would have to fit into memory.
const MAX_TEXT: u64 = 1 << 30;

/// The most bytes of a word. Longer words are divided, since training time is quadratic in the length of a word and no
/// useful token is as long.
const MAX_WORD: usize = 256;

/// Trains a tokenizer with a vocabulary of `vocab` on the first GiB of a text. Does not write it: `out` is the path of its
/// future `tokenizer.json`.
pub fn train_tokenizer(
    inputs: &[Input],
    json_key: &str,
    vocab: usize,
    out: &Path,
) -> Result<TrainedTokenizer, DataError> {
    if !(MIN_VOCAB..=MAX_VOCAB).contains(&vocab) {
        let rule = format!("must be from {MIN_VOCAB} (every byte, and {END}) to {MAX_VOCAB}");
        return Err(DataError::Value(format!("--train-tokenizer {vocab} {rule}")));
    }
    let letters = letters();
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab)
        .special_tokens(vec![AddedToken::from(END, true)])
        .initial_alphabet(HashSet::from(letters))
        .build();
    let mut texts = Texts::new(inputs, json_key);
    let words = word_rule(&letters);
    let fed = trainer.feed(&mut texts, |text| split(&words, &letters, text));
    texts.failed.map_or(Ok(()), Err)?;
    let failed = |error: tokenizers::Error| unusable(out, &error.to_string());
    fed.map_err(failed)?;
    if texts.bytes == 0 {
        return Err(DataError::Value("there is no text to make a tokenizer of".to_owned()));
    }
    let (tokens, merges, _) = trainer.train_vocab().map_err(failed)?;
    let mut tokens: Vec<(String, u32)> = tokens.into_iter().collect();
    tokens.sort_by_key(|&(_, id)| id);
    let tokens: Map<String, Value> = tokens.into_iter().map(|(word, id)| (word, id.into())).collect();
    let end = tokens[END].clone();
    let description = byte_level(&Value::Object(tokens), &json!(merges), Some(end));
    let description = Description::new(out.to_owned(), pretty(&description), None)?;
    let tokenizer = Tokenizer::described(out.display().to_string(), description)?;
    Ok(TrainedTokenizer { tokenizer, text: texts.bytes })
}

/// The character for each byte, as in GPT-2's vocabulary: the byte itself if it is printable, else one from U+0100 on.
pub(super) fn letters() -> [char; 256] {
    let mut unseen = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        seen @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(seen),
        _ => unseen.next().expect("there are more letters than bytes"),
    })
}

/// GPT-2's pre-tokenizer from the library.
fn word_rule(letters: &[char; 256]) -> PipelinePreTokenizer {
    let vocab: Map<String, Value> =
        letters.iter().zip(0..).map(|(l, id)| (l.to_string(), json!(id))).collect();
    let mut description = byte_level(&Value::Object(vocab), &json!([]), None);
    canonicalize_value(&mut description).expect("the description is ours");
    let tokenizer = tokenizers::from_json(&description.to_string()).expect("the description is ours");
    tokenizer.get_pre_tokenizer().clone()
}

fn split(words: &PipelinePreTokenizer, letters: &[char; 256], text: &str) -> tokenizers::Result<Vec<String>> {
    let mut spans = Vec::new();
    words.pre_tokenize(text, &mut PreTokenizerScratch::default(), &mut spans)?;
    let word = |text: &str| text.bytes().map(|byte| letters[usize::from(byte)]).collect();
    Ok(spans.into_iter().flat_map(|span| pieces(&text[span.range()])).map(word).collect())
}

/// A word, or the parts of a long one, divided between characters.
fn pieces(mut word: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let end = (0..=MAX_WORD.min(word.len())).rev().find(|&end| word.is_char_boundary(end));
        let (piece, rest) = word.split_at(end.unwrap_or(0));
        word = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The documents of files, or parts of them, up to a limit.
struct Texts<'a> {
    inputs: &'a [Input],
    json_key: &'a str,
    chunks: TextChunks<'a>,
    chunk: TextChunk,
    ready: VecDeque<String>,
    bytes: u64,
    failed: Option<DataError>,
}

impl<'a> Texts<'a> {
    fn new(inputs: &'a [Input], json_key: &'a str) -> Self {
        let chunks = TextChunks::new(inputs, json_key, Arc::new(AtomicU64::new(0)));
        let (chunk, ready) = (TextChunk::default(), VecDeque::new());
        Texts { inputs, json_key, chunks, chunk, ready, bytes: 0, failed: None }
    }

    /// Reads the next chunk. Returns `false` if there is none.
    fn refill(&mut self) -> Result<bool, DataError> {
        if self.bytes >= MAX_TEXT || !self.chunks.next(&mut self.chunk)? {
            return Ok(false);
        }
        let format = self.inputs[self.chunk.file].format;
        let keep = |_, text: &str| {
            self.bytes += text.len() as u64;
            self.ready.push_back(text.to_owned());
            Ok::<(), Infallible>(())
        };
        let Ok(_) = documents(&self.chunk, format, self.json_key, keep);
        Ok(true)
    }
}

impl Iterator for Texts<'_> {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        while self.ready.is_empty() {
            match self.refill() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.failed = Some(error);
                    return None;
                }
            }
        }
        self.ready.pop_front()
    }
}
