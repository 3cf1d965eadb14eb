//! Which device the ranks of a job run on.

use kintsugi_plan::config::ConfigSource;
use kintsugi_plan::{DeviceKind, Plan};

use crate::failure::Failure;
use crate::host;

/// How the device of the ranks is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// As the configuration says.
    Given(DeviceKind),
    /// `run.device = "auto"`: GPUs, if every host has one for each of its ranks.
    Auto,
}

impl DeviceChoice {
    /// The choice of a configuration and its plan.
    pub fn of(source: &ConfigSource, plan: &Plan) -> Result<Self, Failure> {
        let is_auto = source.is_device_auto()?;
        Ok(if is_auto { DeviceChoice::Auto } else { DeviceChoice::Given(plan.run.device) })
    }

    /// The device, if it is already chosen.
    pub(super) fn given(self) -> Option<DeviceKind> {
        match self {
            DeviceChoice::Given(device) => Some(device),
            DeviceChoice::Auto => None,
        }
    }

    /// The GPUs that ranks use if they use any.
    pub(super) fn gpu_kind(self) -> DeviceKind {
        self.given().filter(|device| device.is_gpu()).unwrap_or_else(|| host::gpus().0)
    }

    pub(super) fn may_use_gpus(self) -> bool {
        self.given().map_or_else(|| host::gpus().1 > 0, DeviceKind::is_gpu)
    }

    /// The device of ranks that are threads. They share the first GPU, so that only one rank has a GPU of its own.
    pub(super) fn on_threads(self, ranks: usize) -> DeviceKind {
        let here = || match host::gpus() {
            (kind, 1..) if ranks == 1 => kind,
            _ => DeviceKind::Cpu,
        };
        self.given().unwrap_or_else(here)
    }
}
