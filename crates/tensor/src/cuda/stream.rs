//! One device, one stream on it, and what is enqueued there: kernels and copies, in order.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute, CUevent_flags, CUfunction_attribute_enum};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::error::CudaError;
use super::libraries;
use crate::{Launch, Mark};

/// Shared memory that a block gets without being asked for by name.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRange {
    /// Device pointer.
    pub(crate) address: u64,
    /// Bytes from there.
    pub(crate) bytes: u64,
}

/// A kernel, loaded for as long as its device's context lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(pub(crate) sys::CUfunction);

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// Blocks along x, y, z.
    pub(crate) blocks: (u32, u32, u32),
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub(crate) shared: u32,
}

impl Grid {
    /// Blocks in one dimension, no dynamic shared memory.
    pub(crate) fn new(blocks: usize, threads: u32) -> Self {
        let blocks = u32::try_from(blocks).expect("a grid of more blocks than the card counts");
        Grid { blocks: (blocks, 1, 1), threads, shared: 0 }
    }
}

/// A kernel's argument, by value: its bytes come first, as on every little-endian machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Argument(u64);

/// A table of words that a kernel takes by value, before its other arguments; all arguments together are 4 kB at most.
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

/// A moment of a stream, by the card's clock.
#[derive(Debug)]
pub(crate) struct Moment(CudaEvent);

impl Moment {
    /// How long after an earlier one. Waits for both.
    pub(crate) fn since(&self, earlier: &Moment) -> Result<Duration, CudaError> {
        let ms = earlier.0.elapsed_ms(&self.0)?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

/// A device and the one stream on which a rank's work is enqueued.
///
/// The device's primary context is made current on the thread that makes the stream, and a rank stays on its thread.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    context: Arc<CudaContext>,
    queue: Arc<CudaStream>,
    multiprocessors: u32,
    shared_bytes: u32,
    capability: (i32, i32),
    /// Of what was enqueued, and how often something was new.
    digest: Rc<Cell<u64>>,
    news: Rc<Cell<u64>>,
    /// What was enqueued, if somebody wants to know.
    launches: Rc<RefCell<Option<Vec<Launch>>>>,
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
            news: Rc::default(),
            launches: Rc::default(),
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

    /// Most shared memory that a block can ask for, bytes.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared_bytes as usize
    }

    /// Compute capability, major and minor: (9, 0) on an H200.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Forgets what was enqueued.
    pub(crate) fn begin_digest(&self) {
        self.digest.set(0);
    }

    /// Of what was enqueued since: two that are the same stand for the same work, but for the tokens that are copied.
    pub(crate) fn digest(&self) -> u64 {
        self.digest.get()
    }

    /// Something is enqueued, or an address given out, that these words describe.
    pub(crate) fn note(&self, words: impl IntoIterator<Item = u64>) {
        /// Odd, with bits everywhere: 2⁶⁴ divided by the golden ratio.
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let mix = |digest: u64, word: u64| (digest.rotate_left(23) ^ word).wrapping_mul(FACTOR);
        self.digest.set(words.into_iter().fold(self.digest.get(), mix));
    }

    /// The same for what is described by more than numbers.
    pub(crate) fn note_all_of(&self, what: &impl Hash) {
        let mut hasher = DefaultHasher::new();
        what.hash(&mut hasher);
        self.note([hasher.finish()]);
    }

    /// Something is done that is not done every time, or that waits: no digest is the same with it.
    pub(crate) fn novel(&self) {
        self.news.set(self.news.get() + 1);
        self.note([self.news.get()]);
    }

    /// Marks the end of what is enqueued so far.
    pub(crate) fn moment(&self) -> Result<Moment, CudaError> {
        Ok(Moment(self.queue.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?))
    }

    /// Notes from now on what is enqueued.
    pub(crate) fn note_launches(&self) {
        *self.launches.borrow_mut() = Some(Vec::new());
    }

    /// What was noted; no more is.
    pub(crate) fn launches(&self) -> Vec<Launch> {
        self.launches.borrow_mut().take().unwrap_or_default()
    }

    /// Enqueues something, between marks if launches are noted.
    pub(crate) fn launching<T>(
        &self,
        name: impl FnOnce() -> String,
        enqueue: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        if self.launches.borrow().is_none() {
            return enqueue();
        }
        let begun = Mark::on_card(self.moment()?);
        let enqueued = enqueue()?;
        let launch = Launch { name: name(), begun, ended: Mark::on_card(self.moment()?) };
        self.launches.borrow_mut().as_mut().expect("they are noted").push(launch);
        Ok(enqueued)
    }

    /// Waits until everything enqueued is done; an earlier kernel's failure shows here.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        Ok(self.queue.synchronize()?)
    }

    /// Enqueues a kernel. An empty table is none.
    ///
    /// # Safety
    /// Table and arguments must be those of the kernel, in number and type, and device memory they point to must be
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
            // All of a multiprocessor's memory that can be shared, so that as many blocks fit as can.
            let share = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            for (attribute, value) in [(room, grid.shared as i32), (share, 100)] {
                // SAFETY: a loaded kernel.
                unsafe { result::function::set_function_attribute(function.0, attribute, value)? };
            }
        }
        let (x, y, z) = grid.blocks;
        self.note([function.0 as u64, x.into(), y.into(), z.into(), grid.threads.into(), grid.shared.into()]);
        self.note(table.iter().copied().chain(arguments.iter().map(|argument| argument.0)));
        // The driver reads all of the table from the one pointer, so it has to be one to all of it.
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
    /// Both must have so many bytes, live until the copy has run, and `from` must not be written before.
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
    /// Both must have so many bytes, live until the copy has run, and `to` must not be used before.
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
        self.note([to, bytes as u64]);
        // SAFETY: the caller's promise.
        self.launching(
            || "clear".to_owned(),
            || unsafe { Ok(result::memset_d8_async(to, 0, bytes, self.handle())?) },
        )
    }
}
