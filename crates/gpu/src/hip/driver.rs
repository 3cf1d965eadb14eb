//! HIP's run time behind the seam.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::ptr;
use std::sync::Arc;

use super::api::{
    self, CAPTURE_THREAD_LOCAL, EVENT_DISABLE_TIMING, Handle, Hip, NOT_READY, STREAM_NON_BLOCKING, check,
};
use super::hipblaslt::HipBlasLt;
use super::hiprtc;
use super::power::RocmSmiDevice;
use super::rocblas::RocBlas;
use crate::driver::{Driver, Event, Function, Graph, Grid, Module, Properties, Queue, SourceText};
use crate::error::GpuError;
use crate::products::ProductLibrary;
use crate::{PowerMeter, Sensors};

/// The first release of ROCm with the numbers of hipBLASLt's interface that are used here.
const HIPBLASLT_RELEASE: i32 = 6;

/// A device. HIP has no contexts: each thread has a current device, the first one until it sets another.
#[derive(Debug)]
pub(super) struct HipDriver {
    device: c_int,
    properties: Properties,
    name: String,
    architecture: String,
}

impl HipDriver {
    /// Makes device number `device` current on this thread.
    pub(super) fn open(device: usize) -> Result<Arc<dyn Driver>, GpuError> {
        let hip = api::hip()?;
        let device = device as c_int;
        // SAFETY: numbers only.
        unsafe {
            check("hipInit", (hip.hipInit)(0))?;
            check("hipSetDevice", (hip.hipSetDevice)(device))?;
        }
        let found = api::properties(device)?;
        let properties = Properties {
            multiprocessors: found.multiprocessors(),
            shared_bytes: found.shared_bytes(),
            warp: found.warp(),
            mfma: ["gfx90a", "gfx942"].iter().any(|name| found.architecture().starts_with(name)),
            capability: None,
        };
        if !matches!(properties.warp, 32 | 64) {
            return Err(GpuError::Unsupported(format!(
                "{} has waves of {} threads; kernels are written for 32 and 64",
                found.name(),
                properties.warp
            )));
        }
        let (name, architecture) = (found.name(), found.architecture());
        Ok(Arc::new(HipDriver { device, properties, name, architecture }))
    }

    /// The device's address on the bus, such as `0000:c1:00.0`.
    fn bus(&self) -> Result<String, GpuError> {
        let (hip, mut text) = (api::hip()?, [0 as c_char; 32]);
        // SAFETY: the buffer has room for the name, and its length is passed.
        unsafe {
            let status = (hip.hipDeviceGetPCIBusId)(text.as_mut_ptr(), text.len() as c_int, self.device);
            check("hipDeviceGetPCIBusId", status)?;
            Ok(CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
        }
    }
}

/// A handle that a function of the run time makes.
fn made(
    call: &'static str,
    make: impl FnOnce(&Hip, *mut Handle) -> c_int,
) -> Result<(&'static Hip, Handle), GpuError> {
    let hip = api::hip()?;
    let mut handle = ptr::null_mut();
    check(call, make(hip, &raw mut handle))?;
    Ok((hip, handle))
}

impl Driver for HipDriver {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn name(&self) -> Result<String, GpuError> {
        Ok(self.name.clone())
    }

    /// The host's name and the address on the bus, which every version reports.
    fn uuid(&self) -> Result<String, GpuError> {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Ok(format!("{}/{}", host.trim(), self.bus()?))
    }

