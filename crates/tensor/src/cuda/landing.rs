//! Where fetched numbers arrive: small page-locked places, used again and again, each with the event that says when.

use std::cell::RefCell;
use std::rc::Rc;

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;

use super::error::CudaError;
use super::pinned::Pinned;
use super::stream::Stream;

/// Bytes of a place: a page.
const BYTES: usize = 4096;

/// The places of one stream. There are as many as were ever on their way at once.
#[derive(Debug)]
pub(crate) struct Landings {
    stream: Stream,
    free: Rc<RefCell<Vec<Landing>>>,
}

#[derive(Debug)]
struct Landing {
    memory: Pinned,
    arrived: CudaEvent,
}

/// Bytes on their way. One that is never waited for may give its place back early: whatever goes there next is
/// enqueued later.
#[derive(Debug)]
pub(crate) struct Coming {
    bytes: usize,
    landing: Option<Landing>,
    free: Rc<RefCell<Vec<Landing>>>,
}

impl Landings {
    /// No place has been needed yet.
    pub(crate) fn new(stream: &Stream) -> Self {
        Landings { stream: stream.clone(), free: Rc::default() }
    }

    /// Enqueues a copy of up to a page from the card.
    ///
    /// # Safety
    /// `from` must be device memory of at least `bytes`.
    pub(crate) unsafe fn fetch(&self, from: u64, bytes: usize) -> Result<Coming, CudaError> {
        let free = self.free.borrow_mut().pop();
        let landing = match free {
            Some(landing) => landing,
            None => Landing {
                memory: Pinned::new(&self.stream, BYTES)?,
                arrived: self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING))?,
            },
        };
        // SAFETY: the caller's promise.
        unsafe { landing.memory.download(from, bytes)? };
        landing.arrived.record(self.stream.queue())?;
        Ok(Coming { bytes, landing: Some(landing), free: Rc::clone(&self.free) })
    }
}

impl Coming {
    /// Waits for the copy, and for nothing that was enqueued after it.
    pub(crate) fn wait(&self) -> Result<Vec<u8>, CudaError> {
        let landing = self.landing.as_ref().expect("a place until it is dropped");
        landing.arrived.synchronize()?;
        let mut bytes = vec![0; self.bytes];
        // SAFETY: the copy has run, and nothing else is enqueued for this place while it is held here.
        unsafe { landing.memory.get(&mut bytes) };
        Ok(bytes)
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.free.borrow_mut().extend(self.landing.take());
    }
}
