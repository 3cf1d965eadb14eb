//! Files that the user names: texts that are read, and files that are written completely or not at all.

use std::fs::File;
use std::path::Path;

use kintsugi_spec::input;
use kintsugi_spec::output::{UnfinishedFile, target, temporary_name, write_target};

use crate::failure::Failure;

/// Reads a regular file, or a file that the shell has opened for the program: `/dev/stdin`, or `/dev/fd/63` for `<(…)`.
/// Any other pipe is refused, because it might never have a writer.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let opened_by_shell = path == Path::new("/dev/stdin") || path.starts_with("/dev/fd");
    let file = if opened_by_shell { File::open(path) } else { input::open(path) };
    file.and_then(|file| input::text_of(file, input::MAX_WRITTEN_BY_HAND))
        .map_err(|error| Failure::file("read", path, error))
}

/// Writes a file under a temporary name, syncs it to the disk and renames it. A target that is not a regular file, such
/// as a pipe, is written directly.
pub fn write_whole(path: &Path, text: &[u8]) -> Result<(), Failure> {
    write_target(path, text).map_err(|error| Failure::file("write", path, error))
}

/// Refuses a path that cannot be written, before hours are spent on its contents.
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    if path.is_dir() {
        return Err(Failure::mistake(format!("cannot write {}: it is a folder", path.display())));
    }
    let Some(file) = target(path) else { return Ok(()) };
    UnfinishedFile::create(temporary_name(&file))
        .map(drop)
        .map_err(|error| Failure::file("write", path, error))
}
