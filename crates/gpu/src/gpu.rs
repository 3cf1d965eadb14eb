//! Properties of a GPU: name and memory from the driver, energy and power from NVML.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaContext, sys};
use libloading::Library;

use super::error::CudaError;
use super::libraries;

/// A GPU, as the driver reports it.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
}

impl Gpu {
    /// GPU number `device`.
    pub fn new(device: usize) -> Result<Self, CudaError> {
        libraries::DRIVER.require()?;
        Ok(Gpu { context: CudaContext::new(device)? })
    }

    /// Its name.
    pub fn name(&self) -> Result<String, CudaError> {
        Ok(self.context.name()?)
    }

    /// The GPU's own identifier, as 32 hexadecimal digits.
    pub fn uuid(&self) -> Result<String, CudaError> {
        let bytes = self.context.uuid()?.bytes.map(|byte| byte as u8);
        Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
    }

    /// Streaming multiprocessors.
    pub fn multiprocessors(&self) -> Result<usize, CudaError> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(self.context.attribute(attribute)? as usize)
    }

    /// Free bytes and total bytes. Memory of other programs on the GPU counts as used.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (free, total) = self.context.mem_get_info()?;
        Ok((free as u64, total as u64))
    }

    /// Its NVML handle, for energy and power. `None` if NVML is missing or does not support the GPU.
    pub fn nvml(&self) -> Option<NvmlDevice> {
        let mut bus = [0 as c_char; 32];
        // SAFETY: the buffer has room for the name, and its length is passed.
        let status =
            unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), bus.len() as i32, self.context.cu_device()) };
        status.result().ok()?;
        let bus: Vec<u8> = bus.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
        NvmlDevice::new(&CString::new(bus).ok()?)
    }
}

/// NVML's handle of one GPU (nvml.h).
#[derive(Debug)]
pub struct NvmlDevice {
    library: Library,
    device: *mut c_void,
}

type Initialise = unsafe extern "C" fn() -> i32;
type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> i32;
type ReadWide = unsafe extern "C" fn(*mut c_void, *mut u64) -> i32;
type ReadNarrow = unsafe extern "C" fn(*mut c_void, *mut u32) -> i32;

impl NvmlDevice {
    fn new(bus: &CString) -> Option<Self> {
        let library = libraries::nvml_library()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: `nvmlInit_v2(void)` and `nvmlDeviceGetHandleByPciBusId_v2(const char *, nvmlDevice_t *)`, with a
        // name that ends in zero and a pointer to write to.
        let status = unsafe {
            library.get::<Initialise>(b"nvmlInit_v2\0").ok()?();
            library.get::<Find>(b"nvmlDeviceGetHandleByPciBusId_v2\0").ok()?(bus.as_ptr(), &raw mut device)
        };
        (status == 0).then_some(NvmlDevice { library, device })
    }

    /// Joules that the GPU has used since its driver was loaded.
    pub fn energy(&self) -> Option<f64> {
        let mut millijoules = 0;
        // SAFETY: `nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t, unsigned long long *)`.
        let status = unsafe {
            let name = b"nvmlDeviceGetTotalEnergyConsumption\0";
            self.library.get::<ReadWide>(name).ok()?(self.device, &raw mut millijoules)
        };
        (status == 0).then_some(millijoules as f64 / 1e3)
    }

    /// Watts that it draws now.
    pub fn power(&self) -> Option<f64> {
        self.narrow(b"nvmlDeviceGetPowerUsage\0").map(|milliwatts| f64::from(milliwatts) / 1e3)
    }

    /// The power limit in watts.
    pub fn power_limit(&self) -> Option<f64> {
        self.narrow(b"nvmlDeviceGetEnforcedPowerLimit\0").map(|milliwatts| f64::from(milliwatts) / 1e3)
    }

    fn narrow(&self, name: &[u8]) -> Option<u32> {
        let mut value = 0;
        // SAFETY: both are `(nvmlDevice_t, unsigned int *)`.
        let status = unsafe { self.library.get::<ReadNarrow>(name).ok()?(self.device, &raw mut value) };
        (status == 0).then_some(value)
    }
}

// SAFETY: NVML may be called from any thread.
unsafe impl Send for NvmlDevice {}
