//! Properties of a GPU: name and memory from the driver, energy and power from the library that measures them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::driver::Driver;
use crate::error::GpuError;

/// A GPU, as the driver reports it.
#[derive(Debug)]
pub struct Gpu {
    driver: Arc<dyn Driver>,
}

impl Gpu {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Self {
        Gpu { driver }
    }

    /// Its name.
    pub fn name(&self) -> Result<String, GpuError> {
        self.driver.name()
    }

    /// The GPU's own identifier, as hexadecimal digits.
    pub fn uuid(&self) -> Result<String, GpuError> {
        self.driver.uuid()
    }

    /// Streaming multiprocessors, or compute units.
    pub fn multiprocessors(&self) -> usize {
        self.driver.properties().multiprocessors
    }

    /// Free bytes and total bytes. Memory of other programs on the GPU counts as used.
    pub fn memory(&self) -> Result<(u64, u64), GpuError> {
        self.driver.memory()
    }

    /// What measures its energy and power. `None` if the library is missing or does not support the GPU.
    pub fn power_meter(&self) -> Option<Box<dyn PowerMeter>> {
        self.driver.power_meter()
    }

    /// What sees its health. `None` if there is no such library or it does not support the GPU.
    pub fn sensors(&self) -> Option<Box<dyn Sensors>> {
        self.driver.sensors()
    }
}

/// Energy and power of one GPU.
pub trait PowerMeter: fmt::Debug + Send {
    /// Joules that the GPU has used since some time that stays the same.
    fn energy(&self) -> Option<f64>;

    /// Watts that it draws now.
    fn power(&self) -> Option<f64>;

    /// The power limit in watts.
    fn power_limit(&self) -> Option<f64>;
}

/// The health of one GPU. What it does not tell is `None`.
pub trait Sensors: PowerMeter {
    /// The clock of its multiprocessors and the highest one, in MHz.
    fn clocks(&self) -> Option<[u32; 2]>;

    /// Its temperature in °C.
    fn temperature(&self) -> Option<u32>;

    /// Errors of its memory that could not be corrected, since the driver was loaded.
    fn memory_errors(&self) -> Option<u64>;

    /// Waits for a critical error, or for as long as `limit`. Returns the number of the error.
    fn wait_for_error(&self, limit: Duration) -> Option<u64>;
}
