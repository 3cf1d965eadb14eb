//! Copies between the GPU and pageable memory. They go through two page-locked slots in turn, so that the GPU fills one
//! slot while the host empties the other.

use std::cell::Cell;

use super::pinned::Pinned;
use super::stream::Stream;
use crate::driver::Event;
use crate::error::GpuError;

/// Bytes per slot. One copy takes about 150 µs on the bus, so its start-up time does not matter.
const SLOT: usize = 8 << 20;

/// Uploads start at a multiple of this in a slot.
const ALIGNMENT: usize = 256;

/// The slots of one stream.
#[derive(Debug)]
pub(crate) struct Staging {
    stream: Stream,
    slots: [Slot; 2],
    /// The slot that uploads currently use, and the bytes of it that are taken.
    place: Cell<(usize, usize)>,
}

#[derive(Debug)]
struct Slot {
    memory: Pinned,
    /// Completion of the last copy through this slot, recorded when the other slot took over.
    done: Box<dyn Event>,
}

impl Staging {
    /// Allocates both slots.
    pub(crate) fn new(stream: &Stream) -> Result<Self, GpuError> {
        let slot = || -> Result<Slot, GpuError> {
            let done = stream.driver().event(false)?;
            Ok(Slot { memory: Pinned::new(stream, SLOT)?, done })
        };
        Ok(Staging { stream: stream.clone(), slots: [slot()?, slot()?], place: Cell::default() })
    }

    /// Enqueues a copy to the device. `bytes` may be reused when this returns. Waits only if both slots are full of
    /// bytes that have not been copied yet.
    ///
    /// # Safety
    /// `to` must be device memory with room for `bytes`.
    pub(crate) unsafe fn upload(&self, bytes: &[u8], to: u64) -> Result<(), GpuError> {
        for (i, part) in bytes.chunks(SLOT).enumerate() {
            let (slot, at) = self.reserve(part.len())?;
            // SAFETY: the range was reserved; the rest is the caller's promise.
            unsafe {
                slot.memory.put(at, part);
                slot.memory.upload(at, part.len(), to + (i * SLOT) as u64)?;
            }
        }
        Ok(())
    }

    /// Reserves a range of a slot that no enqueued copy uses.
    fn reserve(&self, bytes: usize) -> Result<(&Slot, usize), GpuError> {
        let (mut slot, mut at) = self.place.get();
        if at + bytes > SLOT {
            self.slots[slot].done.record(self.stream.queue())?;
            (slot, at) = (1 - slot, 0);
            self.slots[slot].make_free(&self.stream)?;
        }
        self.place.set((slot, (at + bytes).next_multiple_of(ALIGNMENT)));
        Ok((&self.slots[slot], at))
    }

    /// Waits for all work before it, then copies to the host.
    ///
    /// # Safety
    /// `from` must be device memory of at least as many bytes as `to` has.
    pub(crate) unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        // The stream runs earlier uploads from the slots first, so their bytes may be overwritten.
        let mut coming: Option<(&Slot, &mut [u8])> = None;
        for (i, part) in to.chunks_mut(SLOT).enumerate() {
            let slot = &self.slots[i % 2];
            // SAFETY: the caller's promise.
            unsafe { slot.memory.download(from + (i * SLOT) as u64, part.len())? };
            slot.done.record(self.stream.queue())?;
            if let Some((slot, part)) = coming.replace((slot, part)) {
                slot.empty(&self.stream, part)?;
            }
        }
        if let Some((slot, part)) = coming {
            slot.empty(&self.stream, part)?;
            // Everything enqueued has run, so both slots are free.
            self.place.set((0, 0));
        }
        Ok(())
    }
}

impl Slot {
    /// Waits until the slot's copies have run, which is long ago unless both slots were filled at once.
    fn make_free(&self, stream: &Stream) -> Result<(), GpuError> {
        if !self.done.is_complete()? {
            stream.host_waits().counted(|| self.done.synchronize())?;
        }
        Ok(())
    }

    /// Waits for the slot's last copy, then reads its bytes.
    fn empty(&self, stream: &Stream, to: &mut [u8]) -> Result<(), GpuError> {
        stream.host_waits().counted(|| self.done.synchronize())?;
        // SAFETY: the copy to this slot has run, and the next is enqueued after this.
        unsafe { self.memory.get(to) };
        Ok(())
    }
}
