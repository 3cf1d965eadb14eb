//! Energy, power and health of an NVIDIA GPU by NVML.

use std::ffi::{CStr, c_char, c_void};
use std::time::Duration;

use libloading::Library;

use super::libraries;
use crate::{PowerMeter, Sensors};

/// NVML's handle of one GPU (nvml.h).
#[derive(Debug)]
pub(super) struct NvmlDevice {
    library: Library,
    device: *mut c_void,
    /// What tells of critical errors. `None` if the GPU has none.
    events: Option<*mut c_void>,
}

type Initialise = unsafe extern "C" fn() -> i32;
type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> i32;
type ReadWide = unsafe extern "C" fn(*mut c_void, *mut u64) -> i32;
type ReadNarrow = unsafe extern "C" fn(*mut c_void, *mut u32) -> i32;
type ReadOfKind = unsafe extern "C" fn(*mut c_void, u32, *mut u32) -> i32;
type ReadErrors = unsafe extern "C" fn(*mut c_void, u32, u32, *mut u64) -> i32;
type CreateEvents = unsafe extern "C" fn(*mut *mut c_void) -> i32;
type RegisterEvents = unsafe extern "C" fn(*mut c_void, u64, *mut c_void) -> i32;
type WaitForEvent = unsafe extern "C" fn(*mut c_void, *mut EventData, u32) -> i32;
type FreeEvents = unsafe extern "C" fn(*mut c_void) -> i32;

/// `NVML_CLOCK_SM`.
const MULTIPROCESSORS: u32 = 1;

/// `NVML_TEMPERATURE_GPU`.
const CORE: u32 = 0;

/// `NVML_MEMORY_ERROR_TYPE_UNCORRECTED` and `NVML_VOLATILE_ECC`.
const UNCORRECTED: u32 = 1;
const SINCE_LOADED: u32 = 0;

/// `nvmlEventTypeXidCriticalError`.
const CRITICAL_ERROR: u64 = 8;

/// `nvmlEventData_t`.
#[repr(C)]
struct EventData {
    device: *mut c_void,
    kind: u64,
    /// Of a critical error, its number.
    data: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

impl NvmlDevice {
    /// The GPU at an address on the bus. `None` if NVML is missing or does not support it.
    pub(super) fn new(bus: &CStr) -> Option<Self> {
        Self::of_library(libraries::nvml_library()?, bus)
    }

    fn of_library(library: Library, bus: &CStr) -> Option<Self> {
        let mut device = std::ptr::null_mut();
        // SAFETY: `nvmlInit_v2(void)` and `nvmlDeviceGetHandleByPciBusId_v2(const char *, nvmlDevice_t *)`, with a
        // name that ends in zero and a pointer to write to.
        let status = unsafe {
            library.get::<Initialise>(b"nvmlInit_v2\0").ok()?();
            library.get::<Find>(b"nvmlDeviceGetHandleByPciBusId_v2\0").ok()?(bus.as_ptr(), &raw mut device)
        };
        if status != 0 {
            return None;
        }
        let mut found = NvmlDevice { library, device, events: None };
        found.events = found.critical_errors();
        Some(found)
    }

    /// A set of events with the critical errors of this GPU.
    fn critical_errors(&self) -> Option<*mut c_void> {
        let mut events = std::ptr::null_mut();
        // SAFETY: `nvmlEventSetCreate(nvmlEventSet_t *)` with a pointer to write to, and
        // `nvmlDeviceRegisterEvents(nvmlDevice_t, unsigned long long, nvmlEventSet_t)`.
        let status = unsafe {
            let create = self.library.get::<CreateEvents>(b"nvmlEventSetCreate\0").ok()?;
            let register = self.library.get::<RegisterEvents>(b"nvmlDeviceRegisterEvents\0").ok()?;
            if create(&raw mut events) != 0 {
                return None;
            }
            register(self.device, CRITICAL_ERROR, events)
        };
        if status != 0 {
            self.free(events);
            return None;
        }
        Some(events)
    }

    fn free(&self, events: *mut c_void) {
        // SAFETY: `nvmlEventSetFree(nvmlEventSet_t)`, of a set that nobody uses any more.
        unsafe {
            if let Ok(free) = self.library.get::<FreeEvents>(b"nvmlEventSetFree\0") {
                free(events);
            }
        }
    }

    fn wide(&self, name: &[u8]) -> Option<u64> {
        let mut value = 0;
        // SAFETY: `(nvmlDevice_t, unsigned long long *)`.
        let status = unsafe { self.library.get::<ReadWide>(name).ok()?(self.device, &raw mut value) };
        (status == 0).then_some(value)
    }

    fn narrow(&self, name: &[u8]) -> Option<u32> {
        let mut value = 0;
        // SAFETY: both are `(nvmlDevice_t, unsigned int *)`.
        let status = unsafe { self.library.get::<ReadNarrow>(name).ok()?(self.device, &raw mut value) };
        (status == 0).then_some(value)
    }

    fn of_kind(&self, name: &[u8], kind: u32) -> Option<u32> {
        let mut value = 0;
        // SAFETY: all are `(nvmlDevice_t, an enumeration, unsigned int *)`.
        let status = unsafe { self.library.get::<ReadOfKind>(name).ok()?(self.device, kind, &raw mut value) };
        (status == 0).then_some(value)
    }
}

impl PowerMeter for NvmlDevice {
    fn energy(&self) -> Option<f64> {
        self.wide(b"nvmlDeviceGetTotalEnergyConsumption\0").map(|millijoules| millijoules as f64 / 1e3)
    }

