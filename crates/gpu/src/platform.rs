//! A maker's GPUs: how many there are, how to open one, and which libraries that takes.

use std::fmt;
use std::sync::Arc;

use kintsugi_tensor::Device;

use crate::driver::Driver;
use crate::error::GpuError;
use crate::library::Report;
use crate::{Gpu, GpuBackend};

/// The GPUs of one maker.
pub struct Platform {
    pub(crate) name: &'static str,
    pub(crate) devices: fn() -> Result<usize, GpuError>,
    pub(crate) open: fn(usize) -> Result<Arc<dyn Driver>, GpuError>,
    pub(crate) libraries: fn() -> Vec<Report>,
    pub(crate) device: fn(bool) -> Device,
}

impl Platform {
    /// Its name: "CUDA" or "HIP".
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Number of devices that the driver reports. The error says what is missing.
    pub fn devices(&self) -> Result<usize, GpuError> {
        (self.devices)()
    }

    /// Whether the driver shows at least one device.
    pub fn is_here(&self) -> bool {
        matches!(self.devices(), Ok(1..))
    }

    /// Every library that the backend uses.
    pub fn libraries(&self) -> Vec<Report> {
        (self.libraries)()
    }

    /// What a plan for such a GPU needs to know. With `deterministic` the same inputs give the same bits.
    pub fn device(&self, deterministic: bool) -> Device {
        (self.device)(deterministic)
    }

    /// GPU number `device`.
    pub fn gpu(&self, device: usize) -> Result<Gpu, GpuError> {
        Ok(Gpu::new((self.open)(device)?))
    }

    /// A backend on device number `device` that allocates `capacity` bytes of its memory at once, workspace included.
    ///
    /// With `deterministic` the same inputs give the same bits. The backward of attention is then slower, and matrix
    /// products use the library's first choice instead of the algorithm that measures fastest.
    pub fn backend(&self, device: usize, capacity: u64, deterministic: bool) -> Result<GpuBackend, GpuError> {
        GpuBackend::new(self, device, capacity, deterministic)
    }
}

impl fmt::Debug for Platform {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
}
