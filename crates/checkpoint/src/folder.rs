//! The checkpoints of a run: a folder with one folder for each, named after its step.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::manifest::MANIFEST;
use crate::seeded::{self, Bug};
use crate::{Checkpoint, CheckpointError, files, tokenizer};

/// A run's checkpoints, in `<out>/checkpoints`.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

const NAME: &str = "checkpoints";
const STEP: &str = "step-";
/// What is not whole yet, or about to go, is called so.
const PARTIAL: &str = ".partial";

impl Folder {
    /// The checkpoints of the run in `out`.
    pub fn of_run(out: &Path) -> Self {
        Folder { path: out.join(NAME) }
    }

    /// The checkpoint of a step.
    pub fn of_step(&self, step: u64) -> PathBuf {
        self.path.join(format!("{STEP}{step:08}"))
    }

    /// Steps and folders of all checkpoints, the newest first. Nothing is said about what is in them.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
        let mut found = Vec::new();
        for name in self.names()? {
            let step = name.strip_prefix(STEP).and_then(|digits| digits.parse().ok());
            found.extend(step.map(|step| (step, self.path.join(&name))));
        }
        found.sort_by(|a: &(u64, PathBuf), b| b.cmp(a));
        Ok(found)
    }

    /// The newest checkpoint that is whole; `broken` hears of every newer one that is not. If there are some and none
    /// is whole, that is an error, not a reason to begin anew.
    pub fn newest(
        &self,
        mut broken: impl FnMut(&CheckpointError),
    ) -> Result<Option<Checkpoint>, CheckpointError> {
        let mut last = None;
        for (_, path) in self.list()? {
            match Checkpoint::open(&path) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(error) => {
                    broken(&error);
                    last = Some(error);
                }
            }
        }
        match last {
            Some(_) => Err(CheckpointError::new(&self.path, "none of its checkpoints is whole")),
            None => Ok(None),
        }
    }

    /// Whether a checkpoint lies here, however its path is written: relative, absolute or through links.
    pub fn holds(&self, checkpoint: &Path) -> bool {
        let lies_here = |path: PathBuf| path.parent().is_some_and(|parent| same(parent, &self.path));
        [std::path::absolute(checkpoint), checkpoint.canonicalize()].into_iter().flatten().any(lies_here)
    }

    /// Makes room for a run that goes on from one of these, or starts (`None`): checkpoints beyond it, which that run
    /// will write again, are moved to another folder, whose path is given; remains of unfinished ones are removed.
    pub fn set_aside(&self, goes_on: Option<&Checkpoint>) -> Result<Option<PathBuf>, CheckpointError> {
        // Whatever its name says: it is still to be read.
        let stays = |path: &Path| goes_on.is_some_and(|checkpoint| same(path, checkpoint.path()));
        for name in self.names()?.iter().filter(|name| name.ends_with(PARTIAL)) {
            let path = self.path.join(name);
            if !stays(&path) {
                fs::remove_dir_all(&path).map_err(|error| CheckpointError::io(&path, &error))?;
            }
        }
        let beyond = |found: u64| goes_on.is_none_or(|checkpoint| found > checkpoint.progress().step);
        let found = self.list()?.into_iter().filter(|(found, path)| beyond(*found) && !stays(path));
        let beyond: Vec<PathBuf> = found.map(|(_, path)| path).collect();
        if beyond.is_empty() {
            return Ok(None);
        }
        let aside = self.new_aside()?;
        let moved = beyond.iter().try_for_each(|path| {
            let name = path.file_name().expect("a checkpoint has a name");
            fs::rename(path, aside.join(name)).map_err(|error| CheckpointError::io(path, &error))
        });
        // It may still be needed for what was moved before; if nothing was, it is empty and goes.
        moved.inspect_err(|_| drop(fs::remove_dir(&aside)))?;
        // The run's own tokenizer may make way for another's.
        self.path.parent().map_or(Ok(()), |run| tokenizer::copy(run, &aside))?;
        Ok(Some(aside))
    }

    /// Makes a folder for what is set aside: beside this one, or where this is a link to, which may be another disk.
    fn new_aside(&self) -> Result<PathBuf, CheckpointError> {
        let target = if self.path.is_symlink() { self.path.canonicalize() } else { Ok(self.path.clone()) };
        let target = target.map_err(|error| CheckpointError::io(&self.path, &error))?;
        let name = target.file_name().unwrap_or(NAME.as_ref()).to_string_lossy();
        let aside = (1..u64::MAX)
            .map(|number| target.with_file_name(format!("{name}-{number}")))
            .find(|path| !path.exists())
            .expect("there are numbers enough");
        fs::create_dir(&aside).map_err(|error| CheckpointError::io(&aside, &error))?;
        Ok(aside)
    }

    /// A new folder for what will be the checkpoint of a step.
    pub(crate) fn begin(&self, step: u64) -> io::Result<PathBuf> {
        let partial = partial(&self.of_step(step));
        fs::create_dir_all(&self.path)?;
        match fs::remove_dir_all(&partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::create_dir(&partial)?;
        Ok(partial)
    }

    /// Gives a finished checkpoint its name. Its files are on the disk already.
    pub(crate) fn finish(&self, step: u64) -> io::Result<PathBuf> {
        let path = self.of_step(step);
        publish(&partial(&path), &path)?;
        Ok(path)
    }

    /// Removes all but the `keep` newest. One that goes loses its name first, so that none is seen half removed.
    pub(crate) fn prune(&self, keep: u64) -> Result<(), CheckpointError> {
        for (_, path) in self.list()?.into_iter().skip(keep as usize) {
            let going = partial(&path);
            fs::rename(&path, &going)
                .and_then(|()| fs::remove_dir_all(&going))
                .map_err(|error| CheckpointError::io(&path, &error))?;
        }
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let io = |error| CheckpointError::io(&self.path, &error);
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io)?,
        };
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect::<io::Result<Vec<String>>>().map_err(io)
    }
}

