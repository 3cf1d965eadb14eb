//! Files that are whole or absent.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Writes a file under another name and moves it into place.
pub fn write_whole(path: &Path, text: &str) -> Result<(), Failure> {
    let partial = partial(path);
    fs::write(&partial, text)
        .and_then(|()| fs::rename(&partial, path))
        .map_err(|error| Failure::file("write", path, &error))
}

/// Removes a file, if it is there.
pub fn remove(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Failure::file("replace", path, &error)),
        _ => Ok(()),
    }
}

/// Refuses a path that could not be written later, before hours are spent on what shall be written there.
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    if path.is_dir() {
        return Err(Failure::Mistake(format!("cannot write {}: it is a folder", path.display())));
    }
    let partial = partial(path);
    fs::write(&partial, "")
        .and_then(|()| fs::remove_file(&partial))
        .map_err(|error| Failure::file("write", path, &error))
}

fn partial(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".partial");
    name.into()
}
