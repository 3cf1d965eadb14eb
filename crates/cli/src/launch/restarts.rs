//! `launch --restarts N`: starts the ranks again after one has died, was killed or hangs.
//!
//! `launch` and its agents outlive the ranks. Every attempt has a new launcher, so MPI starts anew. The first
//! attempt runs the command as it was given; later ones resume from the newest whole checkpoint of the run, if there is one.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kintsugi_checkpoint::CheckpointFolder;
use kintsugi_run::{FolderState, Restart, RunFolder, now, write_restarts};

use super::Supervision;
use super::fewer::{Attempt, FewerRanks};
use crate::failure::Failure;
use crate::output;
use crate::train;

/// A run that is started again when a rank fails.
pub struct RestartableRun {
    out: PathBuf,
    allowed: u32,
    /// How it goes on with fewer ranks, if it may.
    fewer: Option<FewerRanks>,
}

impl RestartableRun {
    /// The run of a command. It is started again `allowed` times at most.
    pub fn new(train: &train::Arguments, allowed: u32) -> Result<Self, Failure> {
        let plan = train.plan()?;
        if train.is_for_one_attempt() {
            return Err(Failure::mistake(
                "--restarts cannot be combined with --trace and --write-batches, which are for one attempt",
            ));
        }
        if plan.run.keep == 0 && !plan.copies_states() {
            return Err(Failure::mistake(
                "--restarts needs checkpoints, and run.keep = 0 saves none; set run.keep to 1 or more",
            ));
        }
        Ok(RestartableRun { out: plan.run.out, allowed, fewer: None })
    }

    /// The same run, which goes on with fewer ranks if it must.
    pub fn with_fewer(self, fewer: Option<FewerRanks>) -> Self {
        RestartableRun { fewer, ..self }
    }

    /// The folder of the run.
    pub fn out(&self) -> &Path {
        &self.out
    }
}

/// Runs attempts, the first of which is `first`, until one ends well or no further one is allowed.
pub fn run(
    run: Option<RestartableRun>,
    first: &Attempt,
    supervision: &Supervision,
    attempt: impl Fn(&Attempt) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let Some(RestartableRun { out, allowed, fewer }) = run else { return attempt(first) };
    let before = FolderState::of(&out);
    let mut lost = Vec::new();
    let mut result = attempt(first);
    let (mut last, mut has_trained) = (first.size, true);
    for number in 1..=allowed {
        let Err(failure) = &result else { return Ok(()) };
        let state = FolderState::of(&out);
        let has_begun = state.has_begun_since(&before);
        // A run that has written its summary came to an end of its own, and would come to it again.
        if failure.code() != 1 || supervision.stop.any() || has_begun && state.has_summary {
            return result;
        }
        let resumes = has_begun && !CheckpointFolder::of_run(&out).list()?.is_empty();
        let mut next = match &fewer {
            Some(fewer) => fewer.next(first, last, has_trained)?,
            None => first.clone(),
        };
        if resumes {
            next.words = resumed(&next.words);
        }
        output::stderr(&format!("restart {number} of {allowed}: the ranks are started again"));
        let reported = lost.len();
        let is_over = AtomicBool::new(false);
        result = thread::scope(|scope| {
            scope.spawn(|| report_first_step(&out, &state, &mut lost, &is_over));
            let result = attempt(&next);
            is_over.store(true, Ordering::Relaxed);
            result
        });
        (last, has_trained) = (next.size, lost.len() > reported);
    }
    result
}

/// A command that resumes from the newest checkpoint in the folder of its run.
fn resumed(command: &[OsString]) -> Vec<OsString> {
    let is_resume = |word: &OsStr| word == "--resume" || word.as_encoded_bytes().starts_with(b"--resume=");
    let others = command.iter().filter(|word| !is_resume(word)).cloned();
    others.chain([OsString::from("--resume")]).collect()
}

/// Waits for the first step after a restart. Then says what was lost, and writes it to the run's folder.
fn report_first_step(out: &Path, before: &FolderState, lost: &mut Vec<Restart>, is_over: &AtomicBool) {
    const POLL: Duration = Duration::from_millis(50);
    let (time, mut folder) = (now(), RunFolder::new(out, String::new()));
    loop {
        let is_last = is_over.load(Ordering::Relaxed);
        // The folder may not exist yet.
        folder.update().ok();
        if let Some(restart) = Restart::after(time, before, &folder.steps) {
            output::stderr(&restart.to_string());
            lost.push(restart);
            if let Err(error) = write_restarts(out, lost) {
                output::stderr(&format!("warning: {error}"));
            }
            return;
        }
        if is_last {
            return;
        }
        thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_attempt_resumes_from_the_newest_checkpoint() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert_eq!(resumed(&words("train a.toml")), words("train a.toml --resume"));
        let given = words("train a.toml --resume=other/step-3 --set run.steps=4");
        assert_eq!(resumed(&given), words("train a.toml --set run.steps=4 --resume"));
    }
}
