//! Page-locked host memory. The GPU copies to and from it at the speed of the bus while the host continues. The driver
//! stages copies of pageable memory itself, and waits for the stream first.

use rayon::prelude::*;

use crate::error::GpuError;
use crate::stream::Stream;

/// Bytes that one thread copies at a time. A second thread does not pay off below twice this size.
const CHUNK: usize = 512 << 10;

/// One allocation. Its address never changes.
#[derive(Debug)]
pub(crate) struct Pinned {
    stream: Stream,
    address: *mut u8,
    bytes: usize,
}

impl Pinned {
    /// Allocates `bytes` of zeroed host memory for copies on `stream`.
    pub(crate) fn new(stream: &Stream, bytes: usize) -> Result<Self, GpuError> {
        // SAFETY: the device is current on this thread; the memory is freed in `drop` only.
        let address = unsafe { stream.driver().allocate_host(bytes) }.map_err(|error| {
            error.during(format_args!("{bytes} bytes of page-locked memory were refused"))
        })?;
        // SAFETY: just allocated, and nobody else knows it.
        unsafe { address.write_bytes(0, bytes) };
        Ok(Pinned { stream: stream.clone(), address, bytes })
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Enqueues a copy of `bytes` from offset `at` to the device.
    ///
    /// # Safety
    /// `to` must be device memory with room for them.
    pub(crate) unsafe fn upload(&self, at: usize, bytes: usize, to: u64) -> Result<(), GpuError> {
        self.check(at, bytes);
        // SAFETY: inside the allocation, which lives until the stream has run; the rest is the caller's promise.
        unsafe { self.stream.upload(self.address.add(at), bytes, to) }
    }

    /// Enqueues a copy of the first `bytes` from the device.
    ///
    /// # Safety
    /// `from` must be device memory of at least as many bytes.
    pub(crate) unsafe fn download(&self, from: u64, bytes: usize) -> Result<(), GpuError> {
        self.check(0, bytes);
        // SAFETY: as in `upload`.
        unsafe { self.stream.download(from, self.address, bytes) }
    }

    /// Writes bytes at offset `at`.
    ///
    /// # Safety
    /// No enqueued copy that has not run yet may read or write that range.
    pub(crate) unsafe fn put(&self, at: usize, from: &[u8]) {
        self.check(at, from.len());
        // SAFETY: inside the allocation, and by the caller's promise nobody else uses it.
        let to = unsafe { std::slice::from_raw_parts_mut(self.address.add(at), from.len()) };
        copy(from, to);
    }

    /// Reads the first bytes.
    ///
    /// # Safety
    /// No enqueued copy that has not run yet may write them.
    pub(crate) unsafe fn get(&self, to: &mut [u8]) {
        self.check(0, to.len());
        // SAFETY: inside the allocation, and by the caller's promise nobody writes it.
        let from = unsafe { std::slice::from_raw_parts(self.address, to.len()) };
        copy(from, to);
    }

    fn check(&self, at: usize, bytes: usize) {
        assert!(at + bytes <= self.bytes, "{bytes} bytes from {at} of {} that are page-locked", self.bytes);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A failure here belongs to an earlier kernel. A call that waits has reported it or will report it.
        let _ = self.stream.synchronize();
        // SAFETY: the address came from `allocate_host`, and nothing enqueued uses it any more.
        unsafe { self.stream.driver().free_host(self.address) };
    }
}

/// Copies on several threads if it pays off: one thread alone is slower than the bus.
fn copy(from: &[u8], to: &mut [u8]) {
    if to.len() < 2 * CHUNK {
        to.copy_from_slice(from);
    } else {
        to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_whole_whatever_their_length() {
        for len in [0, 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, 5 * CHUNK + 3] {
            let from: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let mut to = vec![0; len];
            copy(&from, &mut to);
            assert!(from == to, "{len} bytes");
        }
    }
}
