//! Reads files from other sources: only regular files, and only up to a limit.
//!
//! Opening a pipe waits for a writer, and a device such as `/dev/zero` never ends.

use std::fs::{self, File, FileType};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Size limit of files that people write: a configuration, a device profile, a table of measurements.
pub const MAX_WRITTEN_BY_HAND: u64 = 64 << 20;
/// Size limit of files that programs write and that are read whole: a manifest, an index, a tokenizer.
pub const MAX_WRITTEN_BY_PROGRAMS: u64 = 1 << 30;

/// Opens a regular file, or a link to one, for reading. Anything else is refused before it is opened.
pub fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_file() {
        return File::open(path);
    }
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {}, not a regular file", name(kind))))
}

/// Reads all bytes of a regular file. Fails if it has more than `most`.
pub fn bytes(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    limited(open(path)?, most).read_to_end(&mut bytes)?;
    check_length(bytes.len(), most)?;
    Ok(bytes)
}

/// Reads the text of a regular file. Fails if it has more than `most` bytes.
pub fn text(path: &Path, most: u64) -> io::Result<String> {
    text_of(open(path)?, most)
}

/// Reads all text of a reader. Fails if it has more than `most` bytes.
pub fn text_of(reader: impl Read, most: u64) -> io::Result<String> {
    let mut text = String::new();
    limited(reader, most).read_to_string(&mut text)?;
    check_length(text.len(), most)?;
    Ok(text)
}

/// Limits a reader to one byte more than is allowed, so that a longer input is noticed.
fn limited(reader: impl Read, most: u64) -> impl Read {
    reader.take(most.saturating_add(1))
}

fn check_length(length: usize, most: u64) -> io::Result<()> {
    if length as u64 <= most {
        return Ok(());
    }
    Err(io::Error::new(ErrorKind::FileTooLarge, format!("it has more than the {most} bytes that are read")))
}

fn name(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}
