//! Errors of the CUDA backend.

use std::fmt;

use cudarc::driver::result::DriverError;

/// A failure of the driver, of one of NVIDIA's libraries or of a kernel's compilation.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    /// A library cannot be loaded.
    #[error("{library} was not found (tried {}); {remedy}", .tried.join(", "))]
    Missing {
        /// The library's name.
        library: &'static str,
        /// File names that were tried.
        tried: Vec<String>,
        /// How to get it.
        remedy: &'static str,
    },
    /// The driver refused a call, or reports the failure of an earlier kernel.
    #[error("the CUDA driver: {0}")]
    Driver(String),
    /// A library refused a call.
    #[error("{library}: {call} answered {status}")]
    Library {
        /// The library's name.
        library: &'static str,
        /// The function that failed.
        call: &'static str,
        /// The status that it returned.
        status: String,
    },
    /// NVRTC did not accept a kernel file.
    #[error("the kernels of {source_name} do not compile for {architecture}:\n{log}")]
    Compile {
        /// The kernel file.
        source_name: String,
        /// The architecture it was compiled for.
        architecture: String,
        /// NVRTC's log.
        log: String,
    },
    /// An operation or a type that this backend does not have.
    #[error("{0}")]
    Unsupported(String),
}

impl CudaError {
    /// Adds what the driver was asked to do.
    pub(crate) fn during(self, what: impl fmt::Display) -> Self {
        match self {
            CudaError::Driver(reason) => CudaError::Driver(format!("{what}: {reason}")),
            other => other,
        }
    }
}

impl From<DriverError> for CudaError {
    fn from(error: DriverError) -> Self {
        CudaError::Driver(format!("{error:?}"))
    }
}
