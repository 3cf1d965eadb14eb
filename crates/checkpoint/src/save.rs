//! Saves checkpoints while training continues: ranks copy their state and continue, and one thread of every process writes
//! the copies of its ranks.
//!
//! There is one copy buffer per rank. If a rank reaches the next checkpoint before all copies are written, it waits. So a
//! save may be late but is never skipped, and memory is bounded. The ranks of a process wait here rather than in a
//! collective, where a slow disk would cause a timeout.
//!
//! If the ranks are in several processes, each process writes the shards of its ranks into the same temporary folder, and sends
//! the first process a record of each shard, or why it could not be written ([`ShardRecords`]). The first process publishes the
//! checkpoint when it has all records and sees all shards. So a checkpoint is complete or absent.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use kintsugi_plan::Plan;
use kintsugi_rank::Rank;
use kintsugi_spec::Cause;
use rayon::prelude::*;

use crate::files::SyncedFile;
use crate::manifest::{FileRecord, MANIFEST, Manifest};
use crate::shard::Shard;
use crate::shard_record::{SHARED_FOLDER_DELAY, ShardRecord, ShardRecords};
use crate::{CheckpointError, CheckpointFolder, RunProgress};

/// A completed checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointInfo {
    /// Its step.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its shards.
    pub bytes: u64,
    /// Seconds from the first copy to the last fsync.
    pub seconds: f64,
    /// Seconds that training paused for it, on the slowest rank of the process that published it.
    pub blocked: f64,
    /// Why an old checkpoint could not be removed, if it could not.
    pub left: Option<CheckpointError>,
}

/// A checkpoint that could not be written. Earlier checkpoints are unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the checkpoint of step {step} was not written: {cause}")]
pub struct SaveFailure {
    /// Its step.
    pub step: u64,
    /// What went wrong.
    #[source]
    pub cause: Cause,
}

/// The thread that writes checkpoints has ended before the ranks' last save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the thread that writes checkpoints has ended")]
pub struct WriterEnded;

/// The ranks' side: copies their state.
pub struct CheckpointSaver {
    shards: Arc<Shards>,
    copies: Arc<CopyPool>,
    messages: Sender<WriterMessage>,
}

/// The writer's side: writes the copies to the disk, on its own thread.
pub struct CheckpointWriter {
    plan: Plan,
    folder: CheckpointFolder,
    shards: Arc<Shards>,
    copies: Arc<CopyPool>,
    messages: Receiver<WriterMessage>,
}

/// The shards of a checkpoint, and who writes them.
struct Shards {
    /// The ranks of this process.
    local: Range<usize>,
    /// The shards of all ranks in the first process, which writes the manifest. Elsewhere those of the local ranks.
    known: Vec<Shard>,
    /// Ranks of all processes.
    ranks: usize,
}

impl Shards {
    fn new(plan: &Plan, local: Range<usize>) -> Self {
        let (ranks, stored) = (plan.mesh.ranks(), plan.stored_tensors());
        let known = if local.start == 0 { 0..ranks } else { local.clone() };
        let known = known.map(|rank| Shard::new(plan, rank, &stored)).collect();
        Shards { local, known, ranks }
    }

    /// The shard of a rank of this process.
    fn local(&self, rank: usize) -> &Shard {
        &self.known[rank - self.local.start]
    }

    /// Whether this process writes the manifest.
    fn publishes(&self) -> bool {
        self.local.start == 0
    }

    /// Whether other processes write shards, too.
    fn are_shared(&self) -> bool {
        self.local.len() < self.ranks
    }

    /// The ranks of other processes.
    fn elsewhere(&self) -> impl Iterator<Item = usize> {
        (0..self.local.start).chain(self.local.end..self.ranks)
    }
}

/// A message from a rank to the writer.
enum WriterMessage {
    /// One rank's copy at one step.
    Copy(Box<RankCopy>),
    /// The step after the last checkpoint succeeded, so the checkpoint's weights are good.
    LastIsGood,
}

/// One rank's copy at one step.
struct RankCopy {
    rank: usize,
    bytes: Vec<u8>,
    progress: RunProgress,
    /// Seconds that the rank paused.
    blocked: f64,
    /// Whether the run ends with this checkpoint.
    last: bool,
}

