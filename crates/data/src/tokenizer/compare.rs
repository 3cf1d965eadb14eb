//! Compares two tokenizers: they are equal if they have the same words with the same tokens, and the same merges.
//!
//! Their files may differ in everything else: formatting, templates, truncation, the order of keys.

use std::collections::BTreeSet;

use serde_json::Value;
use tokenizers::canonicalize_value;

use super::Tokenizer;
use super::describe::tokens;

impl Tokenizer {
    /// The first difference to another tokenizer, as a sentence. `None` if they are equal.
    pub fn difference(&self, other: &Tokenizer) -> Option<String> {
        let [ours, theirs] = [self, other].map(Tokenizer::description);
        if ours == theirs {
            return None;
        }
        let [ours_by_token, theirs_by_token] = [&ours, &theirs].map(by_token);
        if let Some(&(token, _)) = ours_by_token.symmetric_difference(&theirs_by_token).next() {
            let word = |words: &BTreeSet<(u64, &str)>| {
                let found = words.range((token, "")..).next().filter(|&&(number, _)| number == token);
                found.map_or("nothing".to_owned(), |(_, word)| format!("{word:?}"))
            };
            let (ours, theirs) = (word(&ours_by_token), word(&theirs_by_token));
            return Some(format!("token {token} is {ours} in {} and {theirs} in {}", self.name, other.name));
        }
        let [ours, theirs] = [&ours, &theirs].map(merges);
        (ours != theirs).then(|| format!("{} and {} merge other pairs", self.name, other.name))
    }

    /// Its description in the library's format.
    fn description(&self) -> Value {
        let mut value = serde_json::from_slice(self.files()[0]).expect("it has been read before");
        // This succeeds, because opening the tokenizer has checked the conversion.
        canonicalize_value(&mut value).ok();
        value
    }
}

fn by_token(description: &Value) -> BTreeSet<(u64, &str)> {
    tokens(description).into_iter().map(|(word, token)| (token, word)).collect()
}

/// The merges in their order. A file has each pair as one string or as two.
fn merges(description: &Value) -> Vec<String> {
    let pair = |pair: &Value| match pair {
        Value::Array(parts) => parts.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
        one => one.as_str().unwrap_or_default().to_owned(),
    };
    description["model"]["merges"].as_array().into_iter().flatten().map(pair).collect()
}
