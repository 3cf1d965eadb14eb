//! What a trial reports: the times of its steps, and its memory.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use kintsugi_run::RunSummary;
use kintsugi_run::files::SUMMARY;
use serde::Deserialize;

use super::record::StepFigures;

/// A step that a run reported.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Step {
    #[serde(rename = "step")]
    number: u64,
    /// How long it took.
    #[serde(rename = "step_s")]
    pub seconds: f64,
    energy_j: Option<f64>,
}

/// The steps of a run, read while it goes on.
#[derive(Debug)]
pub struct StepTimes {
    path: PathBuf,
    /// Bytes that have been read.
    read: u64,
    steps: Vec<Step>,
}

impl StepTimes {
    /// The steps in a file that may not exist yet.
    pub fn new(path: PathBuf) -> Self {
        StepTimes { path, read: 0, steps: Vec::new() }
    }

    /// The steps after the first `warm_up`. Lines that are not those of a sound step are ignored.
    pub fn after(&mut self, warm_up: usize) -> &[Step] {
        if let Some(text) = self.more() {
            let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
            self.read += whole.len() as u64;
            let steps = whole.lines().filter_map(|line| serde_json::from_str::<Step>(line).ok());
            self.steps.extend(steps.filter(|step| step.seconds.is_finite() && step.seconds > 0.0));
        }
        let first = self.steps.partition_point(|step| step.number <= warm_up as u64);
        &self.steps[first..]
    }

    fn more(&self) -> Option<String> {
        let mut file = File::open(&self.path).ok()?;
        file.seek(SeekFrom::Start(self.read)).ok()?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
        String::from_utf8(bytes).ok()
    }
}

/// The most of a file that is read at once.
const MAX_BYTES: u64 = 16 << 20;

/// The measurement of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    /// Medians of its steps, and its memory if the run told it.
    pub figures: StepFigures,
    /// How many steps there are.
    pub steps: usize,
}

impl Measurement {
    /// The measurement of some steps of the run in a folder; `None` without steps.
    pub fn of(steps: &[Step], run: &Path) -> Option<Self> {
        let step_s = median(steps.iter().map(|step| step.seconds).collect())?;
        let energy_j: Option<Vec<f64>> = steps.iter().map(|step| step.energy_j).collect();
        let figures = StepFigures {
            step_s: Some(step_s),
            energy_j: energy_j.and_then(median),
            reserved_bytes: reserved(&run.join(SUMMARY)),
        };
        Some(Measurement { figures, steps: steps.len() })
    }
}

/// The median; the lower one of an even number.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

/// What the fullest rank took from its device, by the run's summary.
fn reserved(summary: &Path) -> Option<u64> {
    let summary: RunSummary = serde_json::from_slice(&fs::read(summary).ok()?).ok()?;
    summary.measured.peak_bytes.iter().filter_map(|rank| rank.get("reserved").copied()).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sound_steps_are_read_as_they_come() {
        let folder = std::env::temp_dir().join(format!("kintsugi-{}-measure", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for tests");
        let path = folder.join("metrics.jsonl");
        let mut times = StepTimes::new(path.clone());
        assert!(times.after(0).is_empty(), "there is no file yet");
        let line =
            |step: u64, seconds: f64| format!("{{\"step\":{step},\"loss\":2.0,\"step_s\":{seconds}}}\n");
        let first = line(1, 9.0) + &line(2, 1.5) + "garbage\n" + &line(3, -1.0) + &line(4, 0.5)[..10];
        fs::write(&path, &first).expect("written");
        assert_eq!(times.after(1).iter().map(|step| step.seconds).collect::<Vec<_>>(), [1.5]);
        fs::write(&path, first[..first.len() - 10].to_owned() + &line(4, 0.5) + &line(5, 2.5))
            .expect("written");
        let steps: Vec<f64> = times.after(1).iter().map(|step| step.seconds).collect();
        assert_eq!(steps, [1.5, 0.5, 2.5]);
        fs::write(
            folder.join("summary.json"),
            r#"{"measured":{"peak_bytes":[{"reserved":7},{"reserved":9}]}}"#,
        )
        .expect("written");
        let found = Measurement::of(times.after(1), &folder).expect("steps");
        assert_eq!(
            (found.figures.step_s, found.figures.reserved_bytes, found.steps),
            (Some(1.5), Some(9), 3)
        );
        assert_eq!(found.figures.energy_j, None);
        assert_eq!(Measurement::of(&[], &folder), None);
        fs::remove_dir_all(&folder).expect("removed");
    }
}