    fn memory(&self) -> Result<(u64, u64), GpuError> {
        let (hip, mut free, mut total) = (api::hip()?, 0, 0);
        // SAFETY: two integers to write to.
        check("hipMemGetInfo", unsafe { (hip.hipMemGetInfo)(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    fn power_meter(&self) -> Option<Box<dyn PowerMeter>> {
        Some(Box::new(RocmSmiDevice::new(&self.bus().ok()?)?))
    }

    fn sensors(&self) -> Option<Box<dyn Sensors>> {
        None
    }

    fn stream(&self, priority: Option<i32>) -> Result<Arc<dyn Queue>, GpuError> {
        // SAFETY: room for a handle.
        let (hip, stream) = made("hipStreamCreate", |hip, to| unsafe {
            match priority {
                None => (hip.hipStreamCreateWithFlags)(to, STREAM_NON_BLOCKING),
                Some(priority) => (hip.hipStreamCreateWithPriority)(to, STREAM_NON_BLOCKING, priority),
            }
        })?;
        Ok(Arc::new(HipQueue { hip, device: self.device, stream: Shared(stream) }))
    }

    fn event(&self, timing: bool) -> Result<Box<dyn Event>, GpuError> {
        let flags = if timing { 0 } else { EVENT_DISABLE_TIMING };
        // SAFETY: room for a handle.
        let (hip, event) =
            made("hipEventCreateWithFlags", |hip, to| unsafe { (hip.hipEventCreateWithFlags)(to, flags) })?;
        Ok(Box::new(HipEvent { hip, event }))
    }

    unsafe fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        // SAFETY: room for an address.
        Ok(made("hipMalloc", |hip, to| unsafe { (hip.hipMalloc)(to, bytes) })?.1 as u64)
    }

    unsafe fn free(&self, address: u64) {
        if let Ok(hip) = api::hip() {
            // SAFETY: the caller's promise. A failure belongs to an earlier kernel.
            let _ = unsafe { (hip.hipFree)(address as Handle) };
        }
    }

    unsafe fn allocate_host(&self, bytes: usize) -> Result<*mut u8, GpuError> {
        // SAFETY: room for an address.
        Ok(made("hipHostMalloc", |hip, to| unsafe { (hip.hipHostMalloc)(to, bytes, 0) })?.1.cast())
    }

    unsafe fn free_host(&self, address: *mut u8) {
        if let Ok(hip) = api::hip() {
            // SAFETY: the caller's promise. A failure belongs to an earlier kernel.
            let _ = unsafe { (hip.hipHostFree)(address.cast()) };
        }
    }

    fn compile(&self, source: SourceText) -> Result<Vec<u8>, GpuError> {
        hiprtc::code_object(source, &self.architecture)
    }

    unsafe fn load(&self, image: &[u8]) -> Result<Module, GpuError> {
        // SAFETY: the caller's promise.
        let (_, module) = made("hipModuleLoadData", |hip, to| unsafe {
            (hip.hipModuleLoadData)(to, image.as_ptr().cast())
        })?;
        Ok(Module(module as usize))
    }

    fn function(&self, module: Module, name: &CStr) -> Result<Function, GpuError> {
        // SAFETY: the module is loaded and is never unloaded.
        let (_, function) = made("hipModuleGetFunction", |hip, to| unsafe {
            (hip.hipModuleGetFunction)(to, module.0 as Handle, name.as_ptr())
        })?;
        Ok(Function(function as usize))
    }

    unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        on: &dyn Queue,
        parameters: &mut [*mut c_void],
    ) -> Result<(), GpuError> {
        let hip = api::hip()?;
        let (x, y, z) = grid.blocks;
        // SAFETY: the run time copies the parameters before it returns; the rest is the caller's promise.
        let status = unsafe {
            (hip.hipModuleLaunchKernel)(
                function.0 as Handle,
                x,
                y,
                z,
                grid.threads,
                1,
                1,
                grid.shared,
                on.handle(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("hipModuleLaunchKernel", status)
    }

    /// hipBLASLt has kernels for the same GPUs as our own for matrix instructions.
    fn products(&self) -> Result<Box<dyn ProductLibrary>, GpuError> {
        let has_its_numbers = self.properties.mfma && api::hip()?.release()? >= HIPBLASLT_RELEASE;
        let found = has_its_numbers.then(HipBlasLt::new).and_then(Result::ok);
        Ok(match found {
            Some(library) => Box::new(library),
            None => Box::new(RocBlas::new()?),
        })
    }
}

/// A handle that any thread may pass to the run time.
#[derive(Debug)]
struct Shared(Handle);

// SAFETY: the run time accepts a stream from any thread.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A stream.
#[derive(Debug)]
struct HipQueue {
    hip: &'static Hip,
    device: c_int,
    stream: Shared,
}

impl Queue for HipQueue {
    fn handle(&self) -> *mut c_void {
        self.stream.0
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        // SAFETY: a live stream.
        let status = unsafe { (self.hip.hipStreamSynchronize)(self.handle()) };
        check("hipStreamSynchronize", status)
    }

    fn drain(&self) {
        let _ = self.synchronize();
    }

    fn is_idle(&self) -> bool {
        // SAFETY: the stream lives as long as this.
        unsafe {
            (self.hip.hipSetDevice)(self.device) == api::SUCCESS
                && (self.hip.hipStreamQuery)(self.handle()) != NOT_READY
        }
    }

    fn wait(&self, event: &dyn Event) -> Result<(), GpuError> {
        // SAFETY: both live.
        let status = unsafe { (self.hip.hipStreamWaitEvent)(self.handle(), HipEvent::of(event), 0) };
        check("hipStreamWaitEvent", status)
    }

    unsafe fn upload(&self, from: *const u8, bytes: usize, to: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise. The run time only reads from the host.
        let status = unsafe {
            (self.hip.hipMemcpyHtoDAsync)(to as Handle, from.cast_mut().cast(), bytes, self.handle())
        };
        check("hipMemcpyHtoDAsync", status)
    }

    unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        let status =
            unsafe { (self.hip.hipMemcpyDtoHAsync)(to.cast(), from as Handle, bytes, self.handle()) };
        check("hipMemcpyDtoHAsync", status)
    }

    unsafe fn clear(&self, to: u64, bytes: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.hip.hipMemsetD8Async)(to as Handle, 0, bytes, self.handle()) };
        check("hipMemsetD8Async", status)
    }

    fn begin_capture(&self) -> Result<(), GpuError> {
        // SAFETY: a live stream.
        let status = unsafe { (self.hip.hipStreamBeginCapture)(self.handle(), CAPTURE_THREAD_LOCAL) };
        check("hipStreamBeginCapture", status)
    }

    fn end_capture(&self) -> Result<Option<Box<dyn Graph>>, GpuError> {
        // SAFETY: a live stream, and room for a handle.
        let (hip, graph) =
            made("hipStreamEndCapture", |hip, to| unsafe { (hip.hipStreamEndCapture)(self.handle(), to) })?;
        if graph.is_null() {
            return Ok(None);
        }
        // SAFETY: a live graph, which the executable one does not need any more.
        let executable = made("hipGraphInstantiate", |hip, to| unsafe {
            (hip.hipGraphInstantiate)(to, graph, ptr::null_mut(), ptr::null_mut(), 0)
        });
        // SAFETY: as above.
        unsafe { (hip.hipGraphDestroy)(graph) };
        let (hip, executable) = executable?;
        Ok(Some(Box::new(HipGraph { hip, executable, stream: self.handle() })))
    }
}

impl Drop for HipQueue {
    fn drop(&mut self) {
        // SAFETY: made by the run time, destroyed once.
        let _ = unsafe { (self.hip.hipStreamDestroy)(self.handle()) };
    }
}

/// An event.
#[derive(Debug)]
struct HipEvent {
    hip: &'static Hip,
    event: Handle,
}

impl HipEvent {
    fn of(event: &dyn Event) -> Handle {
        let event: &HipEvent = (event as &dyn Any).downcast_ref().expect("an event of this driver");
        event.event
    }
}

impl Event for HipEvent {
    fn record(&self, on: &dyn Queue) -> Result<(), GpuError> {
        // SAFETY: both live.
        check("hipEventRecord", unsafe { (self.hip.hipEventRecord)(self.event, on.handle()) })
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        // SAFETY: a live event.
        check("hipEventSynchronize", unsafe { (self.hip.hipEventSynchronize)(self.event) })
    }

    fn is_complete(&self) -> Result<bool, GpuError> {
        // SAFETY: a live event.
        match unsafe { (self.hip.hipEventQuery)(self.event) } {
            NOT_READY => Ok(false),
            status => check("hipEventQuery", status).map(|()| true),
        }
    }

    fn ms_since(&self, earlier: &dyn Event) -> Result<f32, GpuError> {
        earlier.synchronize()?;
        self.synchronize()?;
        let mut ms = 0.0;
        // SAFETY: both live, and a number to write to.
        let status =
            unsafe { (self.hip.hipEventElapsedTime)(&raw mut ms, HipEvent::of(earlier), self.event) };
        check("hipEventElapsedTime", status)?;
        Ok(ms)
    }
}

impl Drop for HipEvent {
    fn drop(&mut self) {
        // SAFETY: made by the run time, destroyed once.
        let _ = unsafe { (self.hip.hipEventDestroy)(self.event) };
    }
}

/// An executable graph.
struct HipGraph {
    hip: &'static Hip,
    executable: Handle,
    stream: Handle,
}

impl Graph for HipGraph {
    fn launch(&self) -> Result<(), GpuError> {
        // SAFETY: the stream outlives its graphs.
        let status = unsafe { (self.hip.hipGraphLaunch)(self.executable, self.stream) };
        check("hipGraphLaunch", status)
    }
}

impl Drop for HipGraph {
    fn drop(&mut self) {
        // SAFETY: made by the run time, destroyed once.
        let _ = unsafe { (self.hip.hipGraphExecDestroy)(self.executable) };
    }
}
