//! A folder that is written under a temporary name beside the final one and then renamed, so that it is complete or absent.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kintsugi_spec::output::{publish_folder, with_suffix};

use crate::CheckpointError;
use crate::folder::PARTIAL;

/// A temporary folder. Removed when this value is dropped, unless it is published.
pub(crate) struct TemporaryFolder {
    path: PathBuf,
    to: PathBuf,
    published: bool,
}

impl TemporaryFolder {
    /// Creates a temporary folder for `to`, which must not exist or be empty. Never removes other files beside it.
    pub fn begin(to: &Path) -> Result<Self, CheckpointError> {
        if to.exists() && !is_empty_folder(to) {
            return Err(CheckpointError::new(to, "it already exists"));
        }
        let failed = |error: io::Error| CheckpointError::new(to, error);
        to.parent().map_or(Ok(()), fs::create_dir_all).map_err(failed)?;
        for number in 0_u64.. {
            let path = with_suffix(to, &format!(".{}-{number}{PARTIAL}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(TemporaryFolder { path, to: to.to_owned(), published: false }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(error)),
            }
        }
        unreachable!("there are numbers enough")
    }

    /// The temporary path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames it to its final name. Its files must be synced.
    pub fn publish(mut self) -> Result<(), CheckpointError> {
        publish_folder(&self.path, &self.to).map_err(|error| CheckpointError::new(&self.to, error))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if !self.published {
            // The folder is incomplete.
            fs::remove_dir_all(&self.path).ok();
        }
    }
}

fn is_empty_folder(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}
