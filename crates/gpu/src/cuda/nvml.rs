//! Energy and power of an NVIDIA GPU by NVML.

use std::ffi::{CString, c_char, c_void};

use libloading::Library;

use super::libraries;
use crate::PowerMeter;

/// NVML's handle of one GPU (nvml.h).
#[derive(Debug)]
pub(super) struct NvmlDevice {
    library: Library,
    device: *mut c_void,
}

type Initialise = unsafe extern "C" fn() -> i32;
type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> i32;
type ReadWide = unsafe extern "C" fn(*mut c_void, *mut u64) -> i32;
type ReadNarrow = unsafe extern "C" fn(*mut c_void, *mut u32) -> i32;

impl NvmlDevice {
    /// The GPU at an address on the bus. `None` if NVML is missing or does not support it.
    pub(super) fn new(bus: &CString) -> Option<Self> {
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

    fn narrow(&self, name: &[u8]) -> Option<u32> {
        let mut value = 0;
        // SAFETY: both are `(nvmlDevice_t, unsigned int *)`.
        let status = unsafe { self.library.get::<ReadNarrow>(name).ok()?(self.device, &raw mut value) };
        (status == 0).then_some(value)
    }
}

impl PowerMeter for NvmlDevice {
    fn energy(&self) -> Option<f64> {
        let mut millijoules = 0;
        // SAFETY: `nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t, unsigned long long *)`.
        let status = unsafe {
            let name = b"nvmlDeviceGetTotalEnergyConsumption\0";
            self.library.get::<ReadWide>(name).ok()?(self.device, &raw mut millijoules)
        };
        (status == 0).then_some(millijoules as f64 / 1e3)
    }

    fn power(&self) -> Option<f64> {
        self.narrow(b"nvmlDeviceGetPowerUsage\0").map(|milliwatts| f64::from(milliwatts) / 1e3)
    }

    fn power_limit(&self) -> Option<f64> {
        self.narrow(b"nvmlDeviceGetEnforcedPowerLimit\0").map(|milliwatts| f64::from(milliwatts) / 1e3)
    }
}

// SAFETY: NVML may be called from any thread.
unsafe impl Send for NvmlDevice {}
