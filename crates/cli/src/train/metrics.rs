//! `metrics.jsonl`: one line per step, written during the run.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use kintsugi_data::Dataset;
use kintsugi_engine::StepReport;
use kintsugi_plan::Plan;
use kintsugi_spec::input;
use serde::{Deserialize, Serialize};

use super::record::summary_path;
use crate::failure::Failure;
use crate::files::{remove, write_whole};

/// The file, open.
pub struct Metrics {
    path: PathBuf,
    file: File,
    /// Bytes of the lines that were written.
    length: u64,
    /// Lines that could not be written yet.
    unwritten: Vec<u8>,
}

/// The version of the lines. It grows if a field changes its meaning or goes; a new field leaves it as it is.
const SCHEMA: u32 = 1;

/// A line of the file.
#[derive(Serialize)]
pub struct MetricsLine<'a> {
    schema: u32,
    /// When the step was reported, in seconds since 1970.
    pub time: f64,
    /// What the step reports.
    #[serde(flatten)]
    pub report: &'a StepReport,
    /// Training samples seen so far.
    samples: u64,
    /// How often every source of the data was gone through, if it has an end.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    epochs: BTreeMap<String, f64>,
}

impl<'a> MetricsLine<'a> {
    /// The line of a step that has just been reported.
    pub fn new(plan: &Plan, dataset: &dyn Dataset, report: &'a StepReport) -> Self {
        let samples = report.tokens / plan.batch.sequence as u64;
        MetricsLine {
            schema: SCHEMA,
            time: now(),
            report,
            samples,
            epochs: dataset.epochs(samples).into_iter().collect(),
        }
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// The path of a run's metrics.
pub fn path(out: &Path) -> PathBuf {
    out.join("metrics.jsonl")
}

/// A warning about missing lines of a run's first `steps` steps, if there are any.
pub fn missing(out: &Path, steps: u64) -> Option<String> {
    let path = path(out);
    match Lines::read(&path, steps) {
        // Damaged lines leave a gap. They were not removed.
        Ok(lines) => Lines { damaged: 0, ..lines }.missing(&path, steps),
        Err(error) => Some(Failure::file("read", &path, &error).to_string()),
    }
}

impl Metrics {
    /// Opens a run's metrics and keeps the lines of the first `steps` steps. Later lines are removed, because those
    /// steps run again. An older summary is removed too. The second result describes gaps in the lines that are kept.
    pub fn create(out: &Path, steps: u64) -> Result<(Self, Option<String>), Failure> {
        remove(&summary_path(out))?;
        let path = path(out);
        let failed = |error| Failure::file("create", &path, &error);
        let lines = if steps == 0 { Lines::default() } else { Lines::read(&path, steps).map_err(failed)? };
        write_whole(&path, &lines.text)?;
        let file = OpenOptions::new().append(true).open(&path).map_err(failed)?;
        let missing = lines.missing(&path, steps);
        let length = lines.text.len() as u64;
        Ok((Metrics { path, file, length, unwritten: Vec::new() }, missing))
    }

    /// Adds a step. If its line cannot be written, it is kept in memory and written with the next one.
    pub fn step(&mut self, line: &MetricsLine) -> Result<(), Failure> {
        serde_json::to_writer(&mut self.unwritten, line).expect("reports have string keys");
        self.unwritten.push(b'\n');
        self.flush()?;
        // If a run may resume from this step, its line must be on the disk.
        if line.report.checkpoint_s.is_some() {
            self.file.sync_data().map_err(|error| self.failed(&error))?;
        }
        Ok(())
    }

    /// Writes the lines that could not be written before.
    pub fn flush(&mut self) -> Result<(), Failure> {
        if let Err(error) = self.file.write_all(&self.unwritten) {
            // Remove a partly written line: the next attempt starts after the last whole one.
            if self.file.metadata().is_ok_and(|found| found.len() > self.length) {
                self.file.set_len(self.length).ok();
            }
            return Err(self.failed(&error));
        }
        self.length += self.unwritten.len() as u64;
        self.unwritten.clear();
        Ok(())
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::Run(format!("cannot write {}: {error}", self.path.display()))
    }
}

/// The lines of the first steps of a run.
#[derive(Default)]
struct Lines {
    text: Vec<u8>,
    steps: Vec<u64>,
    /// Damaged lines.
    damaged: usize,
}

#[derive(Deserialize)]
struct Line {
    step: u64,
}

impl Lines {
    fn read(path: &Path, steps: u64) -> io::Result<Self> {
        let text = match input::bytes(path, u64::MAX) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            text => text?,
        };
        let mut lines = Lines::default();
        // A killed run may have left a partial last line.
        for line in text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")) {
            match serde_json::from_slice::<Line>(line) {
                Ok(Line { step }) if step <= steps => {
                    lines.text.extend(line);
                    lines.steps.push(step);
                }
                Ok(_) => {}
                Err(_) => lines.damaged += 1,
            }
        }
        Ok(lines)
    }

    /// A warning about missing lines up to a step, if there are any.
    fn missing(&self, path: &Path, steps: u64) -> Option<String> {
        let path = path.display();
        let gaps: Vec<String> =
            self.gaps(steps).iter().map(|(first, last)| format!("{first} to {last}")).collect();
        let missing =
            (!gaps.is_empty()).then(|| format!("{path} has no lines for steps {}", gaps.join(", ")));
        let damaged =
            (self.damaged > 0).then(|| format!("{} damaged lines of {path} were removed", self.damaged));
        let both: Vec<String> = [missing, damaged].into_iter().flatten().collect();
        (!both.is_empty()).then(|| both.join("; "))
    }

    /// The first and the last step of every gap. If a run resumed from another folder, its lines begin after that
    /// checkpoint's step.
    fn gaps(&self, steps: u64) -> Vec<(u64, u64)> {
        if self.steps.is_empty() && steps > 0 {
            return vec![(1, steps)];
        }
        let next = self.steps.iter().skip(1).copied().chain([steps + 1]);
        let gap = |(&step, next): (&u64, u64)| (next > step + 1).then_some((step + 1, next - 1));
        self.steps.iter().zip(next).filter_map(gap).collect()
    }
}
