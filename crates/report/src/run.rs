//! The folder of a run, read as it grows: metrics, summary, configuration and trace. Only its files are read, so a run that
//! goes on is not disturbed, and the folder may be on another machine's disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Take};
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use kintsugi_draw::Trace;
use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;
use kintsugi_spec::input;
use serde::{Deserialize, Deserializer};

use crate::folder::{Folder, FolderPath};

/// A run's folder and what was read of it.
#[derive(Debug)]
pub struct RunFolder {
    /// What it is called on pages.
    pub name: String,
    /// The figures of its steps.
    pub steps: Columns,
    /// Its summary, if it has ended.
    pub summary: Option<Summary>,
    /// Why `summary.json` cannot be read, if it is there and cannot.
    pub summary_error: Option<String>,
    /// The text of its configuration; empty if it is not one that this version can read.
    pub config: String,
    /// Whether `config.toml` is something else than such a configuration.
    pub config_refused: bool,
    /// The plan of its configuration, if this version can read it.
    pub plan: Option<Plan>,
    /// The measured trace of a step, if there is one.
    pub trace: Option<Trace>,
    path: FolderPath,
    metrics: MetricsFile,
    read: BTreeMap<&'static str, Stamp>,
}

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
    /// Whole lines that could not be read.
    pub damaged: usize,
    /// Whether the file is longer than what is read of it.
    pub cut: bool,
    /// Whether the file ends in the middle of a line.
    pub partial: bool,
}

/// What `summary.json` says. A number that is not finite is `null` there, so every `null` is a missing value.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "the names of summary.json")]
pub struct Summary {
    #[serde(deserialize_with = "or_default")]
    pub stopped: bool,
    pub failure: Option<String>,
    pub loss_floor: Option<f64>,
    #[serde(deserialize_with = "or_default")]
    pub predicted: Figures,
    #[serde(deserialize_with = "or_default")]
    pub measured: Figures,
}

/// Memory, traffic, time and energy of a step.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "the names of summary.json")]
pub struct Figures {
    #[serde(deserialize_with = "ranks")]
    pub peak_bytes: Vec<BTreeMap<String, u64>>,
    #[serde(deserialize_with = "levels")]
    pub comm_bytes: BTreeMap<String, BTreeMap<String, u64>>,
    pub step_s: Option<f64>,
    pub tokens_per_s: Option<f64>,
    pub energy_j: Option<f64>,
}

/// A value, or its default if the file has `null` in its place.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// A number that the file has: not a number if it is `null` there.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(Some(Option::deserialize(from)?.unwrap_or(f64::NAN)))
}

/// Names and numbers as a file has them.
type Numbers<T> = BTreeMap<String, Option<T>>;

/// Bytes by name, without those that are `null`.
fn bytes(numbers: Option<Numbers<u64>>) -> BTreeMap<String, u64> {
    numbers.into_iter().flatten().filter_map(|(name, bytes)| Some((name, bytes?))).collect()
}

fn ranks<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<BTreeMap<String, u64>>, D::Error> {
    let ranks: Vec<Option<Numbers<u64>>> = or_default(from)?;
    Ok(ranks.into_iter().map(bytes).collect())
}

fn levels<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, BTreeMap<String, u64>>, D::Error> {
    let levels: BTreeMap<String, Option<Numbers<u64>>> = or_default(from)?;
    Ok(levels.into_iter().map(|(level, operations)| (level, bytes(operations))).collect())
}

/// The state of a run, according to its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// It has written a step lately.
    Running,
    /// It reached its last step.
    Finished,
    /// It was asked to stop.
    Stopped,
    /// It ended with an error.
    Failed,
    /// It has written neither a step lately nor a summary.
    Silent,
}

/// A run that has not written a step for so long, and for twenty of its steps, is silent.
const SILENCE: Duration = Duration::from_secs(60);
/// The longest line of metrics that is read.
const LONGEST_LINE: u64 = 1 << 20;
/// The most bytes of each file that are read.
pub(crate) const MAX_METRICS: u64 = 1 << 30;
const MAX_SUMMARY: u64 = 64 << 20;
const MAX_CONFIG: u64 = 1 << 20;
const MAX_TRACE: u64 = 256 << 20;

/// The files of a run.
const METRICS: &str = "metrics.jsonl";
const SUMMARY: &str = "summary.json";
const CONFIG: &str = "config.toml";
/// Where a trace is looked for.
const TRACE: &str = "trace.json";