/// Makes the saver and the writer for the ranks `local` of a run of `plan`, with checkpoints in `folder`.
pub fn saver(
    plan: &Plan,
    local: Range<usize>,
    folder: CheckpointFolder,
) -> (CheckpointSaver, CheckpointWriter) {
    let shards = Shards::new(plan, local.clone());
    let copies = local.map(|rank| Some(vec![0; shards.local(rank).bytes])).collect();
    let copies = Arc::new(CopyPool {
        state: Mutex::new(CopyPoolState { free: copies, taken: 0, unwritten: 0, ended: false }),
        given: Condvar::new(),
    });
    let (sender, messages) = channel();
    let shards = Arc::new(shards);
    let saver =
        CheckpointSaver { shards: Arc::clone(&shards), copies: Arc::clone(&copies), messages: sender };
    (saver, CheckpointWriter { plan: plan.clone(), folder, shards, copies, messages })
}

impl CheckpointSaver {
    /// Copies a rank's state. Every rank calls this after the same step. Returns the seconds that it took, including the wait
    /// for the previous copy to be written.
    pub fn save(
        &self,
        number: usize,
        rank: &Rank,
        progress: RunProgress,
        last: bool,
    ) -> Result<f64, WriterEnded> {
        let begun = Instant::now();
        let mut bytes = self.copies.take(number - self.shards.local.start)?;
        self.shards.local(number).copy(rank, &mut bytes);
        let blocked = begun.elapsed().as_secs_f64();
        let filled = RankCopy { rank: number, bytes, progress, blocked, last };
        self.messages.send(WriterMessage::Copy(Box::new(filled))).map_err(|_| WriterEnded)?;
        Ok(blocked)
    }

    /// Reports that a step after the last checkpoint succeeded. One rank calls this. Until then the writer keeps one checkpoint
    /// more than `run.keep`, unless the run ends, because the last update before the checkpoint may have made the weights
    /// diverge.
    pub fn confirm(&self) -> Result<(), WriterEnded> {
        self.messages.send(WriterMessage::LastIsGood).map_err(|_| WriterEnded)
    }
}

impl CheckpointWriter {
    /// Writes checkpoints until the saver is dropped. Calls `report` for each, in the process that publishes them. Before
    /// that process renames the folder of a checkpoint, it calls `may_publish`, which may wait for other data to reach the disk.
    /// If that returns `false`, the checkpoint is abandoned. Shards of other processes are known by `records`.
    pub fn run(
        self,
        may_publish: impl Fn(u64) -> bool,
        records: &ShardRecords,
        mut report: impl FnMut(Result<CheckpointInfo, SaveFailure>),
    ) {
        let _ended = WakeOnExit(&self.copies);
        self.copies.touch();
        let mut open: BTreeMap<u64, CheckpointInProgress> = BTreeMap::new();
        let mut published = None;
        for message in &self.messages {
            let WriterMessage::Copy(copy) = message else {
                self.prune(published.take());
                continue;
            };
            let RankCopy { rank, bytes, progress, blocked, last } = *copy;
            let step = progress.step;
            let shared = self.shards.are_shared();
            let unfinished =
                open.entry(step).or_insert_with(|| CheckpointInProgress::begin(&self.folder, step, shared));
            unfinished.blocked = unfinished.blocked.max(blocked);
            unfinished.add(self.shards.local(rank), rank, &bytes);
            self.copies.written(rank - self.shards.local.start, bytes);
            if unfinished.files.len() < self.shards.local.len() {
                continue;
            }
            if !self.shards.publishes() {
                if let Some(unfinished) = open.remove(&step) {
                    unfinished.send_records(records);
                }
                continue;
            }
            unfinished.add_records(&self, records);
            if may_publish(step)
                && let Some(unfinished) = open.remove(&step)
            {
                let saved = unfinished.finish(&self, &progress);
                if saved.is_ok() {
                    published = Some(progress);
                }
                report(saved);
                if last {
                    self.prune(published.take());
                }
            }
        }
        // The run failed before all ranks saved, or the caller no longer receives events.
        open.values_mut().for_each(CheckpointInProgress::abandon);
    }

    /// Removes all but the `run.keep` newest and the `run.keep_best` best checkpoints, if one was published since the last
    /// call. If one cannot be removed, the next checkpoint tries again and reports the failure.
    fn prune(&self, published: Option<RunProgress>) {
        if let Some(published) = published {
            self.folder.prune(self.plan.run.keep, self.plan.run.keep_best, &published).ok();
        }
    }
}

/// Why the shard of another process is not here.
#[derive(Debug, thiserror::Error)]
enum ShardFailure {
    #[error("rank {rank} could not write its shard: {cause}")]
    Unwritten {
        rank: usize,
        #[source]
        cause: Cause,
    },
    #[error("{} was written by another process, and is not here; do all processes see the same run.out?", .0.display())]
    Absent(PathBuf),
}

