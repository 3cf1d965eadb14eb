//! The libraries that are loaded at run time: which are installed, in which version, and how to install the others.

use std::sync::OnceLock;

use cudarc::{cublaslt, cudnn, driver, get_lib_name_candidates, nvrtc};

use crate::error::GpuError;
use crate::library::Report;

/// A library that may or may not be on this machine.
#[derive(Debug)]
pub(crate) struct Library {
    name: &'static str,
    /// File name without "lib" and extension.
    stem: &'static str,
    remedy: &'static str,
    load: fn() -> bool,
    version: fn() -> String,
    found: OnceLock<bool>,
}

/// Declares a library that cudarc loads.
macro_rules! library {
    ($constant:ident, $name:literal, $stem:literal, $module:ident, $version:expr, $remedy:literal) => {
        pub(crate) static $constant: Library = Library {
            name: $name,
            stem: $stem,
            remedy: $remedy,
            // SAFETY: loading NVIDIA's libraries runs no code but their initialisers.
            load: || unsafe { $module::sys::is_culib_present() },
            version: $version,
            found: OnceLock::new(),
        };
    };
}

library!(DRIVER, "the CUDA driver", "cuda", driver, driver_version, "install NVIDIA's driver for the GPU");
library!(
    NVRTC,
    "NVRTC",
    "nvrtc",
    nvrtc,
    super::nvrtc::version,
    "it comes with the CUDA toolkit, or with `pip install nvidia-cuda-nvrtc` (put its folder on LD_LIBRARY_PATH)"
);
library!(
    CUBLASLT,
    "cuBLASLt",
    "cublasLt",
    cublaslt,
    cublaslt_version,
    "it comes with the CUDA toolkit, or with `pip install nvidia-cublas` (put its folder on LD_LIBRARY_PATH)"
);
library!(
    CUDNN,
    "cuDNN",
    "cudnn",
    cudnn,
    cudnn_version,
    "install cuDNN 9 from NVIDIA, or with `pip install nvidia-cudnn-cu13` (put its folder on LD_LIBRARY_PATH)"
);
impl Library {
    /// Fails with installation advice if the library cannot be loaded.
    pub(crate) fn require(&self) -> Result<(), GpuError> {
        if self.found() {
            return Ok(());
        }
        Err(GpuError::Missing { library: self.name, tried: self.tried(), remedy: self.remedy })
    }

    fn found(&self) -> bool {
        *self.found.get_or_init(self.load)
    }

    /// File names that cudarc tries, without those for Windows.
    fn tried(&self) -> Vec<String> {
        get_lib_name_candidates(self.stem).into_iter().filter(|name| !name.contains("64")).collect()
    }

    fn report(&self) -> Report {
        let version = self.found().then(self.version);
        Report { name: self.name, version, tried: self.tried(), remedy: self.remedy }
    }
}

/// Every library that the CUDA backend uses.
pub fn reports() -> Vec<Report> {
    let mut reports: Vec<_> = [&DRIVER, &NVRTC, &CUBLASLT, &CUDNN].map(Library::report).into_iter().collect();
    reports.push(nvml());
    reports
}

/// Number of devices that the driver reports. The error says what is missing.
pub fn devices() -> Result<usize, GpuError> {
    DRIVER.require()?;
    Ok(driver::CudaContext::device_count()? as usize)
}

fn driver_version() -> String {
    let mut version = 0;
    // SAFETY: an integer to write to; the library is there.
    match unsafe { driver::sys::cuDriverGetVersion(&raw mut version) }.result() {
        Ok(()) => format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        Err(error) => format!("{error:?}"),
    }
}

fn cublaslt_version() -> String {
    // SAFETY: no arguments; the library is there.
    let version = unsafe { cublaslt::sys::cublasLtGetVersion() };
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}

fn cudnn_version() -> String {
    // SAFETY: no arguments; the library is there.
    let version = unsafe { cudnn::sys::cudnnGetVersion() };
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}

const NVML_NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Loads NVML, which reports energy and power. cudarc has no bindings for it.
pub(crate) fn nvml_library() -> Option<libloading::Library> {
    // SAFETY: as for the other libraries.
    NVML_NAMES.iter().find_map(|&name| unsafe { libloading::Library::new(name) }.ok())
}

fn nvml() -> Report {
    let version = |library| nvml_version(&library).unwrap_or_else(|| "of unknown version".into());
    Report {
        name: "NVML",
        version: nvml_library().map(version),
        tried: NVML_NAMES.map(str::to_owned).to_vec(),
        remedy: "it comes with NVIDIA's driver",
    }
}

fn nvml_version(library: &libloading::Library) -> Option<String> {
    type Version = unsafe extern "C" fn(*mut u8, u32) -> i32;
    let mut text = [0_u8; 80];
    // SAFETY: nvml.h declares `nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)`, which
    // needs no initialisation.
    let status = unsafe {
        let version = library.get::<Version>(b"nvmlSystemGetNVMLVersion\0").ok()?;
        version(text.as_mut_ptr(), text.len() as u32)
    };
    let end = text.iter().position(|&byte| byte == 0)?;
    (status == 0).then(|| String::from_utf8_lossy(&text[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported_without_a_panic() {
        for report in reports() {
            assert!(!report.tried.is_empty() && !report.remedy.is_empty(), "{report:?}");
        }
        let absent = Library {
            name: "nothing",
            stem: "nothing",
            remedy: "write it",
            load: || false,
            version: || unreachable!("asked for the version of a library that is not there"),
            found: OnceLock::new(),
        };
        assert!(absent.report().version.is_none());
        let sentence = absent.require().expect_err("it is not there").to_string();
        assert!(sentence.starts_with("nothing was not found (tried libnothing.so, "), "{sentence}");
        assert!(sentence.ends_with("; write it"), "{sentence}");
    }
}
