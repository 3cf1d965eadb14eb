//! A folder in the making: under a name of its own beside the final one, so that this is whole or absent.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kintsugi_spec::output::{publish_folder, with_suffix};

use crate::CheckpointError;
use crate::folder::PARTIAL;

/// Goes away with this value, unless it is published.
pub(crate) struct Unfinished {
    path: PathBuf,
    to: PathBuf,
    published: bool,
}

impl Unfinished {
    /// Begins what will be `to`, which must not be there yet, or be empty. Whatever else lies beside it is somebody's.
    pub fn begin(to: &Path) -> Result<Self, CheckpointError> {
        if to.exists() && !is_empty_folder(to) {
            return Err(CheckpointError::new(to, "it is there already"));
        }
        let failed = |error: io::Error| CheckpointError::new(to, error);
        to.parent().map_or(Ok(()), fs::create_dir_all).map_err(failed)?;
        for number in 0_u64.. {
            let path = with_suffix(to, &format!(".{}-{number}{PARTIAL}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Unfinished { path, to: to.to_owned(), published: false }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(error)),
            }
        }
        unreachable!("there are numbers enough")
    }

    /// Where it is written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it its name. Its files are on the disk already.
    pub fn publish(mut self) -> Result<(), CheckpointError> {
        publish_folder(&self.path, &self.to).map_err(|error| CheckpointError::new(&self.to, error))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.published {
            // Nobody is served by half of it.
            fs::remove_dir_all(&self.path).ok();
        }
    }
}

fn is_empty_folder(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}
