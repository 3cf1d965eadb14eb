//! The data of a configuration. Whether the files are there and fit is seen when they are opened.

use std::collections::HashSet;

use super::error::{ConfigError, invalid, short};
use super::raw::RawData;
use super::words::Sources;
use crate::{Data, DataSource, TokenData};

/// The vocabulary of the demo corpus.
pub const DEMO_VOCAB: usize = 128;

/// The share that is kept for validation where nothing is said.
const USUAL_SPLIT: f64 = 0.01;

/// The data. The demo corpus needs its own vocabulary at the least.
pub(super) fn resolve(raw: &RawData, vocab: usize) -> Result<Data, ConfigError> {
    let sources = match &raw.source {
        None => return demo(raw, vocab),
        Some(Sources::One(word)) if word == "demo" => return demo(raw, vocab),
        Some(Sources::One(path)) => vec![source(path, 1.0)?],
        Some(Sources::Blend(parts)) => {
            parts.iter().map(|(path, weight)| source(path, *weight)).collect::<Result<_, _>>()?
        }
    };
    let mut paths = HashSet::new();
    if let Some(twice) = sources.iter().find(|source| !paths.insert(&source.path)) {
        let rule = "is in the list twice; add the weights";
        return Err(invalid("data.source", format!("\"{}\"", twice.path.display()), rule));
    }
    if raw.tokenizer.as_deref() == Some("") {
        return Err(invalid("data.tokenizer", "\"\"", "must be a file, a folder or \"bytes\""));
    }
    Ok(Data::Tokens(TokenData {
        sources,
        tokenizer: raw.tokenizer.clone(),
        split: split(raw.split)?,
        mask_documents: raw.mask_documents.unwrap_or(false),
    }))
}

fn demo(raw: &RawData, vocab: usize) -> Result<Data, ConfigError> {
    let only_files = |field, value: String| {
        Err(invalid(field, value, "has no meaning for data.source = \"demo\"; leave it out"))
    };
    if let Some(tokenizer) = &raw.tokenizer {
        return only_files("data.tokenizer", format!("\"{tokenizer}\""));
    }
    if let Some(split) = raw.split {
        return only_files("data.split", short(split));
    }
    if raw.mask_documents == Some(true) {
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

fn source(path: &str, weight: f64) -> Result<DataSource, ConfigError> {
    if path.is_empty() {
        return Err(invalid("data.source", "\"\"", "must be \"demo\" or the prefix of token files"));
    }
    if !(1e-9..=1e9).contains(&weight) {
        let rule = "has a weight that is not from 1e-9 to 1e9";
        return Err(invalid(
            "data.source",
            format!("{{ path = \"{path}\", weight = {} }}", short(weight)),
            rule,
        ));
    }
    Ok(DataSource { path: path.into(), weight })
}

fn split(raw: Option<f64>) -> Result<f64, ConfigError> {
    let share = raw.unwrap_or(USUAL_SPLIT);
    if (0.0..=0.5).contains(&share) {
        return Ok(share);
    }
    let rule = "must be from 0 to 0.5, the share of the tokens that is kept for validation";
    Err(invalid("data.split", short(share), rule))
}
