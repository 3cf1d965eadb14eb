//! A device and the stream on which kernels and copies are enqueued, in order.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdevice_attribute, CUevent_flags, CUfunction_attribute_enum};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::error::CudaError;
use super::host_waits::HostWaits;
use super::libraries;
use kintsugi_tensor::{DeviceTimestamp, Launch, Mark};

/// Shared memory that a block gets without opting in to more.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRange {
    /// Device pointer.
    pub(crate) address: u64,
    /// Bytes from there.
    pub(crate) bytes: u64,
}

/// A loaded kernel. It stays valid as long as the device's context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(pub(crate) sys::CUfunction);

/// The launch configuration of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// Blocks along x, y, z.
    pub(crate) blocks: (u32, u32, u32),
    /// Threads per block.
    pub(crate) threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub(crate) shared: u32,
}

impl Grid {
    /// Blocks in one dimension, no dynamic shared memory.
    pub(crate) fn new(blocks: usize, threads: u32) -> Self {
        let blocks = u32::try_from(blocks).expect("a grid of more blocks than the GPU counts");
        Grid { blocks: (blocks, 1, 1), threads, shared: 0 }
    }
}

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

/// A CUDA event with a timestamp.
#[derive(Debug)]
pub(crate) struct TimingEvent(CudaEvent);

impl TimingEvent {
    /// Records a timestamp after everything enqueued on a stream so far.
    pub(crate) fn on(queue: &CudaStream) -> Result<Self, CudaError> {
        Ok(TimingEvent(queue.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?))
    }

    /// The time since an earlier event. Waits for both.
    pub(crate) fn since(&self, earlier: &TimingEvent) -> Result<Duration, CudaError> {
        let ms = earlier.0.elapsed_ms(&self.0)?;
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
/// The thread that creates the stream makes the device's primary context current. A rank stays on that thread.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    context: Arc<CudaContext>,
    queue: Arc<CudaStream>,
    multiprocessors: u32,
    shared_bytes: u32,
    capability: (i32, i32),
    /// A hash of everything enqueued since [`Stream::begin_digest`], and the number of calls of
    /// [`Stream::mark_not_repeatable`].
    digest: Rc<Cell<u64>>,
    not_repeatable: Rc<Cell<u64>>,
    /// The recorded launches, while recording is on.
    launches: Rc<RefCell<Option<Vec<Launch>>>>,
    host_waits: Arc<HostWaits>,
}

impl Stream {
    /// A new stream on device number `device`.
    pub(crate) fn new(device: usize) -> Result<Self, CudaError> {
        libraries::DRIVER.require()?;
        let context = CudaContext::new(device)?;
        let queue = context.new_stream()?;
        let multiprocessors =
            context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared_bytes = context
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
            as u32;
        let capability = context.compute_capability()?;
        Ok(Stream {
            context,
            queue,
            multiprocessors,
            shared_bytes,
            capability,
            digest: Rc::default(),
            not_repeatable: Rc::default(),
            launches: Rc::default(),
            host_waits: Arc::default(),
        })
    }

    /// The device's primary context.
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The raw handle, for libraries.
    pub(crate) fn handle(&self) -> sys::CUstream {
        self.queue.cu_stream()
    }

    /// The stream itself, for events and captures.
    pub(crate) fn queue(&self) -> &Arc<CudaStream> {
        &self.queue
    }

    /// Streaming multiprocessors of the device.
    pub(crate) fn multiprocessors(&self) -> usize {
        self.multiprocessors as usize
    }

    /// Most shared memory that a block can request, in bytes.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared_bytes as usize
    }

    /// Compute capability, major and minor: (9, 0) on an H200.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.capability
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
    pub(crate) fn timing_event(&self) -> Result<TimingEvent, CudaError> {
        TimingEvent::on(&self.queue)
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
        enqueue: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
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
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        Ok(self.host_waits.counted(|| self.queue.synchronize())?)
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
    ) -> Result<(), CudaError> {
        if grid.shared > DEFAULT_SHARED_BYTES {
            let room = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // The largest share of the on-chip memory as shared memory, so that as many blocks as possible fit.
            let share = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            for (attribute, value) in [(room, grid.shared as i32), (share, 100)] {
                // SAFETY: a loaded kernel.
                unsafe { result::function::set_function_attribute(function.0, attribute, value)? };
            }
        }
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
        // SAFETY: the driver copies the parameters before it returns; the rest is the caller's promise.
        unsafe {
            result::launch_kernel(
                function.0,
                grid.blocks,
                (grid.threads, 1, 1),
                grid.shared,
                self.handle(),
                &mut parameters,
            )?;
        }
        Ok(())
    }

    /// Enqueues a copy of `bytes` from page-locked memory.
    ///
    /// # Safety
    /// Both ranges must have `bytes` bytes and live until the copy has run. `from` must not be written before that.
    pub(crate) unsafe fn upload(&self, from: *const u8, bytes: usize, to: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.launching(
            || "upload".to_owned(),
            || unsafe {
                let from = std::slice::from_raw_parts(from, bytes);
                Ok(result::memcpy_htod_async(to, from, self.handle())?)
            },
        )
    }

    /// Enqueues a copy of `bytes` to page-locked memory.
    ///
    /// # Safety
    /// Both ranges must have `bytes` bytes and live until the copy has run. `to` must not be used before that.
    pub(crate) unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.launching(
            || "download".to_owned(),
            || unsafe {
                let to = std::slice::from_raw_parts_mut(to, bytes);
                Ok(result::memcpy_dtoh_async(to, from, self.handle())?)
            },
        )
    }

    /// Sets every byte to zero.
    ///
    /// # Safety
    /// `to` must be device memory of at least `bytes`.
    pub(crate) unsafe fn clear(&self, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.add_to_digest([to, bytes as u64]);
        // SAFETY: the caller's promise.
        self.launching(
            || "clear".to_owned(),
            || unsafe { Ok(result::memset_d8_async(to, 0, bytes, self.handle())?) },
        )
    }
}
