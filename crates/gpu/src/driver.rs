//! The seam between the backend and a GPU's driver. The backend is written once against these traits; `cuda` and `hip`
//! implement them.
//!
//! Addresses are numbers, because most of them lie inside of the one slab. Kernels and modules live as long as the driver.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;

use crate::error::GpuError;
use crate::products::ProductLibrary;
use crate::{PowerMeter, Sensors};

/// What decides how kernels are compiled and launched.
#[derive(Clone, Debug)]
pub(crate) struct Properties {
    /// Streaming multiprocessors, or compute units.
    pub(crate) multiprocessors: usize,
    /// Most shared memory (LDS) that a block can request.
    pub(crate) shared_bytes: usize,
    /// Threads of a warp (a wave).
    pub(crate) warp: usize,
    /// Whether it has the matrix instructions of AMD's gfx90a and gfx942.
    pub(crate) mfma: bool,
    /// NVIDIA's compute capability, major and minor: (9, 0) on an H200. `None` on other GPUs.
    pub(crate) capability: Option<(i32, i32)>,
}

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRange {
    /// Device pointer.
    pub(crate) address: u64,
    /// Bytes from there.
    pub(crate) bytes: u64,
}

/// A loaded module of kernels, as the driver's handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Module(pub(crate) usize);

/// A loaded kernel, as the driver's handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(pub(crate) usize);

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

/// Kernel sources to compile: a file's name, its text with the common header, and definitions (`NAME=value`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceText<'a> {
    pub(crate) name: &'a str,
    pub(crate) text: &'a str,
    /// The one architecture that the file is for, if it names one.
    pub(crate) architecture: Option<&'a str>,
    pub(crate) definitions: &'a [String],
}

/// A device that a driver has opened. It is current on the thread that opened it.
pub(crate) trait Driver: fmt::Debug + Send + Sync {
    /// What decides how kernels are compiled and launched.
    fn properties(&self) -> &Properties;

    /// The name of the device.
    fn name(&self) -> Result<String, GpuError>;

    /// An identifier that no other device has.
    fn uuid(&self) -> Result<String, GpuError>;

    /// Free bytes and total bytes of its memory.
    fn memory(&self) -> Result<(u64, u64), GpuError>;

    /// The library that measures its power.
    fn power_meter(&self) -> Option<Box<dyn PowerMeter>>;

    /// The library that sees its health.
    fn sensors(&self) -> Option<Box<dyn Sensors>>;

    /// A new stream. One with a `priority` below zero goes before others.
    fn stream(&self, priority: Option<i32>) -> Result<Arc<dyn Queue>, GpuError>;

    /// A new event, with a timestamp if it is for `timing`.
    fn event(&self, timing: bool) -> Result<Box<dyn Event>, GpuError>;

    /// Allocates device memory.
    ///
    /// # Safety
    /// The device is current on this thread.
    unsafe fn allocate(&self, bytes: usize) -> Result<u64, GpuError>;

    /// Frees device memory.
    ///
    /// # Safety
    /// The address came from [`Driver::allocate`], and nothing uses the memory any more.
    unsafe fn free(&self, address: u64);

    /// Allocates page-locked host memory.
    ///
    /// # Safety
    /// The device is current on this thread.
    unsafe fn allocate_host(&self, bytes: usize) -> Result<*mut u8, GpuError>;

    /// Frees page-locked host memory.
    ///
    /// # Safety
    /// The address came from [`Driver::allocate_host`], and nothing uses the memory any more.
    unsafe fn free_host(&self, address: *mut u8);

    /// The machine code of a kernel file for this device, from the disk cache if it is there.
    fn compile(&self, source: SourceText) -> Result<Vec<u8>, GpuError>;

    /// Loads machine code.
    ///
    /// # Safety
    /// It was made by [`Driver::compile`], and the device is current on this thread.
    unsafe fn load(&self, image: &[u8]) -> Result<Module, GpuError>;

    /// A kernel of a module.
    fn function(&self, module: Module, name: &CStr) -> Result<Function, GpuError>;

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The parameters must point to arguments that match the kernel's, and device memory that they point to must be large
    /// enough and live until the kernel has run.
    unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        on: &dyn Queue,
        parameters: &mut [*mut c_void],
    ) -> Result<(), GpuError>;

    /// The library of matrix products, for the device.
    fn products(&self) -> Result<Box<dyn ProductLibrary>, GpuError>;
}

/// A stream, on which work runs in order.
pub(crate) trait Queue: Any + fmt::Debug + Send + Sync {
    /// The raw handle, for libraries.
    fn handle(&self) -> *mut c_void;

    /// Waits until everything enqueued is done. Reports the failure of an earlier kernel.
    fn synchronize(&self) -> Result<(), GpuError>;

    /// The same without making the device current on this thread first.
    fn drain(&self);

    /// Whether everything enqueued is done, or has failed. Any thread may ask.
    fn is_idle(&self) -> bool;

    /// Lets work that is enqueued from now on begin only when the event has happened.
    fn wait(&self, event: &dyn Event) -> Result<(), GpuError>;

    /// Enqueues a copy from page-locked memory.
    ///
    /// # Safety
    /// Both ranges must have `bytes` bytes and live until the copy has run. `from` must not be written before that.
    unsafe fn upload(&self, from: *const u8, bytes: usize, to: u64) -> Result<(), GpuError>;

    /// Enqueues a copy to page-locked memory.
    ///
    /// # Safety
    /// Both ranges must have `bytes` bytes and live until the copy has run. `to` must not be used before that.
    unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), GpuError>;

    /// Sets every byte to zero.
    ///
    /// # Safety
    /// `to` must be device memory of at least `bytes`.
    unsafe fn clear(&self, to: u64, bytes: usize) -> Result<(), GpuError>;

    /// Records what this thread enqueues from now on instead of running it.
    fn begin_capture(&self) -> Result<(), GpuError>;

    /// Ends the recording. `None` if there is nothing in it.
    fn end_capture(&self) -> Result<Option<Box<dyn Graph>>, GpuError>;
}

/// A place on a stream.
pub(crate) trait Event: Any + fmt::Debug {
    /// Moves it behind everything that was enqueued on a stream so far.
    fn record(&self, on: &dyn Queue) -> Result<(), GpuError>;

    /// Waits for it.
    fn synchronize(&self) -> Result<(), GpuError>;

    /// Whether it has happened. Reports the failure of an earlier kernel.
    fn is_complete(&self) -> Result<bool, GpuError>;

    /// Milliseconds since an earlier event. Waits for both.
    fn ms_since(&self, earlier: &dyn Event) -> Result<f32, GpuError>;
}

/// A captured step.
pub(crate) trait Graph {
    /// Enqueues it on the stream on which it was captured.
    fn launch(&self) -> Result<(), GpuError>;
}
