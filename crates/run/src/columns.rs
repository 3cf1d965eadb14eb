//! The figures of a run's steps, read from `metrics.jsonl` as it grows.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Take};
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::time::SystemTime;

use crate::files::METRICS;
use crate::metrics_line::Line;
use crate::{OpenFolder, Straggler};

/// The longest line of metrics that is read.
const MAX_LINE: u64 = 1 << 20;
/// The most bytes of the metrics that are read.
pub const MAX_METRICS: u64 = 1 << 30;

/// Figures of steps, in columns; what a line does not have is not a number.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "the names of metrics.jsonl")]
pub struct Columns {
    pub step: Vec<f64>,
    pub time: Vec<f64>,
    pub loss: Vec<f64>,
    pub grad_norm: Vec<f64>,
    pub lr: Vec<f64>,
    pub tokens: Vec<f64>,
    pub tokens_per_s: Vec<f64>,
    pub step_s: Vec<f64>,
    pub mfu: Vec<f64>,
    pub loss_scale: Vec<f64>,
    pub energy_j: Vec<f64>,
    /// Steps that were skipped.
    pub skipped: Vec<f64>,
    /// Steps that saved a checkpoint, and the seconds that training paused.
    pub checkpoints: Vec<(f64, f64)>,
    /// Validation losses by source, each with its steps; the mean has no name.
    pub validation: BTreeMap<String, (Vec<f64>, Vec<f64>)>,
    /// Epochs of every source at the last step.
    pub epochs: BTreeMap<String, f64>,
    /// Ranks that compute more slowly than others at the last step.
    pub stragglers: Vec<Straggler>,
    /// How often the run has gone back to a checkpoint after a spike at the last step.
    pub rollbacks: u64,
    /// Whole lines that could not be read.
    pub damaged: usize,
    /// Whether the file is longer than what is read of it.
    pub cut: bool,
    /// Whether the file ends in the middle of a line.
    pub partial: bool,
}

/// How far `metrics.jsonl` was read.
#[derive(Debug, Default)]
pub(crate) struct MetricsFile {
    inode: u64,
    offset: u64,
    /// When it was last written to.
    pub(crate) written: Option<SystemTime>,
}

impl MetricsFile {
    /// Reads the whole lines that were added. A file that was replaced or became shorter is read from the start: a run that
    /// resumes writes its lines anew.
    pub(crate) fn update(&mut self, folder: &OpenFolder, into: &mut Columns) -> io::Result<bool> {
        let (mut file, found) = match folder.file(METRICS) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.inode != 0 => return Ok(false),
            file => file?,
        };
        let mut changed = false;
        if found.ino() != self.inode || found.len() < self.offset {
            *self = MetricsFile { inode: found.ino(), ..MetricsFile::default() };
            *into = Columns::default();
            changed = true;
        }
        self.written = found.modified().ok();
        if found.len() == self.offset {
            return Ok(mem::take(&mut into.partial) || changed);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        changed |= into.cut != (found.len() > MAX_METRICS);
        into.cut = found.len() > MAX_METRICS;
        let rest = file.take(MAX_METRICS.saturating_sub(self.offset));
        Ok(self.lines(BufReader::with_capacity(1 << 20, rest), into)? || changed)
    }

    fn lines(&mut self, mut reader: BufReader<Take<File>>, into: &mut Columns) -> io::Result<bool> {
        let mut line = Vec::new();
        let mut any = false;
        loop {
            line.clear();
            let length = reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)?;
            // A run may be in the middle of its last line, or was killed there.
            if !line.ends_with(b"\n") && (length as u64) < MAX_LINE {
                let partial = length > 0;
                any |= into.partial != partial;
                into.partial = partial;
                return Ok(any);
            }
            self.offset += length as u64;
            any = true;
            match serde_json::from_slice::<Line>(&line) {
                Ok(line) if line.step.is_some() => into.add(line),
                _ => into.damaged += 1,
            }
        }
    }
}

impl Columns {
    fn add(&mut self, line: Line) {
        let step = line.step.unwrap_or_default() as f64;
        let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
        self.step.push(step);
        self.time.push(number(line.time));
        self.loss.push(number(line.loss));
        self.grad_norm.push(number(line.grad_norm));
        self.lr.push(number(line.lr));
        self.tokens.push(number(line.tokens));
        self.tokens_per_s.push(number(line.tokens_per_s));
        self.step_s.push(number(line.step_s));
        self.mfu.push(number(line.mfu));
        self.loss_scale.push(number(line.loss_scale));
        self.energy_j.push(number(line.energy_j));
        self.skipped.extend(line.skipped.then_some(step));
        self.checkpoints.extend(line.checkpoint_s.map(|seconds| (step, seconds)));
        let mean = line.validation_loss.map(|loss| (String::new(), Some(loss)));
        for (source, loss) in line.validation_losses.into_iter().chain(mean) {
            let (steps, losses) = self.validation.entry(source).or_default();
            steps.push(step);
            losses.push(number(loss));
        }
        self.stragglers = line.stragglers;
        self.rollbacks = line.rollbacks.unwrap_or(0);
        if !line.epochs.is_empty() {
            self.epochs = line.epochs.into_iter().map(|(source, epochs)| (source, number(epochs))).collect();
        }
    }
}
