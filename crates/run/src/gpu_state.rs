//! The state of a rank's GPU, in a file beside the rank's flight recorder: its clock, power and temperature, and the errors that its
//! driver has reported since the run began.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kintsugi_spec::input;
use serde::{Deserialize, Serialize};

use crate::files::FLIGHT;

/// Xid numbers that are kept.
const MAX_XIDS: usize = 16;

/// What the driver says of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuState {
    /// The clock of its multiprocessors and the highest one, in MHz.
    pub clock_mhz: Option<[u32; 2]>,
    /// Its power and the power limit, in watts.
    pub power_w: Option<[f64; 2]>,
    /// Its temperature, in °C.
    pub temperature_c: Option<u32>,
    /// Errors of its memory that could not be corrected (ECC), since the run began.
    pub memory_errors: u64,
    /// The numbers of critical errors since the run began, the oldest first, as in the system's log: NVIDIA's "Xid".
    pub xids: Vec<u64>,
}

impl GpuState {
    /// Adds a critical error.
    pub fn add_xid(&mut self, xid: u64) {
        self.xids.push(xid);
        let excess = self.xids.len().saturating_sub(MAX_XIDS);
        self.xids.drain(..excess);
    }

    /// Whether the driver has reported an error.
    pub fn has_errors(&self) -> bool {
        self.memory_errors > 0 || !self.xids.is_empty()
    }

    /// Writes the state of the GPU of a rank to the run's folder.
    pub fn write(&self, out: &Path, rank: usize) -> io::Result<()> {
        fs::create_dir_all(out.join(FLIGHT))?;
        fs::write(path(out, rank), serde_json::to_vec(self).expect("a state has string keys"))
    }

    /// Reads the state of the GPU of a rank, if it has one that tells.
    pub fn read(out: &Path, rank: usize) -> Option<Self> {
        let bytes = input::bytes(&path(out, rank), 1 << 16).ok()?;
        serde_json::from_slice(&bytes).ok()
    }
}

fn path(out: &Path, rank: usize) -> PathBuf {
    out.join(FLIGHT).join(format!("gpu-{rank:05}"))
}

/// `Xid 79, uncorrected ECC errors: 2, 1200 of 1980 MHz, 310 of 700 W, 87 °C`.
impl fmt::Display for GpuState {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let xids = self.xids.iter().map(|xid| format!("Xid {xid}"));
        let memory =
            (self.memory_errors > 0).then(|| format!("uncorrected ECC errors: {}", self.memory_errors));
        let clock = self.clock_mhz.map(|[clock, highest]| format!("{clock} of {highest} MHz"));
        let power = self.power_w.map(|[power, limit]| format!("{power:.0} of {limit:.0} W"));
        let temperature = self.temperature_c.map(|temperature| format!("{temperature} °C"));
        let facts = xids.chain(memory).chain(clock).chain(power).chain(temperature);
        f.write_str(&facts.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_errors_of_a_gpu_come_first_and_the_last_xids_are_kept() {
        let out = std::env::temp_dir().join(format!("kintsugi-gpu-state-{}", std::process::id()));
        let mut state = GpuState {
            clock_mhz: Some([1200, 1980]),
            power_w: Some([309.7, 700.0]),
            temperature_c: Some(87),
            ..GpuState::default()
        };
        assert!(!state.has_errors());
        assert_eq!(state.to_string(), "1200 of 1980 MHz, 310 of 700 W, 87 °C");
        (0..20).for_each(|xid| state.add_xid(xid));
        state.memory_errors = 2;
        state.write(&out, 3).expect("a folder");
        let found = GpuState::read(&out, 3).expect("it was written");
        assert_eq!(GpuState::read(&out, 4), None);
        fs::remove_dir_all(&out).ok();
        assert_eq!((found.xids.len(), found.xids[15]), (MAX_XIDS, 19));
        assert!(found.has_errors());
        assert!(
            found
                .to_string()
                .ends_with("Xid 19, uncorrected ECC errors: 2, 1200 of 1980 MHz, 310 of 700 W, 87 °C")
        );
    }
}
