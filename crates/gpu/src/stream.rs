//! A device and the stream on which kernels and copies are enqueued, in order.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::{Driver, Event, Function, Grid, Properties, Queue};
use crate::error::GpuError;
use crate::host_waits::HostWaits;
use kintsugi_tensor::{DeviceTimestamp, Launch, Mark};

/// A kernel argument passed by value. Its bytes come first, as on every little-endian machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Argument(u64);

/// A table of words that a kernel takes by value, before its other arguments. All arguments together may have 4 kB.
pub(crate) type Table<'a> = &'a [u64];

impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Argument(value)
    }
}

impl From<u32> for Argument {
    fn from(value: u32) -> Self {
        Argument(value.into())
    }
}

impl From<bool> for Argument {
    fn from(value: bool) -> Self {
        Argument(value.into())
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Argument(value.to_bits().into())
    }
}

impl From<f64> for Argument {
    fn from(value: f64) -> Self {
        Argument(value.to_bits())
    }
}

/// An event with a timestamp.
#[derive(Debug)]
pub(crate) struct TimingEvent(Box<dyn Event>);

impl TimingEvent {
    /// Records a timestamp after everything enqueued on a stream so far.
    pub(crate) fn on(driver: &dyn Driver, queue: &dyn Queue) -> Result<Self, GpuError> {
        let event = driver.event(true)?;
        event.record(queue)?;
        Ok(TimingEvent(event))
    }

