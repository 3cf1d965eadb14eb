//! Writes files that are synced to the disk, with their checksums, and reads many files with a limit on open ones.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};
use kintsugi_spec::{input, work};
use safetensors::Dtype;
use xxhash_rust::xxh3::Xxh3;

use crate::CheckpointError;

/// Bytes that are hashed and written at a time, so that they stay in the CPU cache.
const CHUNK: usize = 1 << 20;

/// The checksum of a file's bytes, in the format of the manifest.
pub(crate) fn checksum(bytes: &[u8]) -> String {
    let mut hash = Xxh3::new();
    hash.update(bytes);
    name(&hash)
}

/// A checksum in the format of the manifest.
pub(crate) fn name(hash: &Xxh3) -> String {
    format!("xxh3:{:016x}", hash.digest())
}

/// A file that is being written, and synced when it is finished.
pub(crate) struct SyncedFile {
    file: File,
    hash: Xxh3,
    bytes: u64,
}

impl SyncedFile {
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(SyncedFile { file: File::create(path)?, hash: Xxh3::new(), bytes: 0 })
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for chunk in bytes.chunks(CHUNK) {
            self.hash.update(chunk);
            self.file.write_all(chunk)?;
            work::finish_piece();
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Syncs the file to the disk. Returns its length and checksum.
    pub fn finish(self) -> io::Result<(u64, String)> {
        self.file.sync_all()?;
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
                work::finish_piece();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Files that are read at offsets. A checkpoint of a large job has more files than a process may have open.
#[derive(Debug, Default)]
pub(crate) struct ManyFiles {
    pub paths: Vec<PathBuf>,
    /// Open files, most recently used last.
    open: Mutex<Vec<(usize, Arc<File>)>>,
}

/// Numbers that are read at a time, so that they are still in the CPU cache when they are converted.
const NUMBERS: usize = 1 << 14;

/// The most open files: far below the usual limit, and enough for several threads.
const MAX_OPEN: usize = 128;

impl ManyFiles {
    pub fn new(paths: Vec<PathBuf>) -> Self {
        ManyFiles { paths, open: Mutex::default() }
    }

    /// Fills `out` with numbers of type `dtype` from `offset` of a file.
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
            work::finish_piece();
        }
        Ok(())
    }

    fn file(&self, number: usize) -> io::Result<Arc<File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = if let Some(at) = open.iter().position(|(found, _)| *found == number) {
            open.remove(at)
        } else {
            if open.len() == MAX_OPEN {
                open.remove(0);
            }
            let file = input::open(&self.paths[number]).or_else(|error| {
                if open.is_empty() {
                    return Err(error);
                }
                // The limit of the system may be lower, or other parts of the program may have reached it.
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

/// Converts little-endian numbers of type `dtype`.
pub(crate) fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
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

/// Copies a file and syncs the copy to the disk.
pub(crate) fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::copy(from, to)?;
    File::open(to)?.sync_all()
}

/// Writes JSON to a file and syncs it to the disk.
pub(crate) fn write_json(path: &Path, value: &serde_json::Value) -> Result<(), CheckpointError> {
    let text = serde_json::to_vec_pretty(value).expect("JSON has string keys");
    let written = SyncedFile::create(path).and_then(|mut file| {
        file.write(&text)?;
        file.finish()
    });
    written.map(|_| ()).map_err(|error| CheckpointError::new(path, error))
}
