//! Small asynchronous copies to the host, for [`Fetch`](kintsugi_tensor::Fetch). Each copy uses a page of page-locked memory from
//! a pool, and an event that reports its completion.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::host_waits::HostWaits;
use super::pinned::Pinned;
use super::stream::Stream;
use crate::driver::Event;
use crate::error::GpuError;

/// Bytes of a page.
const BYTES: usize = 4096;

/// The pages of one stream. The pool grows to the largest number of copies in flight at once.
#[derive(Debug)]
pub(crate) struct ReadbackPool {
    stream: Stream,
    free: Rc<RefCell<Vec<PinnedPage>>>,
}

#[derive(Debug)]
struct PinnedPage {
    memory: Pinned,
    completed: Box<dyn Event>,
}

/// A copy to the host that is in flight. If it is dropped without waiting, its page is reused at once, which is safe
/// because the next copy into it is enqueued later.
#[derive(Debug)]
pub(crate) struct Readback {
    bytes: usize,
    page: Option<PinnedPage>,
    free: Rc<RefCell<Vec<PinnedPage>>>,
    waits: Arc<HostWaits>,
}

impl ReadbackPool {
    /// An empty pool.
    pub(crate) fn new(stream: &Stream) -> Self {
        ReadbackPool { stream: stream.clone(), free: Rc::default() }
    }

    /// Enqueues a copy of up to a page from the device.
    ///
    /// # Safety
    /// `from` must be device memory of at least `bytes`.
    pub(crate) unsafe fn fetch(&self, from: u64, bytes: usize) -> Result<Readback, GpuError> {
        let free = self.free.borrow_mut().pop();
        let page = match free {
            Some(page) => page,
            None => PinnedPage {
                memory: Pinned::new(&self.stream, BYTES)?,
                completed: self.stream.driver().event(false)?,
            },
        };
        // SAFETY: the caller's promise.
        unsafe { page.memory.download(from, bytes)? };
        page.completed.record(self.stream.queue())?;
        let waits = Arc::clone(self.stream.host_waits());
        Ok(Readback { bytes, page: Some(page), free: Rc::clone(&self.free), waits })
    }
}

impl Readback {
    /// Waits for the copy, but for nothing that was enqueued after it.
    pub(crate) fn wait(&self) -> Result<Vec<u8>, GpuError> {
        let page = self.page.as_ref().expect("a page until it is dropped");
        self.waits.during(|| page.completed.synchronize())?;
        let mut bytes = vec![0; self.bytes];
        // SAFETY: the copy has run, and no other copy uses this page while it is held here.
        unsafe { page.memory.get(&mut bytes) };
        Ok(bytes)
    }
}

impl Drop for Readback {
    fn drop(&mut self) {
        self.free.borrow_mut().extend(self.page.take());
    }
}
