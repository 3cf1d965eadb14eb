//! The flight recorder of a rank: its last ops, in a file of fixed size in the run's folder.
//!
//! A line has [`LINE`] bytes. The first one says what the rank is; the others are a ring. Every op overwrites the oldest line with
//! one system call, so the lines are there even if the process is killed, and a run of any length writes a few pages.

use std::fmt::{self, Write};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use kintsugi_spec::input;

use crate::files::FLIGHT;

/// Bytes of a line.
const LINE: usize = 128;

/// Lines of the ring.
const OPS: u64 = 128;

/// Writes what a rank does.
#[derive(Debug)]
pub struct FlightRecorder {
    file: File,
    next: u64,
    line: String,
}

impl FlightRecorder {
    /// The recorder of a rank. `place` says where it runs: its host and device.
    pub fn create(out: &Path, rank: usize, place: &str) -> io::Result<Self> {
        let path = path(out, rank);
        fs::create_dir_all(out.join(FLIGHT))?;
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
        let mut recorder = FlightRecorder { file, next: 0, line: String::with_capacity(2 * LINE) };
        recorder.line.push_str(place);
        recorder.write(0)?;
        Ok(recorder)
    }

    /// Writes that the rank begins an op of a step, which is counted from 1.
    pub fn op(&mut self, step: u64, op: &dyn fmt::Display) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Writing into a string cannot fail.
        write!(self.line, "{} {step} {op}", now.as_micros()).ok();
        let place = 1 + self.next % OPS;
        self.next += 1;
        self.write(place)
    }

    /// Writes the line at a place, filled up with blanks.
    fn write(&mut self, place: u64) -> io::Result<()> {
        let mut end = self.line.len().min(LINE - 1);
        while !self.line.is_char_boundary(end) {
            end -= 1;
        }
        self.line.truncate(end);
        self.line.extend(std::iter::repeat_n(' ', LINE - 1 - end));
        self.line.push('\n');
        let written = self.file.write_all_at(self.line.as_bytes(), place * LINE as u64);
        self.line.clear();
        written
    }
}

/// What the flight recorder of a rank says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flight {
    /// Where the rank ran: its host and device.
    pub place: String,
    /// Its last ops, the oldest first.
    pub ops: Vec<RecordedOp>,
}

/// An op that a rank has begun.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordedOp {
    /// When it began, in microseconds since 1970.
    pub time: u64,
    /// The step, from 1.
    pub step: u64,
    /// The op, with block and micro-batch.
    pub op: String,
}

impl Flight {
    /// Reads the flight recorder of a rank, if there is one.
    pub fn read(out: &Path, rank: usize) -> Option<Self> {
        let bytes = input::bytes(&path(out, rank), LINE as u64 * (1 + OPS)).ok()?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let mut lines = text.lines().map(str::trim_end);
        let place = lines.next()?.to_owned();
        let mut ops: Vec<RecordedOp> = lines.filter_map(RecordedOp::parse).collect();
        ops.sort();
        Some(Flight { place, ops })
    }
}

impl Flight {
    /// The ranks that have a flight recorder, in order.
    pub fn ranks(out: &Path) -> Vec<usize> {
        let entries = fs::read_dir(out.join(FLIGHT)).into_iter().flatten().flatten();
        let rank = |name: std::ffi::OsString| name.to_str()?.strip_prefix("rank-")?.parse().ok();
        let mut ranks: Vec<usize> = entries.filter_map(|entry| rank(entry.file_name())).collect();
        ranks.sort_unstable();
        ranks
    }
}

impl RecordedOp {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(3, ' ');
        let (time, step) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(RecordedOp { time, step, op: words.next()?.to_owned() })
    }
}

fn path(out: &Path, rank: usize) -> PathBuf {
    out.join(FLIGHT).join(format!("rank-{rank:05}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ops_are_read_in_order_and_the_file_does_not_grow() {
        let out = std::env::temp_dir().join(format!("kintsugi-flight-{}", std::process::id()));
        let mut recorder = FlightRecorder::create(&out, 3, "node1, cpu").expect("a folder");
        for step in 1..=1000 {
            recorder
                .op(step, &format_args!("forward layer {step}, {}", "é".repeat(90)))
                .expect("it is written");
        }
        let found = Flight::read(&out, 3).expect("it is there");
        let length = fs::metadata(path(&out, 3)).expect("a file").len();
        assert_eq!(Flight::read(&out, 4), None);
        fs::remove_dir_all(&out).ok();
        assert_eq!((found.place.as_str(), found.ops.len() as u64, length), ("node1, cpu", OPS, 129 * 128));
        let last = found.ops.last().expect("ops");
        assert!(last.step == 1000 && last.op.starts_with("forward layer 1000, éé"), "{last:?}");
        assert!(found.ops.is_sorted_by_key(|op| op.step));
    }
}