/// The folders that may have the tokenizer of a run's checkpoint, by where it lies: its own, that of what was set aside
/// with it, and the run's.
pub(crate) fn places_of_tokenizer(checkpoint: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(checkpoint).unwrap_or_else(|_| checkpoint.to_owned());
    let is_step = |path: &Path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(STEP.as_bytes()))
    };
    let folder = absolute.parent().filter(|_| is_step(&absolute));
    let run = folder.filter(|folder| folder.file_name() == Some(NAME.as_ref())).and_then(Path::parent);
    [Some(absolute.as_path()), folder, run].into_iter().flatten().map(Path::to_owned).collect()
}

/// Whether two paths lead to the same place, which is there.
fn same(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

/// The name of something unfinished.
pub(crate) fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(if seeded::has(Bug::Rename) { "" } else { PARTIAL });
    name.into()
}

/// Renames a folder, on the disk too.
pub(crate) fn publish(from: &Path, to: &Path) -> io::Result<()> {
    files::sync_folder(from)?;
    fs::rename(from, to)?;
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    files::sync_folder(parent.unwrap_or(Path::new(".")))
}

/// Opens what a path means: a checkpoint, or the newest whole one of a run or of a folder of checkpoints.
pub fn find(path: &Path, broken: impl FnMut(&CheckpointError)) -> Result<Checkpoint, CheckpointError> {
    if !path.exists() {
        return Err(CheckpointError::new(path, "there is no such folder"));
    }
    if path.join(MANIFEST).exists() {
        return Checkpoint::open(path);
    }
    let run = Folder::of_run(path);
    let folder = if run.path.is_dir() { run } else { Folder { path: path.to_owned() } };
    let newest = folder.newest(broken)?;
    newest.ok_or_else(|| CheckpointError::new(path, "there is no checkpoint here"))
}
