//! `trials.jsonl`: a line for every trial that has ended, on the disk before the next one begins.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kintsugi_spec::output::{parent, sync_folder};
use serde::{Deserialize, Serialize};

use super::space::Values;

/// The version of the lines. It grows if a field changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// How a trial ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// All of its steps were measured.
    Finished,
    /// Its first steps were so slow that it was stopped. They are its measurement.
    Stopped,
    /// It needed more memory than it may take.
    OutOfMemory,
    /// It did not end in time.
    Timeout,
    /// A signal that the tuner did not send ended it.
    Killed,
    /// It ended with an error.
    Crashed,
    /// It ended well, but reported no times that make sense.
    Garbage,
}

impl Ending {
    /// Whether there is a measurement.
    pub fn is_measured(self) -> bool {
        matches!(self, Ending::Finished | Ending::Stopped)
    }

    /// The word in `trials.jsonl`.
    pub fn word(self) -> &'static str {
        match self {
            Ending::Finished => "finished",
            Ending::Stopped => "stopped",
            Ending::OutOfMemory => "out-of-memory",
            Ending::Timeout => "timeout",
            Ending::Killed => "killed",
            Ending::Crashed => "crashed",
            Ending::Garbage => "garbage",
        }
    }
}

/// What was predicted for a trial, or measured in it, for one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepFigures {
    /// Seconds.
    pub step_s: Option<f64>,
    /// Joules of all ranks.
    pub energy_j: Option<f64>,
    /// Bytes that the fullest rank takes from its device.
    pub reserved_bytes: Option<u64>,
}

/// A line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// See [`SCHEMA`].
    pub schema: u32,
    /// The model, the batch and the machine.
    pub task: String,
    /// The number of the trial, from 1.
    pub trial: usize,
    /// Its settings.
    pub settings: Values,
    /// How it ended.
    pub outcome: Ending,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The number of ranks.
    pub ranks: usize,
    /// Tokens of a step.
    pub tokens: u64,
    /// What was measured: the median of its steps after warm-up.
    #[serde(flatten)]
    pub measured: StepFigures,
    /// How many steps were measured.
    pub steps: usize,
    /// What was predicted.
    pub predicted: StepFigures,
    /// Seconds that the trial took in all.
    pub wall_s: f64,
    /// When it ended, in seconds since 1970.
    pub ended: f64,
}

/// The beginning of every line.
const LINE_START: &[u8] = b"{\"schema\":";
/// Bytes that are reserved on the disk for the line of a trial before the trial begins.
const RESERVED: usize = 8 << 10;
/// Characters of a failure's message that are kept.
pub const MAX_MESSAGE: usize = 600;

/// The name of the file of trials in the folder of a tuning.
pub const TRIALS: &str = "trials.jsonl";

/// The file, open. Only one tuning has it at a time.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Bytes of the lines.
    length: u64,
    records: Vec<Record>,
    /// The largest number of a trial.
    last_trial: usize,
    /// Lines that could not be read.
    damaged: usize,
}

/// What follows the last whole line of a file of trials.
#[derive(Debug, PartialEq)]
enum Rest {
    /// Room that was reserved, or a part of a line that a killed tuning has left: it may be cut.
    Torn,
    /// A whole trial whose newline was lost, as editors do.
    Whole(Box<Record>),
    /// Something else: the file is not one of trials.
    Foreign,
}

impl Rest {
    fn of(rest: &[u8]) -> Rest {
        let text = rest.trim_ascii();
        match serde_json::from_slice::<Record>(text) {
            Ok(record) if record.schema == SCHEMA => Rest::Whole(Box::new(record)),
            _ if LINE_START.starts_with(text) || text.starts_with(LINE_START) => Rest::Torn,
            _ => Rest::Foreign,
        }
    }
}

