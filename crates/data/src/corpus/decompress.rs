//! Decompresses a file as a stream. Files with several frames, as parallel compressors and `cat` make them, are read to the
//! end.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::inputs::Compression;

/// Bytes read from disk at once.
const BUFFER: usize = 1 << 17;

/// The largest window of a zstd frame, which is kept in memory: that of `zstd --long=27`.
const MAX_WINDOW: u64 = 1 << 27;

/// KiB of memory for an xz stream. Most of it is the dictionary: that of `xz -9` has 64 MiB.
const MAX_XZ: u32 = 256 << 10;

/// Opens a file. Counts the bytes read from disk in `counter`.
pub(super) fn open(
    path: &Path,
    compression: Compression,
    counter: &Arc<AtomicU64>,
) -> io::Result<Box<dyn Read + Send>> {
    let file = CountingReader { file: File::open(path)?, counter: Arc::clone(counter) };
    let file = BufReader::with_capacity(BUFFER, file);
    Ok(match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(MultiGzDecoder::new(file)),
        Compression::Zstd => Box::new(Zstd::new(file)),
        Compression::Bzip2 => Box::new(MultiBzDecoder::new(file)),
        Compression::Xz => Box::new(XzReader::new_mem_limit(file, true, MAX_XZ)),
    })
}

struct CountingReader {
    file: File,
    counter: Arc<AtomicU64>,
}

impl Read for CountingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.counter.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// All frames of a zstd stream.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    /// Whether a frame has begun and its checksum has not been compared yet.
    within: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_WINDOW);
        Zstd { source, decoder, within: false }
    }

    /// Begins the next frame with data. Returns `false` at the end.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = io::copy(&mut self.source.by_ref().take(length.into()), &mut io::sink())?;
                    if skipped < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }

    fn check_frame(&self) -> io::Result<()> {
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(stored), Some(found)) if stored != found => {
                Err(io::Error::other("a zstd frame has another checksum than it should"))
            }
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.within && !self.next_frame()? {
                return Ok(0);
            }
            self.within = true;
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(io::Error::other)?;
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            self.check_frame()?;
            self.within = false;
        }
    }
}
