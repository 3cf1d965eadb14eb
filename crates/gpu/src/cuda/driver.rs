//! NVIDIA's driver behind the seam, through cudarc's wrappers.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUevent_flags, CUfunction_attribute_enum, CUgraphInstantiate_flags, CUmodule,
    CUresult, CUstream, CUstreamCaptureMode,
};
use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result};

use super::cublaslt::CublasLt;
use super::nvml::NvmlDevice;
use super::{libraries, nvrtc};
use crate::driver::{Driver, Event, Function, Graph, Grid, Module, Properties, Queue, SourceText};
use crate::error::GpuError;
use crate::products::ProductLibrary;
use crate::{PowerMeter, Sensors};

/// Shared memory that a block gets without opting in to more.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// Threads of a warp.
const WARP: usize = 32;

/// A device's primary context.
#[derive(Debug)]
pub(crate) struct CudaDriver {
    context: Arc<CudaContext>,
    properties: Properties,
}

impl CudaDriver {
    /// Makes the primary context of device number `device` current on this thread.
    pub(crate) fn open(device: usize) -> Result<Arc<dyn Driver>, GpuError> {
        libraries::DRIVER.require()?;
        let context = CudaContext::new(device)?;
        let multiprocessors =
            context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let shared_bytes = context
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
            as usize;
        let capability = Some(context.compute_capability()?);
        let properties = Properties { multiprocessors, shared_bytes, warp: WARP, mfma: false, capability };
        Ok(Arc::new(CudaDriver { context, properties }))
    }

    /// NVML's view of the device.
    fn nvml(&self) -> Option<NvmlDevice> {
        let mut bus = [0 as c_char; 32];
        // SAFETY: the buffer has room for the name, and its length is passed.
        let status =
            unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as i32, self.context.cu_device()) };
        status.result().ok()?;
        let bus: Vec<u8> = bus.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
        NvmlDevice::new(&CString::new(bus).ok()?)
    }
}

impl Driver for CudaDriver {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn name(&self) -> Result<String, GpuError> {
        Ok(self.context.name()?)
    }

    fn uuid(&self) -> Result<String, GpuError> {
        let bytes = self.context.uuid()?.bytes.map(|byte| byte as u8);
        Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
    }

    fn memory(&self) -> Result<(u64, u64), GpuError> {
        let (free, total) = self.context.mem_get_info()?;
        Ok((free as u64, total as u64))
    }

    fn power_meter(&self) -> Option<Box<dyn PowerMeter>> {
        Some(Box::new(self.nvml()?))
    }

    fn sensors(&self) -> Option<Box<dyn Sensors>> {
        Some(Box::new(self.nvml()?))
    }

    fn stream(&self, priority: Option<i32>) -> Result<Arc<dyn Queue>, GpuError> {
        let stream = match priority {
            None => self.context.new_stream()?,
            Some(priority) => self.context.new_stream_with_priority(priority)?,
        };
        Ok(Arc::new(CudaQueue(stream)))
    }

    fn event(&self, timing: bool) -> Result<Box<dyn Event>, GpuError> {
        let flags =
            if timing { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        Ok(Box::new(StreamEvent(self.context.new_event(Some(flags))?)))
    }

    unsafe fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        // SAFETY: the caller's promise.
        Ok(unsafe { result::malloc_sync(bytes) }?)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller's promise. A failure belongs to an earlier kernel.
        let _ = unsafe { result::free_sync(address) };
    }

    unsafe fn allocate_host(&self, bytes: usize) -> Result<*mut u8, GpuError> {
        // SAFETY: the caller's promise.
        Ok(unsafe { result::malloc_host(bytes, 0) }?.cast())
    }

    unsafe fn free_host(&self, address: *mut u8) {
        // SAFETY: the caller's promise. A failure belongs to an earlier kernel.
        let _ = unsafe { result::free_host(address.cast::<c_void>()) };
    }

    fn compile(&self, source: SourceText) -> Result<Vec<u8>, GpuError> {
        let (major, minor) = self.properties.capability.expect("NVIDIA's GPUs have one");
        nvrtc::cubin(source, source.architecture.unwrap_or(&format!("sm_{major}{minor}")))
    }

    unsafe fn load(&self, image: &[u8]) -> Result<Module, GpuError> {
        // SAFETY: the caller's promise.
        Ok(Module(unsafe { result::module::load_data(image.as_ptr().cast()) }? as usize))
    }

    fn function(&self, module: Module, name: &CStr) -> Result<Function, GpuError> {
        // SAFETY: the module is loaded and is never unloaded before its context ends.
        let function = unsafe { result::module::get_function(module.0 as CUmodule, name.to_owned()) }?;
        Ok(Function(function as usize))
    }

    unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        on: &dyn Queue,
        parameters: &mut [*mut c_void],
    ) -> Result<(), GpuError> {
        let kernel = function.0 as sys::CUfunction;
        if grid.shared > DEFAULT_SHARED_BYTES {
            let room = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // The largest share of the on-chip memory as shared memory, so that as many blocks as possible fit.
            let share = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            for (attribute, value) in [(room, grid.shared as i32), (share, 100)] {
                // SAFETY: a loaded kernel.
                unsafe { result::function::set_function_attribute(kernel, attribute, value)? };
            }
        }
        let threads = (grid.threads, 1, 1);
        // SAFETY: the driver copies the parameters before it returns; the rest is the caller's promise.
        unsafe {
            let stream = on.handle().cast();
            result::launch_kernel(kernel, grid.blocks, threads, grid.shared, stream, parameters)?;
        }
        Ok(())
    }

    fn products(&self) -> Result<Box<dyn ProductLibrary>, GpuError> {
        Ok(Box::new(CublasLt::new()?))
    }
}

/// A stream.
#[derive(Debug)]
struct CudaQueue(Arc<CudaStream>);

impl CudaQueue {
    fn of(queue: &dyn Queue) -> &CudaStream {
        let queue: &CudaQueue = (queue as &dyn Any).downcast_ref().expect("a stream of this driver");
        &queue.0
    }
}

impl Queue for CudaQueue {
    fn handle(&self) -> *mut c_void {
        self.0.cu_stream().cast()
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        Ok(self.0.synchronize()?)
    }

    fn drain(&self) {
        // SAFETY: a live stream.
        let _ = unsafe { result::stream::synchronize(self.0.cu_stream()) };
    }

    fn is_idle(&self) -> bool {
        // SAFETY: the stream lives as long as this. The driver allows queries from any thread with its context.
        self.0.context().bind_to_thread().is_ok()
            && unsafe { sys::cuStreamQuery(self.0.cu_stream()) } != CUresult::CUDA_ERROR_NOT_READY
    }

    fn wait(&self, event: &dyn Event) -> Result<(), GpuError> {
        Ok(self.0.wait(StreamEvent::of(event))?)
    }

    unsafe fn upload(&self, from: *const u8, bytes: usize, to: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            let from = std::slice::from_raw_parts(from, bytes);
            Ok(result::memcpy_htod_async(to, from, self.stream())?)
        }
    }

    unsafe fn download(&self, from: u64, to: *mut u8, bytes: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            let to = std::slice::from_raw_parts_mut(to, bytes);
            Ok(result::memcpy_dtoh_async(to, from, self.stream())?)
        }
    }

    unsafe fn clear(&self, to: u64, bytes: usize) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(to, 0, bytes, self.stream())? };
        Ok(())
    }

    fn begin_capture(&self) -> Result<(), GpuError> {
        Ok(self.0.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?)
    }

    fn end_capture(&self) -> Result<Option<Box<dyn Graph>>, GpuError> {
        let graph = self.0.end_capture(CUgraphInstantiate_flags(0))?;
        Ok(graph.map(|graph| Box::new(CapturedGraph(graph)) as Box<dyn Graph>))
    }
}

impl CudaQueue {
    fn stream(&self) -> CUstream {
        self.0.cu_stream()
    }
}

/// An event.
#[derive(Debug)]
struct StreamEvent(CudaEvent);

impl StreamEvent {
    fn of(event: &dyn Event) -> &CudaEvent {
        let event: &StreamEvent = (event as &dyn Any).downcast_ref().expect("an event of this driver");
        &event.0
    }
}

impl Event for StreamEvent {
    fn record(&self, on: &dyn Queue) -> Result<(), GpuError> {
        Ok(self.0.record(CudaQueue::of(on))?)
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        Ok(self.0.synchronize()?)
    }

    fn is_complete(&self) -> Result<bool, GpuError> {
        Ok(self.0.try_is_complete()?)
    }

    fn ms_since(&self, earlier: &dyn Event) -> Result<f32, GpuError> {
        Ok(StreamEvent::of(earlier).elapsed_ms(&self.0)?)
    }
}

/// An instantiated graph.
struct CapturedGraph(CudaGraph);

impl Graph for CapturedGraph {
    fn launch(&self) -> Result<(), GpuError> {
        Ok(self.0.launch()?)
    }
}

impl From<DriverError> for GpuError {
    fn from(error: DriverError) -> Self {
        GpuError::Driver { driver: "CUDA", reason: format!("{error:?}") }
    }
}
