//! A ROCm SMI for one GPU that draws 100 W.

use std::ffi::c_int;
use std::sync::LazyLock;
use std::time::Instant;

use crate::state::SUCCESS;

const MICROWATTS: u64 = 100_000_000;

/// Microjoules of a unit of the counter, as on MI200.
const RESOLUTION: f32 = 15.3;

static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

#[unsafe(no_mangle)]
pub extern "C" fn rsmi_init(_flags: u64) -> c_int {
    LazyLock::force(&BEGUN);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rsmi_num_monitor_devices(count: *mut u32) -> c_int {
    // SAFETY: an integer to write to.
    unsafe { *count = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rsmi_dev_pci_id_get(_device: u32, id: *mut u64) -> c_int {
    // SAFETY: an integer to write to.
    unsafe { *id = 0xc100 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rsmi_dev_energy_count_get(
    _device: u32,
    counter: *mut u64,
    resolution: *mut f32,
    timestamp: *mut u64,
) -> c_int {
    let seconds = BEGUN.elapsed();
    // SAFETY: numbers to write to.
    unsafe {
        *counter = (seconds.as_secs_f64() * MICROWATTS as f64 / f64::from(RESOLUTION)) as u64;
        *resolution = RESOLUTION;
        *timestamp = seconds.as_nanos() as u64;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rsmi_dev_power_ave_get(_device: u32, _sensor: u32, power: *mut u64) -> c_int {
    // SAFETY: an integer to write to.
    unsafe { *power = MICROWATTS };
    SUCCESS
}
