//! Converts text to tokens: added tokens, normalizers, pre-tokenizers, model.
//!
//! The steps and their order are those of the `tokenizers` library. Its own loop is not used, for two reasons: it has no limit
//! on the length of normalized text, and its reader does not support some regular expressions of `Split`, such as
//! `\p{N}{1,3}`. Truncation and padding are not applied, since they would lose text.

use std::borrow::Cow;

use serde_json::{Value, json};
use tokenizers::from_json;
use tokenizers::pipeline::{
    Model, Normalizer, PipelineModelScratch, PipelineNormalizer, PipelinePreTokenizer, PipelineToken,
    PipelineTokenizer, PreTokenizer, PreTokenizerScratch, Segment, Span, SpecialSegmentIterator,
};
use tokenizers::pre_tokenizers::sequence::PipelineSequence;
use tokenizers::pre_tokenizers::split::Split;

use super::growth::{Growth, most_bytes};

/// A tokenizer of the library.
pub(super) struct Pipeline {
    library: PipelineTokenizer,
    /// The worst-case growth of each of its normalizers.
    growth: Vec<Growth>,
    words: PipelinePreTokenizer,
}

/// Buffers that encoding reuses.
pub(super) struct Scratch {
    model: PipelineModelScratch,
    words: PreTokenizerScratch,
    spans: Vec<Span>,
}

impl Pipeline {
    /// Reads a description in the library's format.
    pub(super) fn new(description: &Value) -> tokenizers::Result<Pipeline> {
        check_added_tokens(description)?;
        let library = from_json(&description.to_string())?;
        let growth = library.get_normalizers().iter().map(Growth::of).collect();
        let words = compiled(library.get_pre_tokenizer())?;
        Ok(Pipeline { library, growth, words })
    }

    /// The tokenizer itself.
    pub(super) fn library(&self) -> &PipelineTokenizer {
        &self.library
    }

    pub(super) fn scratch(&self) -> Scratch {
        let model = self.library.get_model().init_scratch();
        Scratch { model, words: PreTokenizerScratch::default(), spans: Vec::new() }
    }

    /// Appends the tokens of a text to `tokens`. If `add_special_tokens`, includes those that the post-processor adds.
    pub(super) fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        scratch: &mut Scratch,
        tokens: &mut Vec<PipelineToken>,
    ) -> tokenizers::Result<()> {
        let template = &self.library.get_post_processor().single;
        if add_special_tokens {
            tokens.extend(template.prefix.iter().map(|&(token, _)| token));
        }
        let added = self.library.get_added_vocabulary();
        let mut left = most_bytes(text);
        for segment in SpecialSegmentIterator::new(text, added, false, false) {
            let (text, offset) = match segment {
                Segment::SpecialToken(token) => {
                    tokens.push(PipelineToken::from(token));
                    continue;
                }
                Segment::Text { text, input_offset } => (text, input_offset),
            };
            let text = normalize(self.library.get_normalizers(), &self.growth, text, offset, left)?;
            left = left.saturating_sub(text.len());
            for segment in SpecialSegmentIterator::new(&text, added, true, false) {
                match segment {
                    Segment::SpecialToken(token) => tokens.push(PipelineToken::from(token)),
                    Segment::Text { text, .. } => self.encode_words(text, scratch, tokens)?,
                }
            }
        }
        if add_special_tokens {
            tokens.extend(template.suffix.iter().map(|&(token, _)| token));
        }
        Ok(())
    }

    fn encode_words(
        &self,
        text: &str,
        scratch: &mut Scratch,
        tokens: &mut Vec<PipelineToken>,
    ) -> tokenizers::Result<()> {
        if u32::try_from(text.len()).is_err() {
            // Offsets have 32 bits.
            return Err(format!("its normalizers made a text of {} bytes, over 4 GiB", text.len()).into());
        }
        let Scratch { model, words, spans } = scratch;
        spans.clear();
        self.words.pre_tokenize(text, words, spans)?;
        self.library.get_model().tokenize_spans(text, spans, model, tokens)
    }
}

/// Normalizes a text that begins at `offset`. Fails if it could become longer than `most` bytes.
fn normalize<'a>(
    normalizers: &[PipelineNormalizer],
    growth: &[Growth],
    text: &'a str,
    offset: usize,
    most: usize,
) -> tokenizers::Result<Cow<'a, str>> {
    let mut text = Cow::Borrowed(text);
    for (normalizer, growth) in normalizers.iter().zip(growth) {
        growth.check(text.len(), most)?;
        text = match text {
            Cow::Borrowed(text) => normalizer.normalize(text, offset)?,
            Cow::Owned(text) => Cow::Owned(normalizer.normalize(&text, offset)?.into_owned()),
        };
    }
    Ok(text)
}

/// Fails if an added token could grow too much, because the library normalizes added tokens without a limit when it reads
/// them.
fn check_added_tokens(description: &Value) -> tokenizers::Result<()> {
    let added = description["added_tokens"].as_array().into_iter().flatten();
    let contents: Vec<&str> = added.filter_map(|token| token["content"].as_str()).collect();
    let normalizer = &description["normalizer"];
    if normalizer.is_null() || contents.is_empty() {
        return Ok(());
    }
    let smallest = json!({
        "version": description["version"],
        "added_tokens": [],
        "normalizer": normalizer,
        "model": { "type": "WordLevel", "vocab": { "a": 0 }, "unk_token": "a" },
    });
    let library = from_json(&smallest.to_string())?;
    let growth: Vec<Growth> = library.get_normalizers().iter().map(Growth::of).collect();
    for content in contents {
        normalize(library.get_normalizers(), &growth, content, 0, most_bytes(content))?;
    }
    Ok(())
}

/// The same pre-tokenizer with compiled regular expressions.
fn compiled(words: &PipelinePreTokenizer) -> tokenizers::Result<PipelinePreTokenizer> {
    Ok(match words {
        PipelinePreTokenizer::Split(split) => {
            let split = Split::new(split.pattern.clone(), split.behavior, split.invert)?;
            PipelinePreTokenizer::Split(split)
        }
        PipelinePreTokenizer::Sequence(members) => {
            let members = members.pre_tokenizers().iter().map(compiled);
            PipelinePreTokenizer::Sequence(PipelineSequence::new(members.collect::<Result<_, _>>()?))
        }
        other => other.clone(),
    })
}
