//! The folder of a run's checkpoints: their names, the temporary folders of those that are written, and which old ones are removed.
//! Each checkpoint is a folder in it, named after its step.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kintsugi_spec::output::{parent, publish_folder, sync_folder};

use crate::find::best_first;
use crate::{Checkpoint, CheckpointError, Manifest, RunLock, RunProgress};

/// A run's checkpoints, in `<out>/checkpoints`.
#[derive(Clone, Debug)]
pub struct CheckpointFolder {
    path: PathBuf,
}

const NAME: &str = "checkpoints";
const STEP: &str = "step-";
/// Suffix of a folder that is incomplete or being removed.
pub(crate) const PARTIAL: &str = ".partial";
/// Prefix of such a folder among the checkpoints of a run, to distinguish it from folders of other programs.
const OWN: &str = "kintsugi-";

impl CheckpointFolder {
    /// The checkpoints of the run in `out`.
    pub fn of_run(out: &Path) -> Self {
        CheckpointFolder { path: out.join(NAME) }
    }

    /// The checkpoints in the folder of a run, or in a folder of checkpoints.
    pub(crate) fn inside(path: &Path) -> Self {
        let run = CheckpointFolder::of_run(path);
        if run.path.is_dir() { run } else { CheckpointFolder { path: path.to_owned() } }
    }

    /// The folder that contains a checkpoint.
    pub fn around(checkpoint: &Checkpoint) -> Self {
        CheckpointFolder { path: parent(checkpoint.path()).to_owned() }
    }

    /// Creates the folder and locks it, since the `checkpoints` of two runs may be links to the same folder. If the file system
    /// has no locks, calls `unguarded` with the reason.
    pub fn lock(&self, unguarded: impl FnOnce(&CheckpointError)) -> Result<RunLock, CheckpointError> {
        self.check_link()?;
        self.create().map_err(|error| CheckpointError::new(&self.path, error))?;
        RunLock::take_checkpoints(&self.path, unguarded)
    }

    /// The checkpoint of a step.
    pub fn of_step(&self, step: u64) -> PathBuf {
        self.path.join(format!("{STEP}{step:08}"))
    }

