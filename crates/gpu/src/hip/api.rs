//! The functions of `libamdhip64` that the backend calls, as `hip_runtime_api.h` and `hiprtc.h` declare them, and the numbers
//! that they take.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

use super::libraries::{HIP, HIPRTC, Library};
use crate::error::GpuError;

/// A handle of the run time: a stream, an event, a module, a function, a graph.
pub(super) type Handle = *mut c_void;

/// What a call returns if all went well.
pub(super) const SUCCESS: c_int = 0;
/// `hipErrorNoDevice`.
pub(super) const NO_DEVICE: c_int = 100;
/// `hipErrorNotReady`: a stream or an event that still runs.
pub(super) const NOT_READY: c_int = 600;
/// `hipStreamNonBlocking`.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `hipEventDisableTiming`.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `hipStreamCaptureModeThreadLocal`.
pub(super) const CAPTURE_THREAD_LOCAL: c_int = 1;

/// Declares a table of functions that return a status, and how to load it.
macro_rules! table {
    ($(#[$doc:meta])* $table:ident { $($function:ident: ($($type:ty),*)),+ $(,)? }) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "functions have the names of the header")]
        pub(super) struct $table {
            $(pub(super) $function: unsafe extern "C" fn($($type),*) -> c_int,)+
        }

        impl fmt::Debug for $table {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str(stringify!($table))
            }
        }

        impl $table {
            fn load(library: &'static Library) -> Result<Self, GpuError> {
                // SAFETY: the types are those of the header.
                Ok(unsafe { $table { $($function: library.function(stringify!($function))?,)+ } })
            }
        }
    };
}

table! {
    /// The run time.
    Hip {
        hipInit: (c_uint),
        hipGetDeviceCount: (*mut c_int),
        hipSetDevice: (c_int),
        hipRuntimeGetVersion: (*mut c_int),
        hipDeviceGetPCIBusId: (*mut c_char, c_int, c_int),
        hipMemGetInfo: (*mut usize, *mut usize),
        hipMalloc: (*mut Handle, usize),
        hipFree: (Handle),
        hipHostMalloc: (*mut Handle, usize, c_uint),
        hipHostFree: (Handle),
        hipStreamCreateWithFlags: (*mut Handle, c_uint),
        hipStreamCreateWithPriority: (*mut Handle, c_uint, c_int),
        hipStreamDestroy: (Handle),
        hipStreamSynchronize: (Handle),
        hipStreamQuery: (Handle),
        hipStreamWaitEvent: (Handle, Handle, c_uint),
        hipEventCreateWithFlags: (*mut Handle, c_uint),
        hipEventRecord: (Handle, Handle),
        hipEventSynchronize: (Handle),
        hipEventQuery: (Handle),
        hipEventElapsedTime: (*mut f32, Handle, Handle),
        hipEventDestroy: (Handle),
        hipMemcpyHtoDAsync: (Handle, *mut c_void, usize, Handle),
        hipMemcpyDtoHAsync: (*mut c_void, Handle, usize, Handle),
        hipMemsetD8Async: (Handle, u8, usize, Handle),
        hipModuleLoadData: (*mut Handle, *const c_void),
        hipModuleGetFunction: (*mut Handle, Handle, *const c_char),
        hipModuleLaunchKernel: (
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void,
            *mut *mut c_void
        ),
        hipStreamBeginCapture: (Handle, c_int),
        hipStreamEndCapture: (Handle, *mut Handle),
        hipGraphInstantiate: (*mut Handle, Handle, *mut Handle, *mut c_char, usize),
        hipGraphLaunch: (Handle, Handle),
        hipGraphExecDestroy: (Handle),
        hipGraphDestroy: (Handle),
    }
}

table! {
    /// The run-time compiler.
    Hiprtc {
        hiprtcVersion: (*mut c_int, *mut c_int),
        hiprtcCreateProgram: (
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        ),
        hiprtcCompileProgram: (Handle, c_int, *const *const c_char),
        hiprtcGetProgramLogSize: (Handle, *mut usize),
        hiprtcGetProgramLog: (Handle, *mut c_char),
        hiprtcGetCodeSize: (Handle, *mut usize),
        hiprtcGetCode: (Handle, *mut c_char),
        hiprtcDestroyProgram: (*mut Handle),
    }
}

/// The run time, loaded and initialised once.
pub(super) fn hip() -> Result<&'static Hip, GpuError> {
    static API: OnceLock<Result<Hip, GpuError>> = OnceLock::new();
    API.get_or_init(|| Hip::load(&HIP)).as_ref().map_err(Clone::clone)
}

