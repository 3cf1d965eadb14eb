//! `metrics.jsonl` as a run writes it: one line per step.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use kintsugi_spec::input;
use kintsugi_spec::output::write_target;
use serde::Deserialize;

use crate::files::{METRICS, SUMMARY};
use crate::{MetricsLine, RunFolderError};

/// `metrics.jsonl`, open for writing.
pub struct Metrics {
    path: PathBuf,
    file: File,
    /// Bytes of the lines that were written.
    length: u64,
    /// Lines that could not be written yet.
    unwritten: Vec<u8>,
}

/// A warning about missing lines of a run's first `steps` steps, if there are any.
pub fn missing_lines(out: &Path, steps: u64) -> Option<String> {
    let path = out.join(METRICS);
    match Lines::read(&path, steps) {
        // Damaged lines leave a gap. They were not removed.
        Ok(lines) => Lines { damaged: 0, ..lines }.missing(&path, steps),
        Err(error) => Some(RunFolderError::file("read", &path, error).to_string()),
    }
}

impl Metrics {
    /// Opens a run's metrics and keeps the lines of the first `steps` steps. Later lines are removed, because those
    /// steps run again. An older summary is removed too. The second result describes gaps in the lines that are kept.
    pub fn create(out: &Path, steps: u64) -> Result<(Self, Option<String>), RunFolderError> {
        remove(&out.join(SUMMARY))?;
        let path = out.join(METRICS);
        let failed = |error| RunFolderError::file("create", &path, error);
        let lines = if steps == 0 { Lines::default() } else { Lines::read(&path, steps).map_err(failed)? };
        write_target(&path, &lines.text).map_err(|error| RunFolderError::file("write", &path, error))?;
        let file = OpenOptions::new().append(true).open(&path).map_err(failed)?;
        let missing = lines.missing(&path, steps);
        let length = lines.text.len() as u64;
        Ok((Metrics { path, file, length, unwritten: Vec::new() }, missing))
    }

    /// Adds a step. If its line cannot be written, it is kept in memory and written with the next one.
    pub fn step(&mut self, line: &MetricsLine) -> Result<(), RunFolderError> {
        serde_json::to_writer(&mut self.unwritten, line).expect("reports have string keys");
        self.unwritten.push(b'\n');
        self.flush()?;
        // If a run may resume from this step, its line must be on the disk.
        if line.report.checkpoint_s.is_some() {
            self.file.sync_data().map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// Writes the lines that could not be written before.
    pub fn flush(&mut self) -> Result<(), RunFolderError> {
        if let Err(error) = self.file.write_all(&self.unwritten) {
            // Remove a partly written line: the next attempt starts after the last whole one.
            if self.file.metadata().is_ok_and(|found| found.len() > self.length) {
                self.file.set_len(self.length).ok();
            }
            return Err(self.failed(error));
        }
        self.length += self.unwritten.len() as u64;
        self.unwritten.clear();
        Ok(())
    }

    fn failed(&self, source: io::Error) -> RunFolderError {
        RunFolderError::Metrics { path: self.path.clone(), source }
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
struct StepOfLine {
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
            match serde_json::from_slice::<StepOfLine>(line) {
                Ok(StepOfLine { step }) if step <= steps => {
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

/// Removes a file, if it exists.
pub(crate) fn remove(path: &Path) -> Result<(), RunFolderError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(RunFolderError::file("replace", path, error))
        }
        _ => Ok(()),
    }
}
