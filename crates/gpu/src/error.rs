//! Errors of the GPU backend.

use std::fmt;

/// A failure of the driver, of one of the maker's libraries or of a kernel's compilation.
#[derive(Clone, Debug, thiserror::Error)]
pub enum GpuError {
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
    #[error("the {driver} driver: {reason}")]
    Driver {
        /// Whose driver.
        driver: &'static str,
        /// What it answered, and to what.
        reason: String,
    },
    /// A library lacks a function.
    #[error("{library} has no {symbol}; ROCm 5.2 or newer is needed")]
    Incomplete {
        /// The library's name.
        library: &'static str,
        /// The missing function.
        symbol: &'static str,
    },
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
    /// The compiler did not accept a kernel file.
    #[error("the kernels of {source_name} do not compile for {architecture}:\n{log}")]
    Compile {
        /// The kernel file.
        source_name: String,
        /// The architecture it was compiled for.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// An operation or a type that this backend does not have.
    #[error("{0}")]
    Unsupported(String),
}

impl GpuError {
    /// Adds what the driver was asked to do.
    pub(crate) fn during(self, what: impl fmt::Display) -> Self {
        match self {
            GpuError::Driver { driver, reason } => {
                GpuError::Driver { driver, reason: format!("{what}: {reason}") }
            }
            other => other,
        }
    }
}