    /// The time since an earlier event. Waits for both.
    pub(crate) fn since(&self, earlier: &TimingEvent) -> Result<Duration, GpuError> {
        let ms = self.0.ms_since(&*earlier.0)?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl DeviceTimestamp for TimingEvent {
    fn since(&self, earlier: &dyn DeviceTimestamp) -> Duration {
        let earlier = (earlier as &dyn Any).downcast_ref().expect("marks of one device");
        TimingEvent::since(self, earlier).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// A device and the stream on which a rank's operations are enqueued.
///
/// The thread that opens the device makes it current. A rank stays on that thread.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    driver: Arc<dyn Driver>,
    queue: Arc<dyn Queue>,
    /// A hash of everything enqueued since [`Stream::begin_digest`], and the number of calls of
    /// [`Stream::mark_not_repeatable`].
    digest: Rc<Cell<u64>>,
    not_repeatable: Rc<Cell<u64>>,
    /// The recorded launches, while recording is on.
    launches: Rc<RefCell<Option<Vec<Launch>>>>,
    host_waits: Arc<HostWaits>,
}

impl Stream {
    /// A new stream on a device.
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Result<Self, GpuError> {
        let queue = driver.stream(None)?;
        Ok(Stream {
            driver,
            queue,
            digest: Rc::default(),
            not_repeatable: Rc::default(),
            launches: Rc::default(),
            host_waits: Arc::default(),
        })
    }

    /// The device.
    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The raw handle, for libraries.
    pub(crate) fn handle(&self) -> *mut c_void {
        self.queue.handle()
    }

    /// The stream itself, for events and captures.
    pub(crate) fn queue(&self) -> &dyn Queue {
        &*self.queue
    }

    /// What decides how kernels are compiled and launched.
    pub(crate) fn properties(&self) -> &Properties {
        self.driver.properties()
    }

    /// Resets the digest.
    pub(crate) fn begin_digest(&self) {
        self.digest.set(0);
    }

    /// The digest of everything enqueued since the reset. Equal digests stand for equal work, except for the tokens
    /// that are copied.
    pub(crate) fn digest(&self) -> u64 {
        self.digest.get()
    }

    /// Adds words to the digest that describe an enqueued operation or an allocated address.
    pub(crate) fn add_to_digest(&self, words: impl IntoIterator<Item = u64>) {
        /// An odd number with well-spread bits: 2⁶⁴ divided by the golden ratio.
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let mix = |digest: u64, word: u64| (digest.rotate_left(23) ^ word).wrapping_mul(FACTOR);
        self.digest.set(words.into_iter().fold(self.digest.get(), mix));
    }

    /// Adds the hash of a value to the digest.
    pub(crate) fn add_hash_to_digest(&self, what: &impl Hash) {
        let mut hasher = DefaultHasher::new();
        what.hash(&mut hasher);
        self.add_to_digest([hasher.finish()]);
    }

    /// Makes the digest unique: something runs that does not run in every step, or that waits.
    pub(crate) fn mark_not_repeatable(&self) {
        self.not_repeatable.set(self.not_repeatable.get() + 1);
        self.add_to_digest([self.not_repeatable.get()]);
    }

    /// Records a timestamp after everything enqueued so far.
    pub(crate) fn timing_event(&self) -> Result<TimingEvent, GpuError> {
        TimingEvent::on(&*self.driver, &*self.queue)
    }

    /// Records every launch from now on.
    pub(crate) fn record_launches(&self) {
        *self.launches.borrow_mut() = Some(Vec::new());
    }

    /// Whether launches are recorded.
    pub(crate) fn records_launches(&self) -> bool {
        self.launches.borrow().is_some()
    }

    /// Adds a launch to the recorded ones.
    pub(crate) fn add_launch(&self, launch: Launch) {
        if let Some(launches) = &mut *self.launches.borrow_mut() {
            launches.push(launch);
        }
    }

    /// The waits of the rank's host thread.
    pub(crate) fn host_waits(&self) -> &Arc<HostWaits> {
        &self.host_waits
    }

    /// Returns the recorded launches and stops recording.
    pub(crate) fn take_launches(&self) -> Vec<Launch> {
        self.launches.borrow_mut().take().unwrap_or_default()
    }

    /// Enqueues something. If launches are recorded, records it with a mark before and after.
    pub(crate) fn launching<T>(
        &self,
        name: impl FnOnce() -> String,
        enqueue: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        if !self.records_launches() {
            return enqueue();
        }
        let (enqueued, begun) = (Instant::now(), Mark::on_device(self.timing_event()?));
        let result = enqueue()?;
        let ended = Mark::on_device(self.timing_event()?);
        self.add_launch(Launch { name: name(), transfer: None, enqueued, begun, ended });
        Ok(result)
    }

    /// Waits until everything enqueued is done. Reports the failure of an earlier kernel.
    pub(crate) fn synchronize(&self) -> Result<(), GpuError> {
        self.host_waits.counted(|| self.queue.synchronize())
    }

    /// Enqueues a kernel. An empty table means that the kernel takes none.
    ///
    /// # Safety
    /// Table and arguments must match the kernel's parameters in number and type. Device memory they point to must be
    /// large enough and live until the kernel has run.
    pub(crate) unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        table: Table,
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        let (x, y, z) = grid.blocks;
        self.add_to_digest([
            function.0 as u64,
            x.into(),
            y.into(),
            z.into(),
            grid.threads.into(),
            grid.shared.into(),
        ]);
        self.add_to_digest(table.iter().copied().chain(arguments.iter().map(|argument| argument.0)));
        // The driver reads the whole table through this one pointer, so it must be derived from the whole slice.
        let table = (!table.is_empty()).then_some(table.as_ptr());
        let words = arguments.iter().map(|argument| std::ptr::from_ref(&argument.0));
        let mut parameters: Vec<*mut c_void> =
            table.into_iter().chain(words).map(|word| word.cast_mut().cast()).collect();
        // SAFETY: the caller's promise.
        unsafe { self.driver.launch(function, grid, &*self.queue, &mut parameters) }
    }

    /// Enqueues a copy of `bytes` from page-locked memory.
    ///
    /// # Safety
    /// Both ranges must have `bytes` bytes and live until the copy has run. `from` must not be written before that.
    pub(crate) unsafe fn upload(&self, from: *const u8, bytes: usize, to: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.launching(|| "upload".to_owned(), || unsafe { self.queue.upload(from, bytes, to) })
    }

    /// Enqueues a copy of `bytes` to page-locked memory.
    ///
    /// # Safety
    /// Both ranges must have `bytes` bytes and live until the copy has run. `to` must not be used before that.
    pub(crate) unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.launching(|| "download".to_owned(), || unsafe { self.queue.download(from, to, bytes) })
    }

    /// Sets every byte to zero.
    ///
    /// # Safety
    /// `to` must be device memory of at least `bytes`.
    pub(crate) unsafe fn clear(&self, to: u64, bytes: usize) -> Result<(), GpuError> {
        self.add_to_digest([to, bytes as u64]);
        // SAFETY: the caller's promise.
        self.launching(|| "clear".to_owned(), || unsafe { self.queue.clear(to, bytes) })
    }
}