    /// Steps and folders of all checkpoints by their names, newest first. Ignores other files and folders.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
        let mut found = Vec::new();
        for name in self.names()? {
            let path = self.path.join(&name);
            found.extend(step_of(&path).filter(|_| path.is_dir()).map(|step| (step, path)));
        }
        found.sort_by(|a: &(u64, PathBuf), b| b.cmp(a));
        Ok(found)
    }

    /// Whether a checkpoint is in this folder. Its path may be relative, absolute or through links.
    pub fn holds(&self, checkpoint: &Path) -> bool {
        let lies_here = |path: PathBuf| path.parent().is_some_and(|parent| same(parent, &self.path));
        [std::path::absolute(checkpoint), checkpoint.canonicalize()].into_iter().flatten().any(lies_here)
    }

    /// Creates the temporary folder for the checkpoint of a step.
    pub(crate) fn begin(&self, step: u64) -> io::Result<PathBuf> {
        let partial = self.unfinished(step);
        self.create()?;
        match fs::remove_dir_all(&partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::create_dir(&partial)?;
        Ok(partial)
    }

    /// Creates the temporary folder for the checkpoint of a step, unless another process of the run has created it.
    pub(crate) fn join(&self, step: u64) -> io::Result<PathBuf> {
        let partial = self.unfinished(step);
        fs::create_dir_all(&partial)?;
        Ok(partial)
    }

    /// Renames the temporary folder of a finished checkpoint. Its files are already synced.
    pub(crate) fn finish(&self, step: u64) -> io::Result<PathBuf> {
        let path = self.of_step(step);
        publish_folder(&self.unfinished(step), &path)?;
        Ok(path)
    }

    /// The temporary folder of a checkpoint that is being written or removed.
    pub(crate) fn unfinished(&self, step: u64) -> PathBuf {
        self.path.join(format!("{OWN}{STEP}{step:08}{PARTIAL}"))
    }

    /// Temporary folders that an interrupted save or removal has left behind.
    pub(crate) fn remains(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let names = self.names()?.into_iter();
        let own = names.filter(|name| name.starts_with(OWN) && name.ends_with(PARTIAL));
        Ok(own.map(|name| self.path.join(name)).filter(|path| path.is_dir()).collect())
    }

    /// Removes all but the `keep` newest checkpoints and the `keep_best` with the lowest validation losses, counted from the
    /// one of `published`, which was just written.
    ///
    /// Keeps a folder if its manifest cannot be read or has another step, and keeps checkpoints of later steps. Weights that
    /// were saved during consecutive skipped steps may have diverged. So the newest checkpoint that has other weights, and was
    /// saved after a successful step, always stays.
    pub(crate) fn prune(
        &self,
        keep: u64,
        keep_best: u64,
        published: &RunProgress,
    ) -> Result<(), CheckpointError> {
        let mut older = self.older_than(published.step)?;
        let mut best = best_first(older.iter().map(|(progress, _)| progress).chain([published]));
        best.truncate(keep_best as usize);
        let kept = older.len().min(keep.saturating_sub(1) as usize);
        let mut surplus = older.split_off(kept);
        let good = |(progress, _): &(RunProgress, PathBuf)| is_good(progress, published);
        if published.skipped_in_a_row > 0
            && !older.iter().any(good)
            && let Some(last_good) = surplus.iter().position(good)
        {
            surplus.remove(last_good);
        }
        surplus.retain(|(progress, _)| !best.contains(&progress.step));
        surplus.iter().try_for_each(|(progress, path)| self.remove(progress.step, path))
    }

    /// The newest checkpoint that has other weights than that of `published` and was saved after a successful step.
    pub fn last_good(&self, published: &RunProgress) -> Result<Option<PathBuf>, CheckpointError> {
        let older = self.older_than(published.step)?.into_iter();
        Ok(older
            .map(|found| (is_good(&found.0, published), found.1))
            .find_map(|(good, path)| good.then_some(path)))
    }

    /// The checkpoints before a step whose names and manifests agree, newest first.
    fn older_than(&self, step: u64) -> Result<Vec<(RunProgress, PathBuf)>, CheckpointError> {
        let mut older = Vec::new();
        for (found, path) in self.list()?.into_iter().filter(|(found, _)| *found < step) {
            let manifest = Manifest::read(&path).ok().filter(|manifest| manifest.progress.step == found);
            older.extend(manifest.map(|manifest| (manifest.progress, path)));
        }
        Ok(older)
    }

    /// Removes a checkpoint. Renames the folder first, so that a reader never finds an incomplete checkpoint.
    fn remove(&self, step: u64, path: &Path) -> Result<(), CheckpointError> {
        let unfinished = self.unfinished(step);
        fs::rename(path, &unfinished)
            .and_then(|()| fs::remove_dir_all(&unfinished))
            .map_err(|error| CheckpointError::new(path, error))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the folder and syncs its parent.
    fn create(&self) -> io::Result<()> {
        if self.path.is_dir() {
            return Ok(());
        }
        fs::create_dir_all(&self.path)?;
        sync_folder(parent(&self.path))
    }

    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let io = |error| CheckpointError::new(&self.path, error);
        self.check_link()?;
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io)?,
        };
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect::<io::Result<Vec<String>>>().map_err(io)
    }

    /// Fails if the folder is a link to a missing target, as when the disk is not mounted.
    fn check_link(&self) -> Result<(), CheckpointError> {
        match fs::read_link(&self.path) {
            Ok(target) if !self.path.exists() => {
                let target = target.display();
                let reason = format!("it is a link to {target}, which does not exist; is its disk mounted?");
                Err(CheckpointError::new(&self.path, reason))
            }
            _ => Ok(()),
        }
    }
}

/// The step in the name of a checkpoint's folder, if it has the form that runs use.
pub(crate) fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let step = name.strip_prefix(STEP)?.parse().ok()?;
    (name == format!("{STEP}{step:08}")).then_some(step)
}

/// The folders that may have the tokenizer of a checkpoint: its own, the folder around it, and the run's.
pub(crate) fn places_of_tokenizer(checkpoint: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(checkpoint).unwrap_or_else(|_| checkpoint.to_owned());
    let is_step = |path: &Path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(STEP.as_bytes()))
    };
    let folder = absolute.parent().filter(|_| is_step(&absolute));
    let run = folder.filter(|folder| folder.file_name() == Some(NAME.as_ref())).and_then(Path::parent);
    [Some(absolute.as_path()), folder, run].into_iter().flatten().map(Path::to_owned).collect()
}

/// Whether two paths lead to the same existing file or folder.
pub(crate) fn same(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

/// Whether an older checkpoint was saved after a successful step, with other weights than a newer one. A skipped step makes no
/// update, so checkpoints with the same number of updates have the same weights, and the last of these updates may have made
/// them diverge.
fn is_good(older: &RunProgress, newer: &RunProgress) -> bool {
    older.skipped_in_a_row == 0 && older.updates < newer.updates
}
