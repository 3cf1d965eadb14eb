//! Files that others wrote: opened only if they are regular files, and read up to a limit.
//!
//! Opening a pipe waits until somebody writes to it, and a device such as `/dev/zero` never ends.

use std::fs::{self, File, FileType};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The most bytes of a file that a person writes: a configuration, a profile of a device, a table of measurements.
pub const MOST_WRITTEN_BY_HAND: u64 = 64 << 20;
/// The most bytes of a file that a program writes and that is read whole: a manifest, an index, a tokenizer.
pub const MOST_WRITTEN_BY_PROGRAMS: u64 = 1 << 30;

/// Opens a regular file, or a link to one, for reading. Anything else is refused before it is opened.
pub fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_file() {
        return File::open(path);
    }
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {}, not a regular file", name(kind))))
}

/// All bytes of a regular file, unless it has more than `most`.
pub fn bytes(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    limited(open(path)?, most).read_to_end(&mut bytes)?;
    check_length(bytes.len(), most)?;
    Ok(bytes)
}

/// The text of a regular file, unless it has more than `most` bytes.
pub fn text(path: &Path, most: u64) -> io::Result<String> {
    text_of(open(path)?, most)
}

/// The text that a reader has, unless it has more than `most` bytes.
pub fn text_of(reader: impl Read, most: u64) -> io::Result<String> {
    let mut text = String::new();
    limited(reader, most).read_to_string(&mut text)?;
    check_length(text.len(), most)?;
    Ok(text)
}

/// One byte more than is allowed, so that what is longer shows.
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