/// Whether a folder is that of a run.
pub fn is_run(folder: &Path) -> bool {
    FolderPath::new(folder).open().is_ok_and(|folder| has_metrics(&folder))
}

/// Whether an open folder is that of a run.
pub(crate) fn has_metrics(folder: &Folder) -> bool {
    folder.has_file(METRICS).unwrap_or(false)
}

impl RunFolder {
    /// A run that nothing was read of yet.
    pub fn new(path: &Path, name: String) -> Self {
        RunFolder::at(FolderPath::new(path), name)
    }

    /// A run below a folder that the user named.
    pub(crate) fn at(path: FolderPath, name: String) -> Self {
        RunFolder {
            path,
            name,
            steps: Columns::default(),
            summary: None,
            summary_error: None,
            config: String::new(),
            config_refused: false,
            plan: None,
            trace: None,
            metrics: MetricsFile::default(),
            read: BTreeMap::new(),
        }
    }

    /// Opens a run and reads its files; `trace` is a trace elsewhere.
    pub fn open(path: &Path, name: String, trace: Option<&Path>) -> io::Result<Self> {
        let mut run = RunFolder::new(path, name);
        run.update()?;
        if let Some(trace) = trace {
            run.trace = Some(parse_trace(&input::text(trace, MAX_TRACE)?)?);
        }
        Ok(run)
    }

    /// Reads what is new. Gives whether anything was.
    pub fn update(&mut self) -> io::Result<bool> {
        let folder = self.path.open()?;
        let mut changed = self.metrics.update(&folder, &mut self.steps)?;
        if self.is_new(&folder, SUMMARY) {
            changed = true;
            (self.summary, self.summary_error) = match read_summary(&folder) {
                Ok(summary) => (summary, None),
                Err(error) => (None, Some(error.to_string())),
            };
        }
        if self.is_new(&folder, CONFIG) {
            changed = true;
            self.read_config(&folder);
        }
        if self.is_new(&folder, TRACE) {
            changed = true;
            self.trace = folder.text(TRACE, MAX_TRACE).and_then(|text| parse_trace(&text)).ok();
        }
        Ok(changed)
    }

    /// Reads the configuration. Text that is something else is not kept, so that no page shows it.
    fn read_config(&mut self, folder: &Folder) {
        let text = folder.text(CONFIG, MAX_CONFIG);
        let missing = text.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        let config = text.ok().filter(|text| ConfigSource::text(text.as_str()).check().is_ok());
        self.config_refused = config.is_none() && !missing;
        self.plan = config.as_ref().and_then(|text| ConfigSource::text(text.as_str()).plan().ok());
        self.config = config.unwrap_or_default();
    }

    /// Whether a file has changed, come or gone since this was last asked.
    fn is_new(&mut self, folder: &Folder, name: &'static str) -> bool {
        let stamp = Stamp::of(folder, name);
        self.read.insert(name, stamp) != Some(stamp)
    }

    /// Whether the run is running, finished, stopped, failed or silent.
    pub fn state(&self) -> RunState {
        if let Some(summary) = &self.summary {
            return match (&summary.failure, summary.stopped) {
                (Some(_), _) => RunState::Failed,
                (None, true) => RunState::Stopped,
                (None, false) => RunState::Finished,
            };
        }
        let written = self.metrics.written;
        let quiet = written.and_then(|at| SystemTime::now().duration_since(at).ok()).unwrap_or_default();
        let step_s = self.steps.step_s.last().copied().filter(|seconds| seconds.is_finite()).unwrap_or(0.0);
        let patience = SILENCE.max(Duration::try_from_secs_f64(20.0 * step_s).unwrap_or(SILENCE));
        if quiet > patience { RunState::Silent } else { RunState::Running }
    }
}

/// Reads a summary, if there is one.
fn read_summary(folder: &Folder) -> io::Result<Option<Summary>> {
    match folder.text(SUMMARY, MAX_SUMMARY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => Ok(Some(serde_json::from_str(&text?)?)),
    }
}

/// The trace in a file that `train --trace` has written.
fn parse_trace(text: &str) -> io::Result<Trace> {
    let other = || {
        io::Error::new(io::ErrorKind::InvalidData, "it is no trace that kintsugi train --trace has written")
    };
    Trace::from_chrome(text).ok_or_else(other)
}

/// What tells one state of a file from another: its inode, its length and its time. All are zero if it is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    length: u64,
    time: (i64, i64),
}