/// A checkpoint that is being written.
struct CheckpointInProgress {
    step: u64,
    begun: Instant,
    blocked: f64,
    /// The temporary folder, if it could be created.
    folder: Option<PathBuf>,
    /// By rank. The records are empty after a failure.
    files: BTreeMap<usize, FileRecord>,
    failure: Option<Cause>,
}

impl CheckpointInProgress {
    /// Begins a checkpoint. If it is `shared`, other processes write a part of it.
    fn begin(folder: &CheckpointFolder, step: u64, shared: bool) -> Self {
        let begun = if shared { folder.join(step) } else { folder.begin(step) };
        let (folder, failure) = match begun {
            Ok(path) => (Some(path), None),
            Err(error) => (None, Some(Cause::new(error))),
        };
        CheckpointInProgress {
            step,
            begun: Instant::now(),
            blocked: 0.0,
            folder,
            files: BTreeMap::new(),
            failure,
        }
    }

    /// Writes one rank's shard, unless there was a failure.
    fn add(&mut self, shard: &Shard, rank: usize, bytes: &[u8]) {
        let mut record = FileRecord { name: shard.name.clone(), bytes: 0, checksum: String::new() };
        if let (Some(folder), None) = (&self.folder, &self.failure) {
            match write_shard(folder, shard, bytes) {
                Ok((bytes, checksum)) => record = FileRecord { bytes, checksum, ..record },
                Err(cause) => self.failure = Some(cause),
            }
        }
        self.files.insert(rank, record);
    }

    /// Sends the records of this process's shards, or of its failure, to the process that publishes the checkpoint.
    fn send_records(self, records: &ShardRecords) {
        for (rank, file) in self.files {
            let written = self.failure.as_ref().map_or(Ok(file), |cause| Err(cause.clone()));
            records.send(&ShardRecord { step: self.step, rank, written });
        }
    }

    /// Waits for the records of the other processes' shards.
    fn add_records(&mut self, writer: &CheckpointWriter, records: &ShardRecords) {
        for rank in writer.shards.elsewhere() {
            // Even after a failure: the folder is removed when nobody writes to it any more.
            let record = match records.receive(self.step, rank) {
                Ok(record) => record,
                Err(reason) => {
                    self.failure.get_or_insert_with(|| Cause::new(reason));
                    return;
                }
            };
            let unwritten = |cause| ShardFailure::Unwritten { rank, cause };
            let present =
                record.written.map_err(unwritten).and_then(|file| self.check_presence(&file).map(|()| file));
            match present {
                Ok(file) => drop(self.files.insert(rank, file)),
                Err(reason) => {
                    self.failure.get_or_insert_with(|| Cause::new(reason));
                }
            }
        }
    }

