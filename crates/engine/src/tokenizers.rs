//! Checks that the tokenizers of a run are the same, and finds the token that ends its documents.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use kintsugi_data::{DataError, TokenFile, Tokenizer};
use kintsugi_plan::{Data, DataSource, Plan};

/// Compares the tokenizer in the folder `weights`, the tokenizer of every pair of token files, and `data.tokenizer`. Fails if
/// two of them differ, because their token ids would mean different text. Skips a tokenizer that is unknown or no longer
/// there. Returns a warning for each one that is there but cannot be used.
pub fn check_tokenizers(plan: &Plan, weights: Option<&Path>) -> Result<Vec<String>, DataError> {
    let mut warnings = Vec::new();
    let Data::Tokens(tokens) = &plan.data else { return Ok(warnings) };
    if tokens.allow_other_tokenizer {
        return Ok(warnings);
    }
    let mut named: Vec<(String, String)> = Vec::new();
    named.extend(weights.map(|path| ("the weights".to_owned(), path.display().to_string())));
    named.extend(tokens.tokenizer.iter().map(|name| ("data.tokenizer".to_owned(), name.clone())));
    for DataSource { path, .. } in tokens.sources.iter().chain(&tokens.validation) {
        let name = TokenFile::open(path)?.tokenizer();
        named.extend(name.map(|name| (path.display().to_string(), name)));
    }
    let mut seen = HashSet::new();
    let mut first: Option<(String, Tokenizer)> = None;
    for (what, name) in named {
        if !seen.insert(name.clone()) {
            continue;
        }
        let tokenizer = match Tokenizer::open(&name) {
            Ok(tokenizer) => tokenizer,
            Err(error) => {
                // If the lookup itself fails, the path may exist.
                if Path::new(&name).try_exists().unwrap_or(true) {
                    warnings
                        .push(format!("the tokenizer of {what} is not compared with the others: {error}"));
                }
                continue;
            }
        };
        let Some((of, one)) = &first else {
            first = Some((what, tokenizer));
            continue;
        };
        if let Some(difference) = one.difference(&tokenizer) {
            return Err(DataError::Value(format!(
                "the tokenizer of {what} is not that of {of}: {difference}; prepare the text with the same tokenizer, or \
                 set data.allow_other_tokenizer = true"
            )));
        }
    }
    Ok(warnings)
}

/// Sets the end-of-document token of a resumed plan to the checkpoint's if it has none. Returns a warning if it has another.
pub fn resume_end_of_document(plan: &mut Plan, checkpoint: &Plan) -> Option<String> {
    let before = checkpoint.end_of_document()?;
    let Data::Tokens(tokens) = &mut plan.data else { return None };
    let now = *tokens.end_of_document.get_or_insert(before);
    (now != before).then(|| {
        format!(
            "documents end with token {now}, and those that the checkpoint was trained on with token {before}; generated \
             texts will end with token {now}"
        )
    })
}

/// The plan with its end-of-document token: `data.end_of_document`, or else the one that its token files name.
pub fn with_end_of_document(mut plan: Plan) -> Result<Plan, DataError> {
    let Data::Tokens(tokens) = &mut plan.data else { return Ok(plan) };
    let mut ends = BTreeSet::new();
    for source in &tokens.sources {
        ends.extend(TokenFile::open(&source.path)?.about().and_then(|about| about.end_of_document));
    }
    let listed = || ends.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    match (tokens.end_of_document, ends.len()) {
        (Some(end), 1..) if !ends.contains(&end) => Err(DataError::Value(format!(
            "data.end_of_document = {end} is not the token that ends documents in data.source, which is {}; leave it out",
            listed()
        ))),
        (None, 2..) => Err(DataError::Value(format!(
            "the documents of data.source end with tokens {}; set data.end_of_document to the one that ends a text",
            listed()
        ))),
        (end, _) => {
            tokens.end_of_document = end.or_else(|| ends.first().copied());
            Ok(plan)
        }
    }
}