impl Stamp {
    fn of(folder: &Folder, name: &str) -> Self {
        folder.stat(name).map_or_else(
            |_| Stamp::default(),
            |found| Stamp {
                inode: found.st_ino,
                length: found.st_size as u64,
                time: (found.st_mtime, found.st_mtime_nsec as i64),
            },
        )
    }
}

/// How far `metrics.jsonl` was read.
#[derive(Debug, Default)]
struct MetricsFile {
    inode: u64,
    offset: u64,
    /// When it was last written to.
    written: Option<SystemTime>,
}

/// A line of `metrics.jsonl`. A number that is not finite is `null` there, so every number may be missing.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Line {
    step: Option<u64>,
    time: Option<f64>,
    loss: Option<f64>,
    grad_norm: Option<f64>,
    lr: Option<f64>,
    tokens: Option<f64>,
    tokens_per_s: Option<f64>,
    step_s: Option<f64>,
    mfu: Option<f64>,
    loss_scale: Option<f64>,
    energy_j: Option<f64>,
    #[serde(deserialize_with = "or_default")]
    skipped: bool,
    checkpoint_s: Option<f64>,
    #[serde(deserialize_with = "present")]
    validation_loss: Option<f64>,
    #[serde(deserialize_with = "or_default")]
    validation_losses: Numbers<f64>,
    #[serde(deserialize_with = "or_default")]
    epochs: Numbers<f64>,
}

impl MetricsFile {
    /// Reads the whole lines that were added. A file that was replaced or became shorter is read from the start: a run that
    /// resumes writes its lines anew.
    fn update(&mut self, folder: &Folder, into: &mut Columns) -> io::Result<bool> {
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
            let length = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)?;
            // A run may be in the middle of its last line, or was killed there.
            if !line.ends_with(b"\n") && (length as u64) < LONGEST_LINE {
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
        if !line.epochs.is_empty() {
            self.epochs = line.epochs.into_iter().map(|(source, epochs)| (source, number(epochs))).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::path::PathBuf;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kintsugi-report-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).expect("a folder");
            Folder(path)
        }

        fn append(&self, text: &str) {
            let mut file =
                fs::OpenOptions::new().append(true).create(true).open(self.0.join(METRICS)).expect("a file");
            file.write_all(text.as_bytes()).expect("it is written");
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    #[test]
    fn metrics_are_read_as_they_grow() {
        let folder = Folder::new("grow");
        folder.append("{\"step\":1,\"loss\":3.5}\nnot a line\n{\"step\":2,\"lo");
        let mut run = RunFolder::open(&folder.0, "a".to_owned(), None).expect("a run");
        assert_eq!((&run.steps.step[..], run.steps.damaged, run.steps.partial), (&[1.0][..], 1, true));
        assert!(!run.update().expect("it is read"), "half a line is none");
        folder.append("ss\":null,\"skipped\":true,\"validation_loss\":2.5}\n");
        assert!(run.update().expect("it is read"));
        assert_eq!((&run.steps.step[..], run.steps.partial), (&[1.0, 2.0][..], false));
        assert!(run.steps.loss[1].is_nan());
        assert_eq!(run.steps.skipped, [2.0]);
        assert_eq!(run.steps.validation[""], (vec![2.0], vec![2.5]));
        assert_eq!(run.state(), RunState::Running);
        // A line that could not be written whole is removed again.
        let whole = fs::metadata(folder.0.join(METRICS)).expect("a file").len();
        folder.append("{\"step\":3");
        assert!(run.update().expect("it is read") && run.steps.partial);
        fs::OpenOptions::new()
            .write(true)
            .open(folder.0.join(METRICS))
            .and_then(|file| file.set_len(whole))
            .expect("it is shorter");
        assert!(run.update().expect("it is read") && !run.steps.partial);
        // A resumed run replaces the file.
        fs::write(folder.0.join("new"), "{\"step\":1,\"loss\":3.5}\n").expect("a file");
        fs::rename(folder.0.join("new"), folder.0.join(METRICS)).expect("it is replaced");
        assert!(run.update().expect("it is read"));
        assert_eq!(run.steps.step, [1.0]);
        fs::write(folder.0.join(SUMMARY), "{\"stopped\":true}").expect("a summary");
        assert!(run.update().expect("it is read"));
        assert_eq!(run.state(), RunState::Stopped);
        assert!(!run.update().expect("it is read"));
    }
}
