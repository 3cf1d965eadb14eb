//! A second stream of a device, on which transfers run while operations run on the first.

use std::ffi::c_void;

/// A stream beside the one on which a rank's operations are enqueued.
///
/// A transfer on it begins when the operations that were enqueued before it have run, and operations that are enqueued after
/// [`SideStream::join`] begin when the transfer has ended. Both are dependencies between streams: the host waits for neither.
pub trait SideStream {
    /// Enqueues a transfer behind everything that was enqueued on the device so far. `enqueue` receives the raw handle of
    /// this stream and enqueues the transfer there.
    fn start(&self, transfer: &SideTransfer, enqueue: &mut dyn FnMut(*mut c_void)) -> SideEvent;

    /// Lets operations that are enqueued from now on begin only when a transfer has ended.
    fn join(&self, event: SideEvent);

    /// Waits until everything enqueued here has run, and drops the captured graphs of the device, which may contain transfers of
    /// this stream.
    fn finish(&self);

    /// A view of this stream for another thread.
    fn watch(&self) -> Box<dyn StreamWatch>;
}

/// What a transfer on a side stream is.
#[derive(Clone, Copy)]
pub struct SideTransfer<'a> {
    /// Its name in a trace.
    pub name: &'a dyn Fn() -> String,
    /// Bytes that the rank sends, or receives in a message.
    pub bytes: u64,
    /// Its addresses, lengths and kind. Transfers with equal words do the same, which lets a device replay them.
    pub words: &'a [u64],
}

/// The end of a transfer on a side stream.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "operations must be joined with the transfer before they use its memory"]
pub struct SideEvent(pub usize);

/// A view of a stream for another thread, which watches whether the stream still runs.
pub trait StreamWatch: Send + Sync {
    /// Whether everything enqueued on the stream has run, or has failed.
    fn is_idle(&self) -> bool;

    /// The number of the wait for the device that the rank's host thread is in now, if it is in one.
    fn host_wait(&self) -> Option<u64>;
}
