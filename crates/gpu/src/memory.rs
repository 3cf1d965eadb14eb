//! Device memory: one allocation of the planned size, divided by an [`Arena`].

use crate::error::GpuError;
use crate::stream::Stream;
use kintsugi_tensor::{AddressSpace, Arena, Block, Category, Memory, Usage};

/// One allocation of the planned capacity. Managed memory is not used, because it would page instead of failing.
#[derive(Debug)]
pub(crate) struct DeviceSlab {
    stream: Stream,
    address: u64,
    bytes: u64,
    arena: Arena,
}

impl DeviceSlab {
    /// Allocates `capacity` bytes on the device.
    pub(crate) fn new(stream: &Stream, capacity: u64) -> Result<Self, GpuError> {
        let bytes = Arena::rounded(capacity);
        // SAFETY: the device is current on this thread; the memory is freed in `drop` only.
        let address = unsafe { stream.driver().allocate(bytes as usize) }.map_err(|error| {
            let free = stream.driver().memory().map_or(0, |(free, _)| free);
            error.during(format_args!("{bytes} bytes of memory were refused, {free} are free"))
        })?;
        let arena = Arena::new(AddressSpace::Device, address, bytes);
        Ok(DeviceSlab { stream: stream.clone(), address, bytes, arena })
    }

    /// The free ranges. From the same free ranges, the same requests get the same addresses.
    pub(crate) fn free(&self) -> Vec<(u64, u64)> {
        self.arena.free()
    }
}

impl Memory for DeviceSlab {
    fn address_space(&self) -> AddressSpace {
        AddressSpace::Device
    }

    fn allocate(&self, bytes: u64, category: Category) -> Block {
        let block = self.arena.allocate(bytes, category);
        self.stream.add_to_digest([block.address, block.bytes]);
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
        // A failure here belongs to an earlier kernel. A call that waits has reported it or will report it.
        let _ = self.stream.synchronize();
        // SAFETY: the address came from `allocate`, nothing enqueued uses it any more, and every buffer in it holds a
        // reference to this slab.
        unsafe { self.stream.driver().free(self.address) };
    }
}