/// The compiler: a part of the run time up to ROCm 5, a library of its own later.
pub(super) fn hiprtc() -> Result<&'static Hiprtc, GpuError> {
    static API: OnceLock<Result<Hiprtc, GpuError>> = OnceLock::new();
    let load = || Hiprtc::load(&HIP).or_else(|_| Hiprtc::load(&HIPRTC));
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

impl Hip {
    /// Number of devices.
    pub(super) fn devices(&self) -> Result<usize, GpuError> {
        let mut count = 0;
        // SAFETY: an integer to write to.
        match unsafe { (self.hipGetDeviceCount)(&raw mut count) } {
            NO_DEVICE => Ok(0),
            status => check("hipGetDeviceCount", status).map(|()| count as usize),
        }
    }

    /// The version of the run time, such as "5.2.21153".
    pub(super) fn version(&self) -> Result<String, GpuError> {
        let version = self.version_number()?;
        Ok(format!("{}.{}.{}", version / 10_000_000, version / 100_000 % 100, version % 100_000))
    }

    /// The release of ROCm, such as 5.
    pub(super) fn release(&self) -> Result<c_int, GpuError> {
        Ok(self.version_number()? / 10_000_000)
    }

    fn version_number(&self) -> Result<c_int, GpuError> {
        let mut version = 0;
        // SAFETY: an integer to write to.
        check("hipRuntimeGetVersion", unsafe { (self.hipRuntimeGetVersion)(&raw mut version) })?;
        Ok(version)
    }
}

/// The properties of a device.
pub(super) fn properties(device: c_int) -> Result<DeviceProperties, GpuError> {
    type Get = unsafe extern "C" fn(*mut u8, c_int) -> c_int;
    let mut bytes = vec![0_u8; DeviceProperties::ROOM];
    // SAFETY: both functions write a structure that is smaller than the room, for a device number.
    let (layout, status) = unsafe {
        if let Ok(get) = HIP.function::<Get>("hipGetDevicePropertiesR0600") {
            (&DeviceProperties::SINCE_6, get(bytes.as_mut_ptr(), device))
        } else {
            let get = HIP.function::<Get>("hipGetDeviceProperties")?;
            (&DeviceProperties::BEFORE_6, get(bytes.as_mut_ptr(), device))
        }
    };
    check("hipGetDeviceProperties", status)?;
    Ok(DeviceProperties { bytes, layout })
}

/// The error of a call that returned `status`, if it did not succeed.
pub(super) fn check(call: &'static str, status: c_int) -> Result<(), GpuError> {
    if status == SUCCESS {
        return Ok(());
    }
    Err(GpuError::Driver { driver: "HIP", reason: format!("{call}: {}", error_name(status)) })
}

/// The run time's name of an error.
fn error_name(status: c_int) -> String {
    type Name = unsafe extern "C" fn(c_int) -> *const c_char;
    // SAFETY: `const char *hipGetErrorName(hipError_t)`, which returns a text that lives as long as the library.
    unsafe {
        match HIP.function::<Name>("hipGetErrorName").map(|name| name(status)) {
            Ok(name) if !name.is_null() => CStr::from_ptr(name).to_string_lossy().into_owned(),
            _ => format!("error {status}"),
        }
    }
}

/// `hipDeviceProp_t`, whose layout changed with ROCm 6.
pub(super) struct DeviceProperties {
    bytes: Vec<u8>,
    layout: &'static Layout,
}

/// Offsets of the fields that are read.
pub(super) struct Layout {
    shared_bytes: usize,
    warp: usize,
    multiprocessors: usize,
    architecture: usize,
}

impl DeviceProperties {
    /// More than the 792 bytes of ROCm 5 and the 1472 of ROCm 6 and 7.
    const ROOM: usize = 4096;
    /// Bytes of the texts `name` and `gcnArchName`.
    const TEXT: usize = 256;
    const BEFORE_6: Layout = Layout { shared_bytes: 264, warp: 276, multiprocessors: 336, architecture: 396 };
    const SINCE_6: Layout = Layout { shared_bytes: 296, warp: 308, multiprocessors: 388, architecture: 1160 };

    /// The name of the device.
    pub(super) fn name(&self) -> String {
        self.text(0)
    }

    /// The architecture with its features, such as `gfx90a:sramecc+:xnack-`.
    pub(super) fn architecture(&self) -> String {
        self.text(self.layout.architecture)
    }

