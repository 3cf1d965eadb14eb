//! Files that are on the disk when they are said to be, with a checksum of what was written; and many files to read, of
//! which only some are open at a time.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};
use kintsugi_spec::input;
use safetensors::Dtype;
use xxhash_rust::xxh3::Xxh3;

use crate::CheckpointError;
use crate::seeded::{self, Bug};

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
        if !seeded::has(Bug::Fsync) {
            self.file.sync_all()?;
        }
        Ok((self.bytes, name(&self.hash)))
    }
}

/// The length and checksum of a file.
pub(crate) fn measure(path: &Path) -> io::Result<(u64, String)> {
    let mut file = input::open(path)?;
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

/// Files that are read at offsets: a checkpoint of a large job has more than a process may open at a time.
#[derive(Debug, Default)]
pub(crate) struct ManyFiles {
    pub paths: Vec<PathBuf>,
    /// Those that are open, the one that was used last at the end.
    open: Mutex<Vec<(usize, Arc<File>)>>,
}

/// Numbers that are read at a time: they are still in the cache when they are widened.
const NUMBERS: usize = 1 << 14;

/// Far below what a system usually allows, and more than a few threads read in turn.
const MOST_OPEN: usize = 128;

impl ManyFiles {
    pub fn new(paths: Vec<PathBuf>) -> Self {
        ManyFiles { paths, open: Mutex::default() }
    }

    /// Fills `out` with the numbers of this type that lie from `offset` of a file on.
    pub fn read(
        &self,
        number: usize,
        dtype: Dtype,
        mut offset: u64,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let io = |error| CheckpointError::new(&self.paths[number], error);
        let file = self.file(number).map_err(io)?;
        let size = dtype.bitsize() / 8;
        let mut bytes = vec![0; out.len().min(NUMBERS) * size];
        for out in out.chunks_mut(NUMBERS) {
            let bytes = &mut bytes[..out.len() * size];
            file.read_exact_at(bytes, offset).map_err(io)?;
            widen(dtype, bytes, out);
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    fn file(&self, number: usize) -> io::Result<Arc<File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = if let Some(at) = open.iter().position(|(found, _)| *found == number) {
            open.remove(at)
        } else {
            if open.len() == MOST_OPEN {
                open.remove(0);
            }
            let file = input::open(&self.paths[number]).or_else(|error| {
                if open.is_empty() {
                    return Err(error);
                }
                // The limit may be lower than ours, or others may have used it up.
                open.clear();
                input::open(&self.paths[number])
            })?;
            (number, Arc::new(file))
        };
        let file = Arc::clone(&entry.1);
        open.push(entry);
        Ok(file)
    }
}

fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    let pairs = bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        Dtype::F16 => {
            out.iter_mut().zip(pairs).for_each(|(out, pair)| *out = f16::from_le_bytes(pair).to_f32());
        }
        Dtype::BF16 => {
            out.iter_mut().zip(pairs).for_each(|(out, pair)| *out = bf16::from_le_bytes(pair).to_f32());
        }
        _ => {
            let fours = bytes.chunks_exact(4).map(|four| [four[0], four[1], four[2], four[3]]);
            out.iter_mut().zip(fours).for_each(|(out, four)| *out = f32::from_le_bytes(four));
        }
    }
}

/// Copies a file, and waits until the disk has the copy.
pub(crate) fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::copy(from, to)?;
    File::open(to)?.sync_all()
}

/// Writes JSON to a file, where the disk has it then.
pub(crate) fn write_json(path: &Path, value: &serde_json::Value) -> Result<(), CheckpointError> {
    let text = serde_json::to_vec_pretty(value).expect("JSON has string keys");
    let written = Durable::create(path).and_then(|mut file| {
        file.write(&text)?;
        file.finish()
    });
    written.map(|_| ()).map_err(|error| CheckpointError::new(path, error))
}
