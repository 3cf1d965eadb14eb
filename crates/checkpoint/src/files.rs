//! Files that are on the disk when they are said to be, with a checksum of what was written.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

/// Bytes that are hashed and moved at a time, so that both find them in the cache.
const CHUNK: usize = 1 << 20;

/// The checksum of a file's bytes, as it stands in a manifest.
pub(crate) fn checksum(bytes: &[u8]) -> String {
    let mut hash = Xxh3::new();
    hash.update(bytes);
    name(&hash)
}

fn name(hash: &Xxh3) -> String {
    format!("xxh3:{:016x}", hash.digest())
}

/// A file that is being written.
pub(crate) struct Durable {
    file: File,
    hash: Xxh3,
    bytes: u64,
}

impl Durable {
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Durable { file: File::create(path)?, hash: Xxh3::new(), bytes: 0 })
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for chunk in bytes.chunks(CHUNK) {
            self.hash.update(chunk);
            self.file.write_all(chunk)?;
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Waits until the disk has it; gives its length and checksum.
    pub fn finish(self) -> io::Result<(u64, String)> {
        self.file.sync_all()?;
        Ok((self.bytes, name(&self.hash)))
    }
}

/// The length and checksum of a file.
pub(crate) fn measure(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let (mut hash, mut bytes) = (Xxh3::new(), 0);
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return Ok((bytes, name(&hash))),
            Ok(read) => {
                hash.update(&chunk[..read]);
                bytes += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Waits until the disk has the names in a folder.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
