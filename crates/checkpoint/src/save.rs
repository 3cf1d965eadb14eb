//! Saving while training goes on: ranks copy what they have and run on, one thread writes the copies.
//!
//! There is one copy per rank. Ranks that come with the next checkpoint before all copies have been written wait for
//! them, so a save is late but never left out, and memory is bounded. All wait here, and none for another in a collective,
//! which would take the job down if the disk is slow enough.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use kintsugi_plan::Plan;
use kintsugi_rank::{Kept, Rank};
use kintsugi_spec::Cause;
use rayon::prelude::*;

use crate::files::Durable;
use crate::manifest::{FileRecord, MANIFEST};
use crate::shard::Shard;
use crate::write::manifest;
use crate::{CheckpointError, Folder, Progress};

/// A checkpoint that is whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// Its step.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its shards.
    pub bytes: u64,
    /// Seconds from the first copy to the last sync.
    pub seconds: f64,
    /// Seconds that training stood still for it: those of the rank that waited and copied longest.
    pub blocked: f64,
    /// Why an old checkpoint could not be removed, if so.
    pub left: Option<CheckpointError>,
}

/// A checkpoint that could not be written; the ones before it are as they were.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the checkpoint of step {step} was not written: {cause}")]
pub struct SaveFailure {
    /// Its step.
    pub step: u64,
    /// What went wrong.
    #[source]
    pub cause: Cause,
}

/// The thread that writes checkpoints has ended while ranks had something to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the thread that writes checkpoints has ended")]
pub struct WriterEnded;

/// The ranks' end: takes copies.
pub struct Saver {
    shards: Arc<Vec<Shard>>,
    copies: Arc<Copies>,
    messages: Sender<Message>,
}

/// The disk's end: writes them, on a thread of its own.
pub struct Writer {
    plan: Plan,
    folder: Folder,
    shards: Arc<Vec<Shard>>,
    copies: Arc<Copies>,
    messages: Receiver<Message>,
}

/// What ranks send to the writer.
enum Message {
    /// One rank's copy at one step.
    Copy(Filled),
    /// The step after the last checkpoint was good, so its weights are sound.
    Sound,
}

/// One rank's copy at one step.
struct Filled {
    rank: usize,
    bytes: Vec<u8>,
    progress: Progress,
    /// Seconds that the rank stood still.
    blocked: f64,
    /// Whether the run ends with this checkpoint.
    last: bool,
}

/// Makes both ends for a run of `plan` whose checkpoints lie in `folder`.
pub fn saver(plan: &Plan, folder: Folder) -> (Saver, Writer) {
    let shards: Vec<Shard> = (0..plan.mesh.ranks()).map(|rank| Shard::new(plan, rank, &Kept::ALL)).collect();
    let copies = shards.iter().map(|shard| Some(vec![0; shard.bytes])).collect();
    let copies = Arc::new(Copies {
        state: Mutex::new(State { free: copies, taken: 0, unwritten: 0, ended: false }),
        given: Condvar::new(),
    });
    let (sender, messages) = channel();
    let shards = Arc::new(shards);
    let saver = Saver { shards: Arc::clone(&shards), copies: Arc::clone(&copies), messages: sender };
    (saver, Writer { plan: plan.clone(), folder, shards, copies, messages })
}

impl Saver {
    /// Copies what a rank has; every rank calls it after the same step. Gives the seconds that it took, waiting for the
    /// copy before to be written included.
    pub fn save(
        &self,
        number: usize,
        rank: &Rank,
        progress: Progress,
        last: bool,
    ) -> Result<f64, WriterEnded> {
        let begun = Instant::now();
        let mut bytes = self.copies.take(number)?;
        self.shards[number].copy(rank, &mut bytes);
        let blocked = begun.elapsed().as_secs_f64();
        let filled = Filled { rank: number, bytes, progress, blocked, last };
        self.messages.send(Message::Copy(filled)).map_err(|_| WriterEnded)?;
        Ok(blocked)
    }

    /// Says that a step after the last checkpoint was good. One rank calls it. Until then one checkpoint more than
    /// `run.keep` stays, unless the run ends: the update before the last checkpoint may have made the weights diverge.
    pub fn confirm(&self) -> Result<(), WriterEnded> {
        self.messages.send(Message::Sound).map_err(|_| WriterEnded)
    }
}

