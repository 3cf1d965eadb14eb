//! AMD's libraries, loaded at run time by every name that ROCm 5.2 to 7 gives them, also from ROCm's own folder.

use std::env;
use std::path::Path;
use std::sync::OnceLock;

use crate::error::GpuError;
use crate::library::Report;

/// A library that may or may not be on this machine.
#[derive(Debug)]
pub(super) struct Library {
    name: &'static str,
    /// File names, the newest version first.
    names: &'static [&'static str],
    remedy: &'static str,
    found: OnceLock<Option<libloading::Library>>,
}

/// HIP's run time. Up to ROCm 5 it contains hiprtc, the run-time compiler.
pub(super) static HIP: Library = Library {
    name: "HIP",
    names: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"],
    remedy: "without it no run on AMD GPUs; install ROCm 5.2 or newer, and load its module or put its lib folder on \
             LD_LIBRARY_PATH",
    found: OnceLock::new(),
};

/// hiprtc as a library of its own, from ROCm 5.5 on.
pub(super) static HIPRTC: Library = Library {
    name: "hiprtc",
    names: &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so"],
    remedy: "without it no kernel can be compiled; it comes with ROCm",
    found: OnceLock::new(),
};

pub(super) static ROCBLAS: Library = Library {
    name: "rocBLAS",
    names: &["librocblas.so.5", "librocblas.so.4", "librocblas.so.3", "librocblas.so.0", "librocblas.so"],
    remedy: "without it no matrix product can be computed; it comes with ROCm (package rocblas)",
    found: OnceLock::new(),
};

/// Products with epilogues, with the numbers that it has from ROCm 6.0 on.
pub(super) static HIPBLASLT: Library = Library {
    name: "hipBLASLt",
    names: &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"],
    remedy: "without it rocBLAS multiplies, and kernels of ours add biases and take GELU; it comes with ROCm 6 (package hipblaslt)",
    found: OnceLock::new(),
};

pub(super) static ROCM_SMI: Library = Library {
    name: "ROCm SMI",
    names: &[
        "librocm_smi64.so.1",
        "librocm_smi64.so.7",
        "librocm_smi64.so.6",
        "librocm_smi64.so.5",
        "librocm_smi64.so",
    ],
    remedy: "it comes with ROCm (package rocm-smi-lib); without it there is no energy in the results",
    found: OnceLock::new(),
};

impl Library {
    /// The library. Fails with installation advice if it cannot be loaded.
    pub(super) fn load(&'static self) -> Result<&'static libloading::Library, GpuError> {
        self.found().ok_or_else(|| GpuError::Missing {
            library: self.name,
            tried: self.tried(),
            remedy: self.remedy,
        })
    }

    pub(super) fn found(&'static self) -> Option<&'static libloading::Library> {
        let found = self.found.get_or_init(|| {
            let folders = ["ROCM_PATH", "HIP_PATH"].into_iter().filter_map(env::var_os);
            let folders: Vec<_> = folders.chain(["/opt/rocm".into()]).collect();
            let inside = |name: &&str| -> Vec<_> {
                folders
                    .iter()
                    .map(|folder| Path::new(folder).join("lib").join(name).into_os_string())
                    .collect()
            };
            let everywhere = self.names.iter().map(Into::into).chain(self.names.iter().flat_map(inside));
            // SAFETY: loading AMD's libraries runs no code but their initialisers.
            everywhere.into_iter().find_map(|name| unsafe { libloading::Library::new(name) }.ok())
        });
        found.as_ref()
    }

    /// The function of this name.
    ///
    /// # Safety
    /// `F` must be the type that the library's header declares.
    pub(super) unsafe fn function<F: Copy>(&'static self, symbol: &'static str) -> Result<F, GpuError> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.load()?.get::<F>(symbol.as_bytes()) };
        found.map(|function| *function).map_err(|_| GpuError::Incomplete { library: self.name, symbol })
    }

    fn tried(&self) -> Vec<String> {
        self.names.iter().map(|&name| name.to_owned()).collect()
    }

    /// What `kintsugi doctor` reports, with a version that `version` finds out.
    pub(super) fn report(&'static self, version: impl FnOnce() -> Option<String>) -> Report {
        let version = self.found().map(|_| version().unwrap_or_else(|| "of unknown version".to_owned()));
        Report { name: self.name, version, tried: self.tried(), remedy: self.remedy }
    }
}
