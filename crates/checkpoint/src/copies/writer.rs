//! Writes the copies of a rank.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;

use kintsugi_plan::{COPY_SETS, Plan};
use kintsugi_rank::CopyKeeper;
use xxhash_rust::xxh3::Xxh3;

use super::files::{Origin, open_private, record_of, remove_record};
use super::{CopyFolder, CopyRecord};
use crate::{CheckpointError, RunProgress, files};

/// Writes the copies of the states of a rank, and those that it receives.
pub struct CopyWriter {
    folder: CopyFolder,
    /// Steps between two sets.
    every: u64,
    rank: usize,
    received_rank: usize,
    /// While a set is written.
    open: Option<[UnfinishedCopy; 2]>,
    failure: Option<CheckpointError>,
}

/// A copy that is being written.
struct UnfinishedCopy {
    rank: usize,
    path: PathBuf,
    file: File,
    hash: Xxh3,
    bytes: u64,
}

impl UnfinishedCopy {
    fn begin(path: PathBuf, rank: usize) -> Result<Self, CheckpointError> {
        let opened = remove_record(&path).and_then(|()| open_private(&path));
        let file = opened.map_err(|error| CheckpointError::new(&path, error))?;
        Ok(UnfinishedCopy { rank, path, file, hash: Xxh3::new(), bytes: 0 })
    }

    /// Writes the record, so that the copy counts.
    fn finish(self, folder: &CopyFolder, progress: &RunProgress) -> Result<(), CheckpointError> {
        let record = CopyRecord::new(folder, self.rank, self.bytes, files::name(&self.hash), progress);
        let text = serde_json::to_vec(&record).expect("a record has string keys");
        let (path, partial) = (record_of(&self.path), self.path.with_extension("partial"));
        let written = open_private(&partial).and_then(|mut file| file.write_all(&text));
        written.and_then(|()| fs::rename(&partial, &path)).map_err(|error| CheckpointError::new(&path, error))
    }
}

impl Write for UnfinishedCopy {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl CopyWriter {
    /// The writer of a rank of `plan`. The memory is reserved.
    pub fn new(folder: CopyFolder, plan: &Plan, rank: usize) -> Self {
        let (every, received_rank) = (plan.run.replicate_every, plan.rank_before(rank, 1));
        CopyWriter { folder, every, rank, received_rank, open: None, failure: None }
    }

    /// Begins the set of a step.
    pub fn begin(&mut self, step: u64) -> Result<(), CheckpointError> {
        let begin =
            |origin, rank| UnfinishedCopy::begin(self.folder.file(origin, rank, self.slot(step)), rank);
        self.open = Some([begin(Origin::Own, self.rank)?, begin(Origin::Received, self.received_rank)?]);
        Ok(())
    }

    /// Ends the set.
    pub fn finish(&mut self, progress: &RunProgress) -> Result<(), CheckpointError> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        for copy in self.open.take().into_iter().flatten() {
            copy.finish(&self.folder, progress)?;
        }
        // The slowest rank may still have the set before the last one.
        self.folder.remove_older(progress.step.saturating_sub(COPY_SETS as u64 * self.every));
        Ok(())
    }

    /// Writes the copy of this rank's own states of an earlier set again, which came from another node.
    pub fn write_again(
        &mut self,
        progress: &RunProgress,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), CheckpointError> {
        let path = self.folder.file(Origin::Own, self.rank, self.slot(progress.step));
        let mut copy = UnfinishedCopy::begin(path, self.rank)?;
        write(&mut copy).map_err(|error| CheckpointError::new(&copy.path, error))?;
        copy.finish(&self.folder, progress)
    }

    /// Bytes of the files that this rank writes.
    pub fn reserved_bytes(&self) -> u64 {
        let files = [(Origin::Own, self.rank), (Origin::Received, self.received_rank)].into_iter();
        let paths = files
            .flat_map(|(origin, rank)| (0..COPY_SETS).map(move |slot| self.folder.file(origin, rank, slot)));
        paths.filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum()
    }

    fn slot(&self, step: u64) -> usize {
        (step / self.every) as usize % COPY_SETS
    }

    fn keep(&mut self, index: usize, bytes: &[u8]) {
        let Some(copies) = &mut self.open else { return };
        if let (Err(error), None) = (copies[index].write_all(bytes), &self.failure) {
            self.failure = Some(CheckpointError::new(&copies[index].path, error));
        }
    }
}

impl CopyKeeper for CopyWriter {
    fn keep_own(&mut self, bytes: &[u8]) {
        self.keep(0, bytes);
    }

    fn keep_received(&mut self, bytes: &[u8]) {
        self.keep(1, bytes);
    }
}
