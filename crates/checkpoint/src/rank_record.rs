//! The record of a shard that another process has written: how the process that publishes a checkpoint learns its checksum.
//!
//! A record is a small JSON file beside the shard. It appears under its name at once and complete, after the shard is on the
//! disk. The publishing process removes it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::manifest::FileRecord;

/// How often the publishing process looks for a record.
const POLL: Duration = Duration::from_millis(20);

fn path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank:05}.record.json"))
}

/// Leaves the record of a rank's shard, or why it could not be written.
pub(crate) fn write(folder: &Path, rank: usize, result: &Result<FileRecord, String>) -> io::Result<()> {
    let (to, text) = (path(folder, rank), serde_json::to_vec(result)?);
    let unfinished = to.with_extension("partial");
    fs::write(&unfinished, text)?;
    fs::rename(&unfinished, &to)
}

/// Waits for the record of a rank's shard and removes it. The record may be that of a failure. Fails if there is no record
/// after `timeout`, or as soon as the run has failed.
pub(crate) fn take(
    folder: &Path,
    rank: usize,
    timeout: Duration,
    is_running: impl Fn() -> bool,
) -> Result<Result<FileRecord, String>, String> {
    let (path, begun) = (path(folder, rank), Instant::now());
    loop {
        if let Ok(text) = fs::read(&path) {
            fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            let result: Result<FileRecord, String> =
                serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?;
            return Ok(result.map_err(|reason| format!("rank {rank} could not write its shard: {reason}")));
        }
        if !is_running() {
            return Err("the run has failed".into());
        }
        if begun.elapsed() > timeout {
            return Err(format!("rank {rank} left no record of its shard within {timeout:?}"));
        }
        thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kintsugi-{}-record-{name}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for tests");
        folder
    }

    #[test]
    fn a_record_is_taken_once() {
        let folder = folder("once");
        let record =
            FileRecord { name: "rank-00003.safetensors".into(), bytes: 9, checksum: "xxh3:1".into() };
        write(&folder, 3, &Ok(record.clone())).expect("it can be written");
        assert_eq!(take(&folder, 3, Duration::ZERO, || true), Ok(Ok(record)));
        let again = take(&folder, 3, Duration::ZERO, || true).expect_err("it is gone");
        assert!(again.contains("rank 3 left no record of its shard"), "{again}");
        fs::remove_dir_all(folder).expect("it can be removed");
    }

    #[test]
    fn a_failure_is_a_record_too_and_a_failed_run_waits_for_none() {
        let folder = folder("failure");
        write(&folder, 1, &Err("the disk is full".into())).expect("it can be written");
        let reason = Err("rank 1 could not write its shard: the disk is full".into());
        assert_eq!(take(&folder, 1, Duration::ZERO, || true), Ok(reason));
        let hour = Duration::from_secs(3600);
        assert_eq!(take(&folder, 2, hour, || false), Err("the run has failed".into()));
        fs::remove_dir_all(folder).expect("it can be removed");
    }
}
