//! `kintsugi tune --learn`: what the trials say of the machine, as a profile.

use std::path::Path;

use kintsugi_tune::trials::{Learned, Lesson, MIN_LESSONS, Record, learn};
use serde::Serialize;

use super::candidates::Candidates;
use crate::failure::{ErrorContext, Failure};
use crate::files::write_whole;

/// How much closer predictions become by what was learned: mean errors as shares.
#[derive(Clone, Copy, Serialize)]
pub struct LearnedErrors {
    trials: usize,
    seen: [f64; 2],
    unseen: [f64; 2],
}

/// Fits the constants of the cluster to the trials and writes the profile. Returns the errors, and a line about them.
pub fn write(
    path: &Path,
    candidates: &Candidates,
    records: &[Record],
    source: &Path,
) -> Result<(LearnedErrors, String), Failure> {
    let lesson = |record: &Record| {
        let step_s = record.measured.step_s.filter(|_| record.outcome.is_measured())?;
        let plan = candidates.plan(candidates.index_of(&record.settings)?);
        Some(Lesson { plan, step_s })
    };
    let lessons: Vec<Lesson> = records.iter().filter_map(lesson).collect();
    let Some(learned) = learn(&lessons) else {
        return Err(Failure::run(format!(
            "--learn needs {MIN_LESSONS} trials that worked and a device whose speed is known (kintsugi calibrate); there are \
             {} such trials",
            lessons.len()
        )));
    };
    let text = learned
        .profile(&lessons[0].plan, &source.display().to_string())
        .map_err(|error| Failure::run(ErrorContext::new("the profile cannot be written as TOML", error)))?;
    write_whole(path, text.as_bytes())?;
    let Learned { trials, seen, unseen, .. } = learned;
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let line = format!(
        "learned  {}: the mean error of trials that a fit did not see goes from {} to {}\n",
        path.display(),
        percent(unseen[0]),
        percent(unseen[1])
    );
    Ok((LearnedErrors { trials, seen, unseen }, line))
}
