//! Device memory: one plain allocation of the planned size, given out by an [`Arena`].

use cudarc::driver::result;

use super::error::CudaError;
use super::stream::Stream;
use crate::{Arena, Block, Category, Memory, Place, Usage};

/// One `cuMemAlloc` of the planned capacity; never managed memory, which would page instead of failing.
#[derive(Debug)]
pub(crate) struct DeviceSlab {
    stream: Stream,
    address: u64,
    bytes: u64,
    arena: Arena,
}

impl DeviceSlab {
    /// Takes `capacity` bytes from the device at once.
    pub(crate) fn new(stream: &Stream, capacity: u64) -> Result<Self, CudaError> {
        let bytes = Arena::rounded(capacity);
        // SAFETY: the stream's context is current on this thread; the memory is freed in `drop` only.
        let address = unsafe { result::malloc_sync(bytes as usize) }.map_err(|error| {
            let free = stream.context().mem_get_info().map_or(0, |(free, _)| free);
            CudaError::Driver(format!("{bytes} bytes of memory were refused, {free} are free: {error:?}"))
        })?;
        let arena = Arena::new(Place::Device, address, bytes);
        Ok(DeviceSlab { stream: stream.clone(), address, bytes, arena })
    }

    /// What is free: the same requests from here on get the same addresses.
    pub(crate) fn free(&self) -> Vec<(u64, u64)> {
        self.arena.free()
    }
}

impl Memory for DeviceSlab {
    fn place(&self) -> Place {
        Place::Device
    }

    fn allocate(&self, bytes: u64, category: Category) -> Block {
        let block = self.arena.allocate(bytes, category);
        self.stream.note([block.address, block.bytes]);
        block
    }

    fn release(&self, block: Block) {
        self.arena.release(block);
    }

    fn peak(&self) -> Usage {
        self.arena.peak()
    }

    fn reserved(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceSlab {
    fn drop(&mut self) {
        // A failure here is an earlier kernel's, and has been or will be reported by the next call that waits.
        let _ = self.stream.synchronize();
        // SAFETY: the address came from `malloc_sync`, nothing enqueued uses it any more, and every buffer that
        // lies in it holds this slab alive.
        let _ = unsafe { result::free_sync(self.address) };
    }
}