impl Journal {
    /// Opens the file, or creates it, and reads the trials of an earlier tuning. What a killed tuning has left of a line is
    /// removed. A file with something else at its end is refused and stays as it is.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(ErrorKind::ResourceBusy, "another tuning is writing it"));
            }
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        sync_folder(parent(path))?;
        let text = std::fs::read(path)?;
        let (mut records, damaged) = parse_trials(&text);
        let mut length = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
        match Rest::of(&text[length..]) {
            Rest::Torn => {}
            Rest::Whole(record) => {
                length += text[length..].trim_ascii_end().len();
                file.write_all_at(b"\n", length as u64)?;
                length += 1;
                records.push(*record);
            }
            Rest::Foreign => {
                return Err(io::Error::new(
                    ErrorKind::InvalidData,
                    "its end is no trial: it is not a file of trials, or was damaged; choose another folder with --out",
                ));
            }
        }
        file.set_len(length as u64)?;
        let last_trial = records.iter().map(|record| record.trial).max().unwrap_or(0);
        Ok(Journal { path: path.to_owned(), file, length: length as u64, records, last_trial, damaged })
    }

    /// Takes trials out of [`records`](Journal::records), as those of an earlier tuning of another space. They stay in the file.
    pub fn take(&mut self, is_other: impl FnMut(&mut Record) -> bool) -> Vec<Record> {
        self.records.extract_if(.., is_other).collect()
    }

    /// The largest number of a trial in the file.
    pub fn last_trial(&self) -> usize {
        self.last_trial
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The trials so far.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// How many lines could not be read.
    pub fn damaged(&self) -> usize {
        self.damaged
    }

    /// Reserves room on the disk for `lines` more lines, so that a full disk is noticed before a trial is run for nothing.
    pub fn reserve(&mut self, lines: usize) -> io::Result<()> {
        self.file.write_all_at(&vec![b' '; lines * RESERVED], self.length)?;
        self.file.sync_data()
    }

    /// Adds a trial, and waits until the disk has it. `pending` lines stay reserved after it.
    pub fn append(&mut self, record: Record, pending: usize) -> io::Result<()> {
        let mut line = serde_json::to_vec(&record).expect("a record has string keys");
        line.push(b'\n');
        self.file.write_all_at(&line, self.length)?;
        self.length += line.len() as u64;
        self.file.set_len(self.length + (pending * RESERVED) as u64)?;
        if pending > 0 {
            self.file.write_all_at(&vec![b' '; pending * RESERVED], self.length)?;
        }
        self.file.sync_data()?;
        self.last_trial = self.last_trial.max(record.trial);
        self.records.push(record);
        Ok(())
    }
}

/// Leaves whole lines and nothing else.
impl Drop for Journal {
    fn drop(&mut self) {
        self.file.set_len(self.length).ok();
    }
}

/// Reads the trials of a file that another tuning wrote, and the number of lines that could not be read.
pub fn read(path: &Path) -> io::Result<(Vec<Record>, usize)> {
    std::fs::read(path).map(|text| parse_trials(&text))
}

/// The trials of a file's text, and the number of lines that could not be read. What follows the last whole line is ignored.
pub fn parse_trials(text: &[u8]) -> (Vec<Record>, usize) {
    let lines = text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
    let (mut records, mut damaged) = (Vec::new(), 0);
    for line in lines {
        match serde_json::from_slice::<Record>(line) {
            Ok(record) if record.schema == SCHEMA => records.push(record),
            _ => damaged += 1,
        }
    }
    (records, damaged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(trial: usize) -> Record {
        Record {
            schema: SCHEMA,
            task: "a model".to_owned(),
            trial,
            settings: [("parallel.tp".to_owned(), "2".to_owned())].into(),
            outcome: Ending::OutOfMemory,
            message: None,
            ranks: 4,
            tokens: 512,
            measured: StepFigures::default(),
            steps: 0,
            predicted: StepFigures { step_s: Some(0.1 + 0.2), ..StepFigures::default() },
            wall_s: 1.5,
            ended: 0.0,
        }
    }

    fn path(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kintsugi-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for tests");
        folder.join(TRIALS)
    }

    #[test]
    fn what_was_written_is_read_again_and_a_torn_line_is_removed() {
        let path = path("journal");
        let mut journal = Journal::open(&path).expect("a new file");
        for trial in 1..=2 {
            journal.reserve(2).expect("room");
            journal.append(record(trial), 1).expect("room");
        }
        let error = Journal::open(&path).expect_err("it is open");
        assert!(error.to_string().contains("another tuning"), "{error}");
        drop(journal);
        let whole = std::fs::read(&path).expect("the file");
        assert_eq!(read(&path).expect("the file"), (vec![record(1), record(2)], 0));
        // As a kill leaves it: reserved room, or a part of a line in it.
        for rest in ["    ", "{\"schema\":1,\"tri   "] {
            std::fs::write(&path, [&whole[..], rest.as_bytes()].concat()).expect("written");
            let journal = Journal::open(&path).expect("the file");
            assert_eq!((journal.records().len(), journal.damaged()), (2, 0));
            drop(journal);
            assert_eq!(std::fs::read(&path).expect("the file"), whole);
        }
        // An editor may leave out the last newline. No trial is lost by that.
        std::fs::write(&path, &whole[..whole.len() - 1]).expect("written");
        assert_eq!(Journal::open(&path).expect("the file").records().len(), 2);
        assert_eq!(std::fs::read(&path).expect("the file"), whole);
        // Another file is not touched.
        let notes = b"line one\nnotes of somebody else";
        std::fs::write(&path, notes).expect("written");
        let error = Journal::open(&path).expect_err("not a file of trials");
        assert!(error.to_string().contains("not a file of trials"), "{error}");
        assert_eq!(std::fs::read(&path).expect("the file"), notes);
        std::fs::write(&path, [b"not a trial\n", &whole[..]].concat()).expect("written");
        assert_eq!(Journal::open(&path).expect("the file").damaged(), 1);
        std::fs::remove_dir_all(path.parent().expect("a folder")).expect("removed");
    }
}
