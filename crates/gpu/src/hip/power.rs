//! Energy and power of an AMD GPU by ROCm SMI (`rocm_smi.h`).

use std::ffi::c_int;

use super::libraries::ROCM_SMI;
use crate::PowerMeter;

/// ROCm SMI's number of one GPU.
#[derive(Debug)]
pub(super) struct RocmSmiDevice(u32);

type Initialise = unsafe extern "C" fn(u64) -> c_int;
type Count = unsafe extern "C" fn(*mut u32) -> c_int;
type ReadId = unsafe extern "C" fn(u32, *mut u64) -> c_int;
type ReadEnergy = unsafe extern "C" fn(u32, *mut u64, *mut f32, *mut u64) -> c_int;
type ReadPower = unsafe extern "C" fn(u32, u32, *mut u64) -> c_int;

impl RocmSmiDevice {
    /// The GPU at an address on the bus, such as `0000:c1:00.0`. `None` without the library.
    pub(super) fn new(bus: &str) -> Option<Self> {
        let (wanted, mut count) = (bus_id(bus)?, 0);
        // SAFETY: `rsmi_init(uint64_t)`, `rsmi_num_monitor_devices(uint32_t *)` and
        // `rsmi_dev_pci_id_get(uint32_t, uint64_t *)`.
        unsafe {
            let initialise: Initialise = ROCM_SMI.function("rsmi_init").ok()?;
            let number: Count = ROCM_SMI.function("rsmi_num_monitor_devices").ok()?;
            let id_of: ReadId = ROCM_SMI.function("rsmi_dev_pci_id_get").ok()?;
            if initialise(0) != 0 || number(&raw mut count) != 0 {
                return None;
            }
            let is_wanted = |device: &u32| {
                let mut id = 0;
                id_of(*device, &raw mut id) == 0 && id & BUS_ID == wanted
            };
            (0..count).find(is_wanted).map(RocmSmiDevice)
        }
    }

    fn microwatts(&self, function: &'static str) -> Option<u64> {
        let mut value = 0;
        // SAFETY: both functions are `(uint32_t device, uint32_t sensor, uint64_t *)`.
        let status = unsafe { ROCM_SMI.function::<ReadPower>(function).ok()?(self.0, 0, &raw mut value) };
        (status == 0).then_some(value)
    }
}

impl PowerMeter for RocmSmiDevice {
    fn energy(&self) -> Option<f64> {
        let (mut counter, mut microjoules, mut at) = (0, 0.0, 0);
        // SAFETY: `rsmi_dev_energy_count_get(uint32_t, uint64_t *, float *, uint64_t *)`.
        let status = unsafe {
            let read: ReadEnergy = ROCM_SMI.function("rsmi_dev_energy_count_get").ok()?;
            read(self.0, &raw mut counter, &raw mut microjoules, &raw mut at)
        };
        (status == 0).then(|| counter as f64 * f64::from(microjoules) / 1e6)
    }

    fn power(&self) -> Option<f64> {
        self.microwatts("rsmi_dev_power_ave_get").map(|value| value as f64 / 1e6)
    }

    fn power_limit(&self) -> Option<f64> {
        self.microwatts("rsmi_dev_power_cap_get").map(|value| value as f64 / 1e6)
    }
}

/// The bits of ROCm SMI's identifier that are the address: domain, bus, device and function. Four bits between them are a
/// partition of the GPU.
const BUS_ID: u64 = !0xf000_0000;

/// The identifier of an address `domain:bus:device.function`, all in hexadecimal digits.
fn bus_id(bus: &str) -> Option<u64> {
    let (front, function) = bus.split_once('.')?;
    let parts = front.split(':').chain([function]);
    let parts: Vec<u64> = parts.map(|part| u64::from_str_radix(part, 16)).collect::<Result<_, _>>().ok()?;
    let [domain, bus, device, function] = parts[..] else { return None };
    Some(domain << 32 | bus << 8 | device << 3 | function)
}

/// `rsmi_version_t`.
#[repr(C)]
struct Version {
    numbers: [u32; 3],
    build: *const u8,
}

/// The version as the library writes it.
pub(super) fn version() -> Option<String> {
    type Get = unsafe extern "C" fn(*mut Version) -> c_int;
    let mut version = Version { numbers: [0; 3], build: std::ptr::null() };
    // SAFETY: `rsmi_version_get(rsmi_version_t *)`, which has three numbers and a text.
    let status = unsafe { ROCM_SMI.function::<Get>("rsmi_version_get").ok()?(&raw mut version) };
    let [major, minor, patch] = version.numbers;
    (status == 0).then(|| format!("{major}.{minor}.{patch}"))
}

#[cfg(test)]
mod tests {
    use super::super::headers::{Prototype, assert_facts, prototypes};
    use super::*;

    const FUNCTIONS: [Prototype; 7] = [
        ("rsmi_init", "uint64_t"),
        ("rsmi_num_monitor_devices", "uint32_t *"),
        ("rsmi_dev_pci_id_get", "uint32_t, uint64_t *"),
        ("rsmi_dev_energy_count_get", "uint32_t, uint64_t *, float *, uint64_t *"),
        ("rsmi_dev_power_ave_get", "uint32_t, uint32_t, uint64_t *"),
        ("rsmi_dev_power_cap_get", "uint32_t, uint32_t, uint64_t *"),
        ("rsmi_version_get", "rsmi_version_t *"),
    ];

    #[test]
    fn functions_of_rocm_smi_are_those_of_the_header() {
        let mut facts = prototypes("rsmi_status_t", &FUNCTIONS);
        facts.push(format!("sizeof(rsmi_version_t) == {}", size_of::<Version>()));
        assert_facts("rocm_smi/rocm_smi.h", "librocm-smi-dev", &facts);
    }

    #[test]
    fn an_address_on_the_bus_is_one_number() {
        assert_eq!(bus_id("0000:c1:00.0"), Some(0xc100));
        assert_eq!(bus_id("0002:c1:03.1"), Some(2 << 32 | 0xc119));
        assert_eq!(bus_id("nothing"), None);
    }
}