    /// Checks that this process sees the shard of another one. A network file system may show it late.
    fn check_presence(&self, file: &FileRecord) -> Result<(), ShardFailure> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let (path, begun) = (folder.join(&file.name), Instant::now());
        loop {
            let is_here = fs::metadata(&path).is_ok_and(|found| found.len() == file.bytes);
            if is_here || self.failure.is_some() {
                return Ok(());
            }
            if begun.elapsed() > SHARED_FOLDER_DELAY {
                return Err(ShardFailure::Absent(path));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Writes the manifest and renames the folder, after all ranks' shards are written.
    fn finish(
        mut self,
        writer: &CheckpointWriter,
        progress: &RunProgress,
    ) -> Result<CheckpointInfo, SaveFailure> {
        let files: Vec<FileRecord> = std::mem::take(&mut self.files).into_values().collect();
        let bytes = files.iter().map(|file| file.bytes).sum();
        let result = match (self.failure.take(), &self.folder) {
            (None, Some(folder)) => {
                let stored = writer.plan.stored_tensors();
                let manifest = Manifest::new(&writer.plan, &writer.shards.known, files, &stored, progress);
                write_file(&folder.join(MANIFEST), &[&manifest.encode()])
                    .and_then(|_| writer.folder.finish(self.step))
                    .map_err(Cause::new)
            }
            (failure, _) => Err(failure.unwrap_or_else(|| Cause::new("its folder is gone"))),
        };
        let path = result.map_err(|cause| {
            self.abandon();
            SaveFailure { step: self.step, cause }
        })?;
        let run = &writer.plan.run;
        let left = writer.folder.prune(run.keep + 1, run.keep_best, progress).err();
        let (seconds, blocked) = (self.begun.elapsed().as_secs_f64(), self.blocked);
        Ok(CheckpointInfo { step: self.step, path, bytes, seconds, blocked, left })
    }

    /// Removes the folder to free disk space. If that fails, the next run removes it.
    fn abandon(&mut self) {
        if let Some(folder) = self.folder.take() {
            std::fs::remove_dir_all(folder).ok();
        }
    }
}

/// Writes one rank's shard. Fails if a weight is not finite, since no run can resume from it.
fn write_shard(folder: &Path, shard: &Shard, bytes: &[u8]) -> Result<(u64, String), Cause> {
    if let Some(tensor) = shard.not_finite(bytes) {
        let reason = format!("{tensor} in {} has numbers that are not finite", shard.name);
        return Err(Cause::new(reason));
    }
    write_file(&folder.join(&shard.name), &[&shard.header, bytes]).map_err(Cause::new)
}

fn write_file(path: &Path, parts: &[&[u8]]) -> io::Result<(u64, String)> {
    let mut file = SyncedFile::create(path)?;
    parts.iter().try_for_each(|part| file.write(part))?;
    file.finish()
}

/// The smallest page size of any system.
const PAGE_BYTES: usize = 4096;

/// Bytes whose pages one thread touches at a time.
const TOUCHED_BYTES: usize = 4 << 20;

/// The copy buffers of the ranks that are not in use.
struct CopyPool {
    state: Mutex<CopyPoolState>,
    given: Condvar,
}

struct CopyPoolState {
    free: Vec<Option<Vec<u8>>>,
    /// Ranks that have taken their buffer for the current checkpoint, or 0 if all have.
    taken: usize,
    /// Buffers that ranks have taken and that the writer has not written yet.
    unwritten: usize,
    /// Whether the writer has ended.
    ended: bool,
}

impl CopyPool {
    fn take(&self, rank: usize) -> Result<Vec<u8>, WriterEnded> {
        let mut state = self.lock();
        loop {
            let begun = state.taken > 0 || state.unwritten == 0;
            if begun && let Some(copy) = state.free[rank].take() {
                state.taken = (state.taken + 1) % state.free.len();
                state.unwritten += 1;
                self.given.notify_all();
                return Ok(copy);
            }
            if state.ended {
                return Err(WriterEnded);
            }
            state = self.given.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Touches every page of the free buffers, on all threads. The system allocates memory at the first write, which takes as
    /// long as the copy itself, so without this the first save would pause the ranks twice as long as the others.
    fn touch(&self) {
        let ranks = self.lock().free.len();
        for rank in 0..ranks {
            let taken = self.lock().free[rank].take();
            if let Some(mut copy) = taken {
                let pages = copy.par_chunks_mut(TOUCHED_BYTES);
                pages.for_each(|run| run.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 0));
                self.give_back(rank, copy);
            }
        }
    }

    /// Returns the buffer of a rank's copy that is written, or never will be.
    fn written(&self, rank: usize, copy: Vec<u8>) {
        self.lock().unwritten -= 1;
        self.give_back(rank, copy);
    }

    fn give_back(&self, rank: usize, copy: Vec<u8>) {
        self.lock().free[rank] = Some(copy);
        self.given.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, CopyPoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes the ranks that wait for the writer when it ends, even by a panic.
struct WakeOnExit<'a>(&'a CopyPool);

impl Drop for WakeOnExit<'_> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.given.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::RecvTimeoutError;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_rank_begins_a_checkpoint_before_all_copies_of_the_last_are_written() {
        let state =
            CopyPoolState { free: vec![Some(vec![0]), Some(vec![1])], taken: 0, unwritten: 0, ended: false };
        let copies = CopyPool { state: Mutex::new(state), given: Condvar::new() };
        let [first, second] = [0, 1].map(|rank| copies.take(rank).unwrap());
        copies.written(0, first);
        thread::scope(|scope| {
            let (taken, came) = channel();
            let copies = &copies;
            scope.spawn(move || taken.send(copies.take(0).unwrap()));
            let early = came.recv_timeout(Duration::from_millis(50));
            assert_eq!(early, Err(RecvTimeoutError::Timeout), "the other's copy is not on the disk");
            copies.written(1, second);
            assert_eq!(came.recv(), Ok(vec![0]));
        });
        assert_eq!(copies.take(1).unwrap(), [1]);
    }
}