impl Writer {
    /// Writes until the ranks' end is dropped; `report` hears of every checkpoint. Before the checkpoint of a step gets
    /// its name, `may_name` may wait for what has to be on the disk by then; if that will not come, it gets none.
    pub fn run(self, may_name: impl Fn(u64) -> bool, mut report: impl FnMut(Result<Saved, SaveFailure>)) {
        let _ended = Ended(&self.copies);
        self.copies.touch();
        let mut open: BTreeMap<u64, Unfinished> = BTreeMap::new();
        let mut published = None;
        for message in &self.messages {
            let Message::Copy(Filled { rank, bytes, progress, blocked, last }) = message else {
                self.prune(published.take());
                continue;
            };
            let step = progress.step;
            let unfinished = open.entry(step).or_insert_with(|| Unfinished::begin(&self.folder, step));
            unfinished.blocked = unfinished.blocked.max(blocked);
            unfinished.add(&self.shards[rank], rank, &bytes);
            self.copies.written(rank, bytes);
            if unfinished.files.len() == self.shards.len()
                && may_name(step)
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
        // The run failed before all ranks came, or nobody hears of it any more.
        open.values_mut().for_each(Unfinished::abandon);
    }

    /// Removes all but the `run.keep` newest checkpoints, if one was published since the last time. What cannot be removed
    /// is tried again with the next checkpoint, and reported then.
    fn prune(&self, published: Option<Progress>) {
        if let Some(published) = published {
            self.folder.prune(self.plan.run.keep, &published).ok();
        }
    }
}

/// A checkpoint of which some shards are written.
struct Unfinished {
    step: u64,
    begun: Instant,
    blocked: f64,
    /// Where it is written, if that folder could be made.
    folder: Option<PathBuf>,
    /// By rank; empty records once something has gone wrong.
    files: BTreeMap<usize, FileRecord>,
    failure: Option<Cause>,
}

impl Unfinished {
    fn begin(folder: &Folder, step: u64) -> Self {
        let (folder, failure) = match folder.begin(step) {
            Ok(path) => (Some(path), None),
            Err(error) => (None, Some(Cause::new(error))),
        };
        Unfinished { step, begun: Instant::now(), blocked: 0.0, folder, files: BTreeMap::new(), failure }
    }

    /// Writes one rank's shard, unless something has gone wrong already.
    fn add(&mut self, shard: &Shard, rank: usize, bytes: &[u8]) {
        let mut record = FileRecord { name: shard.name.clone(), bytes: 0, checksum: String::new() };
        if let Some(folder) = &self.folder {
            match write_shard(folder, shard, bytes) {
                Ok((bytes, checksum)) => record = FileRecord { bytes, checksum, ..record },
                Err(cause) => {
                    self.failure = Some(cause);
                    self.abandon();
                }
            }
        }
        self.files.insert(rank, record);
    }

    /// Writes the manifest and gives the checkpoint its name, all ranks' shards being there.
    fn finish(mut self, writer: &Writer, progress: &Progress) -> Result<Saved, SaveFailure> {
        let files: Vec<FileRecord> = std::mem::take(&mut self.files).into_values().collect();
        let bytes = files.iter().map(|file| file.bytes).sum();
        let result = match (self.failure.take(), &self.folder) {
            (None, Some(folder)) => {
                let manifest = manifest(&writer.plan, &writer.shards, files, &Kept::ALL, progress);
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
        let left = writer.folder.prune(writer.plan.run.keep + 1, progress).err();
        let (seconds, blocked) = (self.begun.elapsed().as_secs_f64(), self.blocked);
        Ok(Saved { step: self.step, path, bytes, seconds, blocked, left })
    }

    /// Gives the room on the disk back: others may need it. What cannot be removed now goes when the next run begins.
    fn abandon(&mut self) {
        if let Some(folder) = self.folder.take() {
            std::fs::remove_dir_all(folder).ok();
        }
    }
}

/// Writes one rank's shard, or says why not. Numbers that are not finite are never written: a run cannot go on from them.
fn write_shard(folder: &Path, shard: &Shard, bytes: &[u8]) -> Result<(u64, String), Cause> {
    if let Some(tensor) = shard.not_finite(bytes) {
        let reason = format!("{tensor} in {} has numbers that are not finite", shard.name);
        return Err(Cause::new(reason));
    }
    write_file(&folder.join(&shard.name), &[&shard.header, bytes]).map_err(Cause::new)
}

fn write_file(path: &Path, parts: &[&[u8]]) -> io::Result<(u64, String)> {
    let mut file = Durable::create(path)?;
    parts.iter().try_for_each(|part| file.write(part))?;
    file.finish()
}

/// No system has smaller pages.
const PAGE: usize = 4096;

/// Bytes whose pages one thread asks for at a time.
const RUN: usize = 4 << 20;

/// The ranks' copies, while nobody fills or writes them.
struct Copies {
    state: Mutex<State>,
    given: Condvar,
}

struct State {
    free: Vec<Option<Vec<u8>>>,
    /// Ranks that have taken theirs for a checkpoint for which others have not.
    taken: usize,
    /// Copies that ranks have taken and the writer has not written.
    unwritten: usize,
    /// Whether the writer is gone.
    ended: bool,
}

impl Copies {
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

    /// Writes to every page that no rank has taken yet, on all threads. The system gives memory when it is first written,
    /// which takes as long as copying it; so the first save would keep the ranks waiting for twice the time of the others.
    fn touch(&self) {
        let ranks = self.lock().free.len();
        for rank in 0..ranks {
            let taken = self.lock().free[rank].take();
            if let Some(mut copy) = taken {
                let pages = copy.par_chunks_mut(RUN);
                pages.for_each(|run| run.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0));
                self.give_back(rank, copy);
            }
        }
    }

    /// A rank's copy is on the disk, or will never be.
    fn written(&self, rank: usize, copy: Vec<u8>) {
        self.lock().unwritten -= 1;
        self.give_back(rank, copy);
    }

    fn give_back(&self, rank: usize, copy: Vec<u8>) {
        self.lock().free[rank] = Some(copy);
        self.given.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes the ranks that wait for a writer, however it ends.
struct Ended<'a>(&'a Copies);

impl Drop for Ended<'_> {
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
        let state = State { free: vec![Some(vec![0]), Some(vec![1])], taken: 0, unwritten: 0, ended: false };
        let copies = Copies { state: Mutex::new(state), given: Condvar::new() };
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
