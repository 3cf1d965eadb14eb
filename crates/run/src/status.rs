//! How far a run is, by its files alone. They may be half written: what cannot be read is missing.

use std::path::{Path, PathBuf};

use kintsugi_checkpoint::CheckpointFolder;
use serde::Serialize;

use crate::{Rollback, RunFolder, RunState, Straggler, read_rollbacks};

/// How many of the last steps the time left is estimated by.
const RECENT: usize = 20;

/// How far a run is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunStatus {
    /// Running, finished, stopped, failed or silent.
    pub state: RunState,
    /// The last step.
    pub step: Option<u64>,
    /// The last step that its configuration asks for.
    pub steps: Option<u64>,
    /// The loss of the last step.
    pub loss: Option<f64>,
    /// Tokens per second of the last step.
    pub tokens_per_s: Option<f64>,
    /// Seconds that the rest will take, if it is not over.
    pub left_s: Option<f64>,
    /// Ranks that compute more slowly than the others of their stage at the last step.
    pub stragglers: Vec<Straggler>,
    /// The returns to a checkpoint after spikes.
    pub rollbacks: Vec<Rollback>,
    /// The newest checkpoint.
    pub checkpoint: Option<NewestCheckpoint>,
    /// The signal that stopped it.
    pub stopped_by: Option<String>,
    /// The error with which it ended.
    pub failure: Option<String>,
}

/// The newest checkpoint of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NewestCheckpoint {
    /// The step after which it was saved.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
}

impl RunStatus {
    /// The status of the run in `out`, whose files have been read.
    pub fn new(run: &RunFolder, out: &Path) -> Self {
        let last = |column: &[f64]| column.last().copied().filter(|value| value.is_finite());
        let (state, columns) = (run.state(), &run.steps);
        let step = last(&columns.step).map(|step| step as u64);
        let steps = run.plan.as_ref().map(|plan| plan.run.steps);
        let left = steps.zip(step).map(|(steps, step)| steps.saturating_sub(step));
        let is_over = state != RunState::Running;
        let summary = run.summary.as_ref();
        RunStatus {
            state,
            step,
            steps,
            loss: last(&columns.loss),
            tokens_per_s: last(&columns.tokens_per_s),
            left_s: left
                .filter(|_| !is_over)
                .zip(median_of_last(&columns.step_s))
                .map(|(left, step_s)| left as f64 * step_s),
            stragglers: columns.stragglers.clone(),
            rollbacks: read_rollbacks(out),
            checkpoint: newest(out),
            stopped_by: summary.and_then(|summary| summary.stopped_by.clone()),
            failure: summary.and_then(|summary| summary.failure.clone()),
        }
    }
}

/// A checkpoint has its name only when it is whole, so names are enough.
fn newest(out: &Path) -> Option<NewestCheckpoint> {
    let (step, path) = CheckpointFolder::of_run(out).list().ok()?.into_iter().next()?;
    Some(NewestCheckpoint { step, path })
}

fn median_of_last(seconds: &[f64]) -> Option<f64> {
    let recent = &seconds[seconds.len().saturating_sub(RECENT)..];
    let mut sorted: Vec<f64> = recent.iter().copied().filter(|seconds| seconds.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::files::{METRICS, SUMMARY};

    #[test]
    fn a_half_written_folder_has_the_status_of_its_whole_lines() {
        let out = std::env::temp_dir().join(format!("kintsugi-status-{}", std::process::id()));
        fs::create_dir_all(out.join("checkpoints/step-00000002")).expect("a folder");
        fs::create_dir_all(out.join("checkpoints/kintsugi-step-00000003.partial")).expect("a folder");
        let lines = "{\"step\":1,\"loss\":3.5,\"step_s\":2.0}\n{\"st\n{\"step\":2,\"loss\":null,\"step_s\":1.0,\"stragglers\":[{\"rank\":1,\"compute_s\":2,\"median_s\":1}]}\n{\"step\":3,\"lo";
        fs::write(out.join(METRICS), lines).expect("a file");
        fs::write(out.join(SUMMARY), "{\"stopped\":tr").expect("a file");
        let run = RunFolder::open(&out, String::new()).expect("a run");
        let status = RunStatus::new(&run, &out);
        assert_eq!((status.state, status.step, status.loss), (RunState::Running, Some(2), None));
        assert_eq!(status.checkpoint.expect("a checkpoint").step, 2);
        assert_eq!(status.stragglers[0].rank, 1);
        assert_eq!((status.steps, status.left_s, status.failure), (None, None, None));
        fs::remove_dir_all(&out).ok();
    }
}