    /// LDS of a workgroup.
    pub(super) fn shared_bytes(&self) -> usize {
        let at = self.layout.shared_bytes;
        u64::from_ne_bytes(self.bytes[at..at + 8].try_into().expect("eight bytes")) as usize
    }

    /// Threads of a wave.
    pub(super) fn warp(&self) -> usize {
        self.int(self.layout.warp)
    }

    /// Compute units.
    pub(super) fn multiprocessors(&self) -> usize {
        self.int(self.layout.multiprocessors)
    }

    fn int(&self, at: usize) -> usize {
        u32::from_ne_bytes(self.bytes[at..at + 4].try_into().expect("four bytes")) as usize
    }

    fn text(&self, at: usize) -> String {
        let bytes = &self.bytes[at..at + Self::TEXT];
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::super::headers::{Prototype, assert_facts, prototypes};
    use super::*;

    /// Functions whose parameters are all numbers and pointers.
    const FUNCTIONS: [Prototype; 12] = [
        ("hipMalloc", "void **, size_t"),
        ("hipHostMalloc", "void **, size_t, unsigned"),
        ("hipMemGetInfo", "size_t *, size_t *"),
        ("hipMemcpyHtoDAsync", "hipDeviceptr_t, void *, size_t, hipStream_t"),
        ("hipMemcpyDtoHAsync", "void *, hipDeviceptr_t, size_t, hipStream_t"),
        ("hipMemsetD8Async", "hipDeviceptr_t, unsigned char, size_t, hipStream_t"),
        ("hipStreamCreateWithPriority", "hipStream_t *, unsigned, int"),
        ("hipStreamWaitEvent", "hipStream_t, hipEvent_t, unsigned"),
        ("hipEventElapsedTime", "float *, hipEvent_t, hipEvent_t"),
        ("hipModuleGetFunction", "hipFunction_t *, hipModule_t, const char *"),
        (
            "hipModuleLaunchKernel",
            "hipFunction_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, hipStream_t, void **, void **",
        ),
        ("hipGraphInstantiate", "hipGraphExec_t *, hipGraph_t, hipGraphNode_t *, char *, size_t"),
    ];

    const COMPILER: [Prototype; 6] = [
        ("hiprtcVersion", "int *, int *"),
        (
            "hiprtcCreateProgram",
            "hiprtcProgram *, const char *, const char *, int, const char **, const char **",
        ),
        ("hiprtcCompileProgram", "hiprtcProgram, int, const char **"),
        ("hiprtcGetCodeSize", "hiprtcProgram, size_t *"),
        ("hiprtcGetCode", "hiprtcProgram, char *"),
        ("hiprtcDestroyProgram", "hiprtcProgram *"),
    ];

    /// The header of ROCm 5 has the numbers, the offsets and the parameters that are used here.
    #[test]
    fn numbers_and_types_of_hip_are_those_of_the_header() {
        let Layout { shared_bytes, warp, multiprocessors, architecture } = DeviceProperties::BEFORE_6;
        let offset = |field: &str, at: usize| format!("offsetof(hipDeviceProp_t, {field}) == {at}");
        let number = |name: &str, value: i64| format!("{name} == {value}");
        let mut facts = vec![
            offset("name", 0),
            offset("sharedMemPerBlock", shared_bytes),
            offset("warpSize", warp),
            offset("multiProcessorCount", multiprocessors),
            offset("gcnArchName", architecture),
            format!("sizeof(hipDeviceProp_t) <= {}", DeviceProperties::ROOM),
            format!("sizeof(((hipDeviceProp_t *)0)->name) == {}", DeviceProperties::TEXT),
            number("hipSuccess", SUCCESS.into()),
            number("hipErrorNoDevice", NO_DEVICE.into()),
            number("hipErrorNotReady", NOT_READY.into()),
            number("hipStreamNonBlocking", STREAM_NON_BLOCKING.into()),
            number("hipEventDisableTiming", EVENT_DISABLE_TIMING.into()),
            number("hipStreamCaptureModeThreadLocal", CAPTURE_THREAD_LOCAL.into()),
        ];
        facts.extend(prototypes("hipError_t", &FUNCTIONS));
        assert_facts("hip/hip_runtime_api.h", "libamdhip64-dev", &facts);
    }

    #[test]
    fn functions_of_hiprtc_are_those_of_the_header() {
        assert_facts("hip/hiprtc.h", "libamdhip64-dev", &prototypes("hiprtcResult", &COMPILER));
    }
}
