//! The data. Whether the files exist and fit is checked when they are opened.

use std::collections::HashSet;
use std::path::PathBuf;

use serde::Serialize;

use crate::config::ConfigError;
use crate::config::error::{invalid, short};
use crate::config::keys::RawData;
use crate::config::words::Sources;

/// The vocabulary of the demo corpus.
pub const DEMO_VOCAB: usize = 128;

/// Where tokens come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Data {
    /// The built-in generated corpus.
    Demo,
    /// Token files.
    Tokens(TokenData),
}

/// A blend of token files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenData {
    /// The files.
    pub sources: Vec<DataSource>,
    /// The tokenizer of the files, if it is configured: a file, a folder or `bytes`.
    pub tokenizer: Option<String>,
    /// Whether the tokenizers of the files, of `tokenizer` and of the weights may differ.
    pub allow_other_tokenizer: bool,
    /// The token that ends a document, if it is known.
    pub end_of_document: Option<u32>,
    /// Files for validation only. If there are none, a share of every source is used.
    pub validation: Vec<DataSource>,
    /// The share of the tokens, at the end of every source, that is reserved for validation. `None`: the documents that
    /// `prepare` has drawn for it, or a default share if it has drawn none.
    pub split: Option<f64>,
    /// Whether a token attends only to tokens of its own document.
    pub mask_documents: bool,
}

/// Token files and their weight in the blend.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataSource {
    /// The prefix of the `.bin` and the `.idx`.
    pub path: PathBuf,
    /// The weight among all sources.
    pub weight: f64,
}

/// The data. The demo corpus needs at least its own vocabulary.
pub(crate) fn resolve(raw: &RawData, vocab: usize) -> Result<Data, ConfigError> {
    let sources = match &raw.source {
        None => return demo(raw, vocab),
        Some(Sources::One(word)) if word == "demo" => return demo(raw, vocab),
        Some(given) => sources("data.source", given)?,
    };
    if sources.is_empty() {
        let rule =
            "must be \"demo\", the prefix of token files, or a list of { path = \"prefix\", weight = 1.0 }";
        return Err(invalid("data.source", "[]", rule));
    }
    let validation = validation(raw, &sources)?;
    if raw.tokenizer.as_deref() == Some("") {
        return Err(invalid("data.tokenizer", "\"\"", "must be a file, a folder or \"bytes\""));
    }
    if let Some(end) = raw.end_of_document.filter(|&end| end as usize >= vocab) {
        let rule = format!("must be a token below model.vocab = {vocab}");
        return Err(invalid("data.end_of_document", end, rule));
    }
    Ok(Data::Tokens(TokenData {
        sources,
        tokenizer: raw.tokenizer.clone(),
        allow_other_tokenizer: raw.allow_other_tokenizer(),
        end_of_document: raw.end_of_document,
        split: if validation.is_empty() { split(raw.split)? } else { Some(0.0) },
        validation,
        mask_documents: raw.mask_documents(),
    }))
}

fn demo(raw: &RawData, vocab: usize) -> Result<Data, ConfigError> {
    let only_files = |field, value: String| {
        Err(invalid(field, value, "has no meaning for data.source = \"demo\"; leave it out"))
    };
    if let Some(tokenizer) = &raw.tokenizer {
        return only_files("data.tokenizer", format!("\"{tokenizer}\""));
    }
    if let Some(end) = raw.end_of_document {
        return only_files("data.end_of_document", end.to_string());
    }
    match &raw.validation {
        Some(Sources::One(path)) => return only_files("data.validation", format!("\"{path}\"")),
        Some(Sources::Blend(parts)) if !parts.is_empty() => {
            return only_files("data.validation", "[…]".to_owned());
        }
        _ => {}
    }
    if let Some(split) = raw.split {
        return only_files("data.split", short(split));
    }
    if raw.mask_documents() {
        let rule =
            "has no meaning for data.source = \"demo\", where every sample is one document; leave it out";
        return Err(invalid("data.mask_documents", true, rule));
    }
    if vocab < DEMO_VOCAB {
        let rule = format!(
            "is less than the {DEMO_VOCAB} tokens of data.source = \"demo\"; use {DEMO_VOCAB} or more"
        );
        return Err(invalid("model.vocab", vocab, rule));
    }
    Ok(Data::Demo)
}

/// The files for validation. If there are any, all of the other files is for training.
fn validation(raw: &RawData, training: &[DataSource]) -> Result<Vec<DataSource>, ConfigError> {
    let files = raw.validation.as_ref().map_or(Ok(Vec::new()), |given| sources("data.validation", given))?;
    if let Some(both) = files.iter().find(|file| training.iter().any(|source| source.path == file.path)) {
        let rule = "is in data.source too, so it would be trained on";
        return Err(invalid("data.validation", format!("\"{}\"", both.path.display()), rule));
    }
    match raw.split {
        Some(split) if split != 0.0 && !files.is_empty() => {
            let rule = "has no meaning where data.validation names files; leave it out";
            Err(invalid("data.split", short(split), rule))
        }
        _ => Ok(files),
    }
}

fn sources(field: &'static str, given: &Sources) -> Result<Vec<DataSource>, ConfigError> {
    let sources: Vec<DataSource> = match given {
        Sources::One(path) => vec![source(field, path, 1.0)?],
        Sources::Blend(parts) => {
            parts.iter().map(|(path, weight)| source(field, path, *weight)).collect::<Result<_, _>>()?
        }
    };
    let mut paths = HashSet::new();
    match sources.iter().find(|source| !paths.insert(&source.path)) {
        Some(twice) => {
            let rule = "is in the list twice; add the weights";
            Err(invalid(field, format!("\"{}\"", twice.path.display()), rule))
        }
        None => Ok(sources),
    }
}

fn source(field: &'static str, path: &str, weight: f64) -> Result<DataSource, ConfigError> {
    if path.is_empty() {
        let demo = if field == "data.source" { "\"demo\" or " } else { "" };
        return Err(invalid(field, "\"\"", format!("must be {demo}the prefix of token files")));
    }
    if !(1e-9..=1e9).contains(&weight) {
        let rule = "has a weight that is not from 1e-9 to 1e9";
        return Err(invalid(field, format!("{{ path = \"{path}\", weight = {} }}", short(weight)), rule));
    }
    Ok(DataSource { path: path.into(), weight })
}

fn split(raw: Option<f64>) -> Result<Option<f64>, ConfigError> {
    match raw {
        Some(share) if !(0.0..=0.5).contains(&share) => {
            let rule = "must be from 0 to 0.5, the share of the tokens that is kept for validation";
            Err(invalid("data.split", short(share), rule))
        }
        _ => Ok(raw),
    }
}

/// The keys of `[data]` that say this.
pub(crate) fn keys(data: &Data) -> RawData {
    match data {
        Data::Demo => RawData { source: Some(Sources::One("demo".to_owned())), ..RawData::default() },
        Data::Tokens(tokens) => {
            let part = |source: &DataSource| (source.path.display().to_string(), source.weight);
            let blend = |sources: &[DataSource]| Sources::Blend(sources.iter().map(part).collect());
            RawData {
                source: Some(blend(&tokens.sources)),
                tokenizer: tokens.tokenizer.clone(),
                allow_other_tokenizer: Some(tokens.allow_other_tokenizer),
                end_of_document: tokens.end_of_document,
                validation: Some(blend(&tokens.validation)).filter(|_| !tokens.validation.is_empty()),
                split: tokens.split,
                mask_documents: Some(tokens.mask_documents),
            }
        }
    }
}
