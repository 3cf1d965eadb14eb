//! The files of copies on a node.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use kintsugi_plan::{COPY_SETS, Plan, Resume};
use kintsugi_spec::input;
use rustix::fs::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};

use crate::files::{checksum, measure};
use crate::{CheckpointError, RunProgress};

/// Whose states a rank has copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Its own.
    Own,
    /// Those of the rank at the same place of the previous node.
    Received,
}

impl Origin {
    const ALL: [Origin; 2] = [Origin::Own, Origin::Received];

    fn folder(self) -> &'static str {
        match self {
            Origin::Own => "own",
            Origin::Received => "received",
        }
    }
}

/// The copies in the memory of this node.
#[derive(Clone, Debug)]
pub struct CopyFolder {
    path: PathBuf,
    /// The layout of the states: copies of another one are of no use.
    layout: String,
}

/// What a file has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopyRecord {
    /// The checksum of the configuration.
    layout: String,
    /// The rank whose states they are.
    pub rank: usize,
    /// The length of the file.
    pub bytes: u64,
    checksum: String,
    /// The progress of the run.
    pub progress: RunProgress,
}

impl CopyRecord {
    pub(super) fn new(
        folder: &CopyFolder,
        rank: usize,
        bytes: u64,
        checksum: String,
        progress: &RunProgress,
    ) -> Self {
        CopyRecord { layout: folder.layout.clone(), rank, bytes, checksum, progress: progress.clone() }
    }
}

impl CopyFolder {
    /// The copies of a run of `plan` in the folder of a node, which is in memory.
    pub fn new(node: &Path, plan: &Plan) -> Self {
        let mut plan = plan.clone();
        // A later attempt resumes.
        plan.run.resume = Resume::No;
        CopyFolder { path: node.join("copies"), layout: checksum(plan.to_toml().as_bytes()) }
    }

    /// Where the copies are.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the memory for all copies that a rank writes. Copies that are there stay.
    pub fn reserve(&self, plan: &Plan, rank: usize) -> Result<(), CheckpointError> {
        for origin in Origin::ALL {
            let folder = self.path.join(origin.folder());
            let made = DirBuilder::new().mode(0o700).recursive(true).create(&folder);
            made.map_err(|error| CheckpointError::new(&folder, error))?;
        }
        for (origin, of) in [(Origin::Own, rank), (Origin::Received, plan.rank_before(rank, 1))] {
            let bytes = plan.copied_bytes(plan.mesh.coordinate(of).pp()) as u64;
            for slot in 0..COPY_SETS {
                let path = self.file(origin, of, slot);
                reserve(&path, bytes).map_err(|error| CheckpointError::new(&path, error))?;
            }
        }
        Ok(())
    }

    /// The copies of the states of some ranks that are whole, before any rank of this node writes one. Removes what was left unfinished,
    /// damaged copies, and those of another layout.
    pub fn whole(&self, of: impl Fn(usize) -> bool) -> Vec<CopyRecord> {
        let mut whole = Vec::new();
        for path in self.paths() {
            let record = read_record(&path).filter(|record| record.layout == self.layout);
            match record {
                Some(record) if !of(record.rank) => {}
                Some(record) if measure(&path).ok() == Some((record.bytes, record.checksum.clone())) => {
                    whole.push(record);
                }
                _ => remove(&path),
            }
        }
        whole
    }

    /// Opens the copy of the states of a rank in a set.
    pub fn open(&self, rank: usize, progress: &RunProgress) -> Result<File, CheckpointError> {
        let step = progress.step;
        let is_it = |record: CopyRecord| record.rank == rank && record.progress == *progress;
        let found = self.paths().find(|path| read_record(path).is_some_and(is_it));
        let missing = || format!("there is no copy of the states of rank {rank} after step {step}");
        let path = found.ok_or_else(|| CheckpointError::new(&self.path, missing()))?;
        File::open(&path).map_err(|error| CheckpointError::new(&path, error))
    }

    /// Removes the copies of before a step: of ranks that were on this node in an earlier attempt.
    pub(super) fn remove_older(&self, step: u64) {
        let is_older = |path: &PathBuf| read_record(path).is_some_and(|record| record.progress.step < step);
        self.paths().filter(is_older).for_each(|path| remove(&path));
    }

    pub(super) fn file(&self, origin: Origin, rank: usize, slot: usize) -> PathBuf {
        self.path.join(origin.folder()).join(format!("rank-{rank:05}-{slot}"))
    }

    /// All files of copies.
    fn paths(&self) -> impl Iterator<Item = PathBuf> + use<> {
        let folders = Origin::ALL.map(|origin| self.path.join(origin.folder()));
        let entries =
            folders.into_iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_none())
    }
}

fn read_record(path: &Path) -> Option<CopyRecord> {
    let text = input::bytes(&record_of(path), input::MAX_WRITTEN_BY_PROGRAMS).ok()?;
    serde_json::from_slice(&text).ok()
}

/// The record of a file.
pub(super) fn record_of(path: &Path) -> PathBuf {
    path.with_extension("json")
}

/// Opens a file for writing, which only this user can read.
pub(super) fn open_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn reserve(path: &Path, bytes: u64) -> io::Result<()> {
    let file = open_private(path)?;
    if file.metadata()?.len() != bytes {
        file.set_len(bytes)?;
        remove_record(path)?;
    }
    Ok(fallocate(&file, FallocateFlags::empty(), 0, bytes)?)
}

/// Removes the record of a file, which no longer has what it says.
pub(super) fn remove_record(path: &Path) -> io::Result<()> {
    match fs::remove_file(record_of(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes a file and its record. Another process of the node may do so, too.
fn remove(path: &Path) {
    remove_record(path).ok();
    fs::remove_file(path).ok();
}