    fn power(&self) -> Option<f64> {
        self.narrow(b"nvmlDeviceGetPowerUsage\0").map(|milliwatts| f64::from(milliwatts) / 1e3)
    }

    fn power_limit(&self) -> Option<f64> {
        self.narrow(b"nvmlDeviceGetEnforcedPowerLimit\0").map(|milliwatts| f64::from(milliwatts) / 1e3)
    }
}

impl Sensors for NvmlDevice {
    fn clocks(&self) -> Option<[u32; 2]> {
        let clock = self.of_kind(b"nvmlDeviceGetClockInfo\0", MULTIPROCESSORS)?;
        Some([clock, self.of_kind(b"nvmlDeviceGetMaxClockInfo\0", MULTIPROCESSORS)?])
    }

    fn temperature(&self) -> Option<u32> {
        self.of_kind(b"nvmlDeviceGetTemperature\0", CORE)
    }

    fn memory_errors(&self) -> Option<u64> {
        let mut count = 0;
        // SAFETY: `nvmlDeviceGetTotalEccErrors(nvmlDevice_t, two enumerations, unsigned long long *)`.
        let status = unsafe {
            let read = self.library.get::<ReadErrors>(b"nvmlDeviceGetTotalEccErrors\0").ok()?;
            read(self.device, UNCORRECTED, SINCE_LOADED, &raw mut count)
        };
        (status == 0).then_some(count)
    }

    fn wait_for_error(&self, limit: Duration) -> Option<u64> {
        let Some(events) = self.events else {
            std::thread::sleep(limit);
            return None;
        };
        let mut found = EventData {
            device: std::ptr::null_mut(),
            kind: 0,
            data: 0,
            gpu_instance: 0,
            compute_instance: 0,
        };
        // SAFETY: `nvmlEventSetWait_v2(nvmlEventSet_t, nvmlEventData_t *, unsigned int)`, whose time is in milliseconds.
        let status = unsafe {
            let wait = self.library.get::<WaitForEvent>(b"nvmlEventSetWait_v2\0").ok()?;
            wait(events, &raw mut found, limit.as_millis() as u32)
        };
        (status == 0 && found.kind == CRITICAL_ERROR).then_some(found.data)
    }
}

impl Drop for NvmlDevice {
    fn drop(&mut self) {
        if let Some(events) = self.events.take() {
            self.free(events);
        }
    }
}

// SAFETY: NVML may be called from any thread.
unsafe impl Send for NvmlDevice {}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    /// A GPU with one critical error, for which a second wait is in vain.
    const NVML: &str = r#"
        #include <string.h>
        typedef struct { void *device; unsigned long long kind, data; unsigned gpu, compute; } event_t;
        static int errors = 1;
        int nvmlInit_v2(void) { return 0; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
            *device = (void *)7;
            return strcmp(bus, "0000:c1:00.0") ? 6 : 0;
        }
        int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) { *mj = 5500; return 0; }
        int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { *mw = 310000; return 0; }
        int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) { *mhz = 1200; return kind == 1 ? 0 : 2; }
        int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *mhz) { *mhz = 1980; return kind == 1 ? 0 : 2; }
        int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *c) { *c = 87; return sensor; }
        int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
            *count = 2;
            return kind == 1 && counter == 0 ? 0 : 2;
        }
        int nvmlEventSetCreate(void **set) { *set = (void *)9; return 0; }
        int nvmlDeviceRegisterEvents(void *device, unsigned long long kinds, void *set) { return kinds == 8 ? 0 : 2; }
        int nvmlEventSetWait_v2(void *set, event_t *event, unsigned ms) {
            if (set != (void *)9 || errors-- == 0) return 10;
            event->kind = 8;
            event->data = 79;
            return 0;
        }
        int nvmlEventSetFree(void *set) { return 0; }
    "#;

    #[test]
    fn a_gpu_tells_its_health_and_what_the_library_lacks_is_not_known() {
        let folder = std::env::temp_dir().join(format!("kintsugi-nvml-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let (source, built) = (folder.join("nvml.c"), folder.join("libnvidia-ml.so.1"));
        fs::write(&source, NVML).expect("a file");
        let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&built).arg(&source).status();
        assert!(compiled.expect("a C compiler").success());
        // SAFETY: it is the library above, which has no initialisers.
        let library = || unsafe { Library::new(&built) }.expect("it was built");
        assert!(NvmlDevice::of_library(library(), c"0000:01:00.0").is_none(), "another GPU");
        let gpu = NvmlDevice::of_library(library(), c"0000:c1:00.0").expect("it is there");
        fs::remove_dir_all(&folder).ok();
        assert_eq!((gpu.energy(), gpu.power(), gpu.power_limit()), (Some(5.5), Some(310.0), None));
        assert_eq!((gpu.clocks(), gpu.temperature()), (Some([1200, 1980]), Some(87)));
        assert_eq!(gpu.memory_errors(), Some(2));
        let wait = || gpu.wait_for_error(Duration::from_millis(1));
        assert_eq!([wait(), wait()], [Some(79), None]);
    }
}
