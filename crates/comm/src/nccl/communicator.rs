//! A communicator of NCCL that another thread can abort.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use kintsugi_spec::Group;
use kintsugi_tensor::StreamWatch;

use super::library::{Api, EnqueueTarget, Handle, NcclError};
use crate::activity::Activity;

/// How long an abort waits for a call of the rank's own thread to return.
const PATIENCE: Duration = Duration::from_secs(1);

/// A communicator, for the thread of its rank and for the watchdog.
pub(super) struct Communicator {
    api: &'static Api,
    handle: Handle,
    /// Whether the library still has it. Every call with the handle is made under this lock.
    alive: Mutex<bool>,
    /// The group that it belongs to.
    pub group: Group,
    /// The stream on which it works; none for one that only makes others.
    watch: Option<Box<dyn StreamWatch>>,
    /// The transfer that was started last.
    last: Mutex<Option<StartedTransfer>>,
}

/// A transfer, and the rank of the job that this rank waits for in it, if it is a single one.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartedTransfer {
    pub activity: Activity,
    pub peer: Option<usize>,
}

impl Communicator {
    pub fn new(api: &'static Api, handle: Handle, group: Group, watch: Option<Box<dyn StreamWatch>>) -> Self {
        Communicator { api, handle, alive: Mutex::new(true), group, watch, last: Mutex::default() }
    }

    /// Enqueues a transfer on a stream, unless the communicator was aborted.
    pub fn enqueue(
        &self,
        transfer: StartedTransfer,
        stream: *mut c_void,
        enqueue: impl FnOnce(&Api, EnqueueTarget) -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        let alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        if !*alive {
            return Ok(());
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(transfer);
        enqueue(self.api, EnqueueTarget { communicator: self.handle, stream })
    }

    /// Splits it: see [`Api::split`].
    pub fn split(
        &self,
        color: Option<usize>,
        key: usize,
        channels: u32,
    ) -> Result<Option<Handle>, NcclError> {
        let alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        if *alive { self.api.split(self.handle, color, key, channels) } else { Ok(None) }
    }

    /// The error that the library has found in its work. `None` also while another thread uses it.
    pub fn async_error(&self) -> Option<NcclError> {
        let alive = match self.alive.try_lock() {
            Ok(alive) => alive,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if !*alive {
            return None;
        }
        // SAFETY: it is alive, and the lock is held.
        unsafe { self.api.async_error(self.handle) }.err()
    }

    /// The transfer that was started last, if its stream still runs.
    pub fn running(&self) -> Option<StartedTransfer> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.filter(|_| self.watch.as_ref().is_some_and(|watch| !watch.is_idle()))
    }

    /// The number of the wait for the device that the rank's host thread is in, if it is in one.
    pub fn host_wait(&self) -> Option<u64> {
        self.watch.as_ref().and_then(|watch| watch.host_wait())
    }

    /// Ends its work at once, from any thread.
    pub fn abort(&self) {
        let begun = Instant::now();
        loop {
            match self.alive.try_lock() {
                Ok(mut alive) => return self.abort_if(&mut alive),
                Err(TryLockError::Poisoned(poisoned)) => return self.abort_if(&mut poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if begun.elapsed() > PATIENCE => break,
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(10)),
            }
        }
        // SAFETY: it was alive when the call began that holds the lock, and only `abort` and `drop` end it. That call waits for
        // ranks that will not come, and an abort is the library's way to end it. The process ends soon.
        unsafe { self.api.abort(self.handle) };
    }

    fn abort_if(&self, alive: &mut bool) {
        if std::mem::replace(alive, false) {
            // SAFETY: it was alive, and nobody uses it when it is not.
            unsafe { self.api.abort(self.handle) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::mem::replace(self.alive.get_mut().unwrap_or_else(PoisonError::into_inner), false) {
            // SAFETY: it was alive, and nobody else has it.
            unsafe { self.api.destroy(self.handle) };
        }
    }
}
