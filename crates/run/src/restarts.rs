//! `restarts.jsonl`: how often the ranks of a run were started again after a failure, and what each time was lost.
//!
//! `launch` writes a line after the first step that follows a restart. The run adds the lines up in its summary.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kintsugi_spec::input;
use kintsugi_spec::output::write_target;
use serde::{Deserialize, Serialize};

use crate::files::{METRICS, RESTARTS, SUMMARY};
use crate::{Columns, RunFolder, RunFolderError};

/// A restart, as a line of `restarts.jsonl`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Restart {
    /// When the ranks were started again, in seconds since 1970.
    pub time: f64,
    /// The last step before the failure; 0 if there was none.
    pub last_step: u64,
    /// The step of the checkpoint that the run resumed from; 0 if it began anew.
    pub resumed_after: u64,
    /// Steps that had to run again.
    pub lost_steps: u64,
    /// Seconds that these steps had taken.
    pub repeated_s: f64,
    /// Seconds from the end of the last step before the failure to the end of the first step after it.
    pub pause_s: f64,
}

impl Restart {
    /// A restart at `time` of the run whose folder was in the state `before`, if a step has followed it in `now`.
    pub fn after(time: f64, before: &FolderState, now: &Columns) -> Option<Self> {
        let first = now.time.iter().position(|&written| written > time)?;
        let resumed_after = now.step[first] as u64 - 1;
        let last_step = before.steps.last().map_or(0, |step| step.number);
        let lost = before.steps.iter().filter(|step| step.number > resumed_after);
        let since = before.steps.last().map_or(time, |step| step.time);
        Some(Restart {
            time,
            last_step,
            resumed_after,
            lost_steps: last_step.saturating_sub(resumed_after),
            repeated_s: lost.map(|step| step.seconds).sum(),
            pause_s: now.time[first] - since,
        })
    }
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Restart { last_step, resumed_after, lost_steps, repeated_s, pause_s, .. } = self;
        write!(
            f,
            "restarted: step {} has ended {pause_s:.1} s after step {last_step} before the failure; ",
            resumed_after + 1
        )?;
        match lost_steps {
            0 => f.write_str("no step was lost"),
            1 => write!(f, "1 step was lost, which had taken {repeated_s:.1} s"),
            _ => write!(f, "{lost_steps} steps were lost, which had taken {repeated_s:.1} s"),
        }
    }
}

/// What restarts have cost a run, for `summary.json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RestartSummary {
    /// How often the ranks were started again.
    pub restarts: usize,
    /// Steps that had to run again.
    pub lost_steps: u64,
    /// Seconds that these steps had taken, and the pauses.
    pub lost_s: f64,
}

impl RestartSummary {
    /// The restarts of the run in `out`. `None` if there were none.
    pub fn of_run(out: &Path) -> Option<Self> {
        let all = read_restarts(out);
        (!all.is_empty()).then(|| RestartSummary {
            restarts: all.len(),
            lost_steps: all.iter().map(|restart| restart.lost_steps).sum(),
            lost_s: all.iter().map(|restart| restart.repeated_s + restart.pause_s).sum(),
        })
    }
}

/// The restarts in a run's folder. Lines that cannot be read are left out.
pub fn read_restarts(out: &Path) -> Vec<Restart> {
    let bytes = input::bytes(&out.join(RESTARTS), input::MAX_WRITTEN_BY_PROGRAMS).unwrap_or_default();
    bytes.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// Replaces the restarts in a run's folder that are not older than the first of `restarts`. A run without a checkpoint begins anew
/// and sets its files aside, so those of one launch are written together.
pub fn write_restarts(out: &Path, restarts: &[Restart]) -> Result<(), RunFolderError> {
    let Some(first) = restarts.first() else { return Ok(()) };
    let earlier = read_restarts(out).into_iter().filter(|restart| restart.time < first.time);
    let lines: String = earlier
        .chain(restarts.iter().copied())
        .map(|restart| serde_json::to_string(&restart).expect("a restart has string keys") + "\n")
        .collect();
    let path = out.join(RESTARTS);
    write_target(&path, lines.as_bytes()).map_err(|error| RunFolderError::file("write", &path, error))
}

/// The state of a run's folder before or after its ranks have run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FolderState {
    /// The metrics, which a run creates anew when it begins.
    metrics: Option<u64>,
    /// Whether the run has written its summary, as the last thing it does.
    pub has_summary: bool,
    steps: Vec<FinishedStep>,
}

/// A step in the metrics.
#[derive(Clone, Copy, Debug, PartialEq)]
struct FinishedStep {
    number: u64,
    time: f64,
    seconds: f64,
}

impl FolderState {
    /// The state of a folder, which may not exist yet.
    pub fn of(out: &Path) -> Self {
        let metrics = fs::metadata(out.join(METRICS)).map(|found| found.ino()).ok();
        let has_summary =
            !matches!(fs::metadata(out.join(SUMMARY)), Err(error) if error.kind() == ErrorKind::NotFound);
        let columns = RunFolder::open(out, String::new()).map(|run| run.steps).unwrap_or_default();
        let rows = columns.step.iter().zip(&columns.time).zip(&columns.step_s);
        let steps = rows
            .map(|((&step, &time), &seconds)| FinishedStep { number: step as u64, time, seconds })
            .collect();
        FolderState { metrics, has_summary, steps }
    }

    /// Whether a run has begun in the folder since `before`.
    pub fn has_begun_since(&self, before: &FolderState) -> bool {
        self.metrics.is_some() && self.metrics != before.metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_says_what_was_lost() {
        let step = |number| FinishedStep { number, time: number as f64, seconds: 0.5 };
        let before = FolderState { steps: (1..=7).map(step).collect(), ..FolderState::default() };
        let kept =
            Columns { step: vec![1.0, 2.0, 3.0, 4.0], time: vec![1.0, 2.0, 3.0, 4.0], ..Columns::default() };
        assert_eq!(Restart::after(8.0, &before, &kept), None);
        let mut now = kept;
        now.step.push(5.0);
        now.time.push(10.5);
        let restart = Restart::after(8.0, &before, &now).expect("a step");
        assert_eq!((restart.last_step, restart.resumed_after, restart.lost_steps), (7, 4, 3));
        assert_eq!((restart.repeated_s, restart.pause_s), (1.5, 3.5));
        assert_eq!(
            restart.to_string(),
            "restarted: step 5 has ended 3.5 s after step 7 before the failure; 3 steps were lost, which had taken 1.5 s"
        );
    }

    #[test]
    fn the_restarts_of_several_launches_are_added_up() {
        let out = std::env::temp_dir().join(format!("kintsugi-restarts-{}", std::process::id()));
        fs::create_dir_all(&out).expect("a folder");
        assert_eq!(RestartSummary::of_run(&out), None);
        let restart =
            |time| Restart { time, lost_steps: 2, repeated_s: 1.0, pause_s: 3.0, ..Restart::default() };
        write_restarts(&out, &[restart(1.0)]).expect("it is written");
        write_restarts(&out, &[restart(5.0)]).expect("it is written");
        write_restarts(&out, &[restart(5.0), restart(6.0)]).expect("it is written");
        let found = RestartSummary::of_run(&out);
        fs::remove_dir_all(&out).ok();
        assert_eq!(found, Some(RestartSummary { restarts: 3, lost_steps: 6, lost_s: 12.0 }));
    }
}
