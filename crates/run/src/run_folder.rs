//! The folder of a run, read as it grows: metrics, summary, configuration and trace. Only its files are read, so a run that
//! goes on is not disturbed, and the folder may be on another machine's disk.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigSource;

use crate::columns::MetricsFile;
use crate::files::{CONFIG, METRICS, SUMMARY, TRACE};
use crate::{Columns, FolderPath, OpenFolder, RunSummary};

/// A run's folder and what was read of it.
#[derive(Debug)]
pub struct RunFolder {
    /// What it is called on pages.
    pub name: String,
    /// The figures of its steps.
    pub steps: Columns,
    /// Its summary, if it has ended.
    pub summary: Option<RunSummary>,
    /// Why `summary.json` cannot be read, if it is there and cannot.
    pub summary_error: Option<String>,
    /// The text of its configuration; empty if it is not one that this version can read.
    pub config: String,
    /// Whether `config.toml` is something else than such a configuration.
    pub config_refused: bool,
    /// The plan of its configuration, if this version can read it.
    pub plan: Option<Plan>,
    path: FolderPath,
    metrics: MetricsFile,
    read: BTreeMap<&'static str, Stamp>,
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
/// The most bytes of each file that are read.
const MAX_SUMMARY: u64 = 64 << 20;
const MAX_CONFIG: u64 = 1 << 20;
/// The most bytes of a trace that are read.
pub const MAX_TRACE: u64 = 256 << 20;

/// Whether a folder is that of a run.
pub fn is_run(folder: &Path) -> bool {
    FolderPath::new(folder).open().is_ok_and(|folder| has_metrics(&folder))
}

/// Whether an open folder is that of a run.
pub fn has_metrics(folder: &OpenFolder) -> bool {
    folder.has_file(METRICS).unwrap_or(false)
}

impl RunFolder {
    /// A run that nothing was read of yet.
    pub fn new(path: &Path, name: String) -> Self {
        RunFolder::at(FolderPath::new(path), name)
    }

    /// A run below a folder that the user named.
    pub fn at(path: FolderPath, name: String) -> Self {
        RunFolder {
            path,
            name,
            steps: Columns::default(),
            summary: None,
            summary_error: None,
            config: String::new(),
            config_refused: false,
            plan: None,
            metrics: MetricsFile::default(),
            read: BTreeMap::new(),
        }
    }

    /// Opens a run and reads its files.
    pub fn open(path: &Path, name: String) -> io::Result<Self> {
        let mut run = RunFolder::new(path, name);
        run.update()?;
        Ok(run)
    }

    /// Reads what is new. Returns whether anything was.
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
        Ok(changed)
    }

    /// The text of the trace in the folder, if it is new or was replaced since the last call; an error if it cannot be read or has
    /// gone.
    pub fn new_trace(&mut self) -> io::Result<Option<io::Result<String>>> {
        let folder = self.path.open()?;
        Ok(self.is_new(&folder, TRACE).then(|| folder.text(TRACE, MAX_TRACE)))
    }

    /// Reads the configuration. Text that is something else is not kept, so that no page shows it.
    fn read_config(&mut self, folder: &OpenFolder) {
        let text = folder.text(CONFIG, MAX_CONFIG);
        let missing = text.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        let config = text.ok().filter(|text| ConfigSource::text(text.as_str()).check().is_ok());
        self.config_refused = config.is_none() && !missing;
        self.plan = config.as_ref().and_then(|text| ConfigSource::text(text.as_str()).plan().ok());
        self.config = config.unwrap_or_default();
    }

    /// Whether a file has changed, come or gone since this was last asked.
    fn is_new(&mut self, folder: &OpenFolder, name: &'static str) -> bool {
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
fn read_summary(folder: &OpenFolder) -> io::Result<Option<RunSummary>> {
    match folder.text(SUMMARY, MAX_SUMMARY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => Ok(Some(serde_json::from_str(&text?)?)),
    }
}

/// What tells one state of a file from another: its inode, its length and its time. All are zero if it is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    length: u64,
    time: (i64, i64),
}

impl Stamp {
    fn of(folder: &OpenFolder, name: &str) -> Self {
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::path::PathBuf;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kintsugi-run-{}-{name}", std::process::id()));
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
        let mut run = RunFolder::open(&folder.0, "a".to_owned()).expect("a run");
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
