//! Files that the user names: texts that are read, and files that are written completely or not at all.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kintsugi_spec::input;
use kintsugi_spec::output::{self, UnfinishedFile, with_suffix};

use crate::failure::Failure;

/// Reads a regular file, or a file that the shell has opened for the program: `/dev/stdin`, or `/dev/fd/63` for `<(…)`.
/// Any other pipe is refused, because it might never have a writer.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let opened_by_shell = path == Path::new("/dev/stdin") || path.starts_with("/dev/fd");
    let file = if opened_by_shell { File::open(path) } else { input::open(path) };
    file.and_then(|file| input::text_of(file, input::MAX_WRITTEN_BY_HAND))
        .map_err(|error| Failure::file("read", path, &error))
}

/// Writes a file under a temporary name, syncs it to the disk and renames it. A target that is not a regular file, such
/// as a pipe, is written directly.
pub fn write_whole(path: &Path, text: &[u8]) -> Result<(), Failure> {
    let written = match target(path) {
        PathTarget::Stream => fs::write(path, text),
        PathTarget::File(path) => output::write_whole(&path, unfinished(&path), text),
    };
    written.map_err(|error| Failure::file("write", path, &error))
}

/// The kind of a path's target.
enum PathTarget {
    /// A file, or nothing yet, after following links.
    File(PathBuf),
    /// A device, or a pipe.
    Stream,
}

fn target(path: &Path) -> PathTarget {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => PathTarget::Stream,
        Ok(_) => PathTarget::File(path.canonicalize().unwrap_or_else(|_| path.to_owned())),
        Err(_) => PathTarget::File(path.to_owned()),
    }
}

/// Removes a file, if it exists.
pub fn remove(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Failure::file("replace", path, &error)),
        _ => Ok(()),
    }
}

/// Refuses a path that cannot be written, before hours are spent on its contents.
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    if path.is_dir() {
        return Err(Failure::Mistake(format!("cannot write {}: it is a folder", path.display())));
    }
    let PathTarget::File(file) = target(path) else { return Ok(()) };
    UnfinishedFile::create(unfinished(&file)).map(drop).map_err(|error| Failure::file("write", path, &error))
}

fn unfinished(path: &Path) -> PathBuf {
    with_suffix(path, ".kintsugi-partial")
}
