//! `rollbacks.jsonl`: how often a run went back to a checkpoint after a loss spike, and which samples it skips since then.
//!
//! A line is written before the run continues. A run that is killed before its next checkpoint skips the same samples when it resumes.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use kintsugi_checkpoint::SkippedSamples;
use kintsugi_spec::input;
use serde::{Deserialize, Serialize};

use crate::files::ROLLBACKS;
use crate::{RunFolderError, now};

/// Why a run goes back to a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "kebab-case")]
pub enum Spike {
    /// The loss of a step is far above that of the steps before.
    Loss(SpikeFigures),
    /// The gradient norm of a step is.
    GradNorm(SpikeFigures),
    /// So many steps in a row had a loss or a gradient that is not finite.
    NotFinite {
        /// The number of these steps.
        steps: u64,
    },
}

/// By how much a step is above those before it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpikeFigures {
    /// The value of the step.
    pub value: f64,
    /// The median of the steps before it.
    pub median: f64,
    /// The largest value that is no spike.
    pub limit: f64,
}

impl fmt::Display for Spike {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (what, SpikeFigures { value, median, limit }) = match self {
            Spike::Loss(figures) => ("loss", figures),
            Spike::GradNorm(figures) => ("gradient norm", figures),
            Spike::NotFinite { steps } => {
                return write!(f, "{steps} steps in a row were not finite");
            }
        };
        write!(
            f,
            "its {what} {value:.4} is a spike: the median before it is {median:.4}, and the limit {limit:.4}"
        )
    }
}

/// A return to a checkpoint, as a line of `rollbacks.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rollback {
    /// When it happened, in seconds since 1970.
    pub time: f64,
    /// The step of the spike, from 1.
    pub step: u64,
    /// Why.
    #[serde(flatten)]
    pub spike: Spike,
    /// The step of the checkpoint; 0 if the run began anew.
    pub resumed_after: u64,
    /// The samples that are skipped from now on, by their index in the dataset.
    pub skipped: Range<u64>,
    /// How often the run has gone back, this time included.
    pub rollbacks: u64,
}

impl Rollback {
    /// A return to a checkpoint that happens now.
    pub fn new(step: u64, spike: Spike, resumed_after: u64, skipped: Range<u64>, rollbacks: u64) -> Self {
        Rollback { time: now(), step, spike, resumed_after, skipped, rollbacks }
    }

    /// Adds a line to the rollbacks in a run's folder, and waits until it is on the disk.
    pub fn append(&self, out: &Path) -> Result<(), RunFolderError> {
        let path = out.join(ROLLBACKS);
        let line = serde_json::to_string(self).expect("a rollback has string keys") + "\n";
        let file = OpenOptions::new().append(true).create(true).open(&path);
        let written =
            file.and_then(|mut file| file.write_all(line.as_bytes()).and_then(|()| file.sync_data()));
        written.map_err(|error| RunFolderError::file("write", &path, error))
    }
}

impl fmt::Display for Rollback {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Rollback { step, spike, resumed_after, skipped, .. } = self;
        match spike {
            Spike::NotFinite { .. } => write!(f, "up to step {step}, {spike}")?,
            Spike::Loss(_) | Spike::GradNorm(_) => write!(f, "step {step}: {spike}")?,
        }
        let (first, last) = (skipped.start, skipped.end - 1);
        match resumed_after {
            0 => write!(f, "; the run begins anew")?,
            _ => write!(f, "; the run goes back to the checkpoint of step {resumed_after}")?,
        }
        write!(f, ", and skips samples {first} to {last}")
    }
}

/// The rollbacks in a run's folder, oldest first. Lines that cannot be read are left out.
pub fn read_rollbacks(out: &Path) -> Vec<Rollback> {
    let bytes = input::bytes(&out.join(ROLLBACKS), input::MAX_WRITTEN_BY_PROGRAMS).unwrap_or_default();
    let lines = bytes.split(|&byte| byte == b'\n');
    let found = lines.filter_map(|line| serde_json::from_slice(line).ok());
    found.filter(|rollback: &Rollback| !rollback.skipped.is_empty()).collect()
}

/// The samples that the run in a folder skips since its rollbacks.
pub fn skipped_samples(out: &Path) -> SkippedSamples {
    let mut skipped = SkippedSamples::default();
    for rollback in read_rollbacks(out) {
        skipped.add(rollback.skipped);
    }
    skipped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rollbacks_are_read_as_they_were_written() {
        let out = std::env::temp_dir().join(format!("kintsugi-rollbacks-{}", std::process::id()));
        std::fs::create_dir_all(&out).expect("a folder");
        let figures = SpikeFigures { value: 9.5, median: 3.25, limit: 4.5 };
        let all = [
            Rollback::new(14, Spike::Loss(figures), 12, 52..56, 1),
            Rollback::new(31, Spike::GradNorm(figures), 0, 120..124, 2),
            Rollback::new(40, Spike::NotFinite { steps: 20 }, 20, 84..164, 3),
        ];
        for one in &all {
            one.append(&out).expect("it is written");
        }
        let (found, skipped) = (read_rollbacks(&out), skipped_samples(&out));
        std::fs::remove_dir_all(&out).ok();
        assert_eq!(found, all);
        assert_eq!(skipped.count(), 4 + 80);
        assert_eq!(
            all[0].to_string(),
            "step 14: its loss 9.5000 is a spike: the median before it is 3.2500, and the limit 4.5000; the run goes \
             back to the checkpoint of step 12, and skips samples 52 to 55"
        );
        assert_eq!(
            all[2].to_string(),
            "up to step 40, 20 steps in a row were not finite; the run goes back to the checkpoint of step 20, and \
             skips samples 84 to 163"
        );
    }
}
