//! The validation split of a resumed run: it keeps the split that it was trained with.

use kintsugi_data::{DataError, TokenFile};
use kintsugi_plan::{Data, Plan};

/// Sets the split of a resumed plan to the checkpoint's if the plan has none. Fails if the plan's split has documents that the
/// model was trained on, because `prepare` had drawn others for validation. Returns a warning if it has fewer.
pub fn resume_split(plan: &mut Plan, checkpoint: &Plan) -> Result<Option<String>, DataError> {
    let (Data::Tokens(before), Data::Tokens(now)) = (&checkpoint.data, &mut plan.data) else {
        return Ok(None);
    };
    let split = match (before.split, now.split) {
        (None, Some(split)) if now.validation.is_empty() => split,
        (before, now_split) => {
            now.split = now_split.or(before);
            return Ok(None);
        }
    };
    let mut warning = None;
    for source in &now.sources {
        let file = TokenFile::open(&source.path)?;
        let trained_on = |other: &TokenFile| file.is_same(other).unwrap_or(false);
        if !before
            .sources
            .iter()
            .flat_map(|source| TokenFile::open(&source.path))
            .any(|other| trained_on(&other))
        {
            continue;
        }
        let [was, is] = [file.validation_start(None)?, file.validation_start(Some(split))?];
        let reason = |rest: &str| {
            let path = file.path().display();
            format!(
                "data.split = {split}, but so far the documents at the end of {path} that prepare has drawn were kept for validation: {rest}"
            )
        };
        if is < was {
            let rest = "the model would be validated on samples that it was trained on; leave data.split out";
            return Err(DataError::Value(reason(rest)));
        }
        if is > was {
            warning.get_or_insert_with(|| {
                reason("some of them are now trained on, and the order of samples changes")
            });
        }
    }
    Ok(warning)
}
