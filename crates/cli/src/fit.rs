//! Whether a plan fits into the devices it is for, and into this machine.

use std::fs;

use kintsugi_plan::Plan;
use kintsugi_simulate::{Misfit, Prediction, check_fit};

/// Against the plan's devices, or this machine's memory where the plan is for this machine.
pub fn planned(plan: &Plan, prediction: &Prediction) -> Result<(), Misfit> {
    let host = if plan.cluster.device.memory.is_none() { available_memory() } else { None };
    check_fit(plan, prediction, host)
}

/// Against the plan's devices and this machine's memory: the ranks are threads here, whatever the plan is for.
pub fn here(plan: &Plan, prediction: &Prediction) -> Result<(), Misfit> {
    check_fit(plan, prediction, available_memory())
}

/// Bytes that this machine can still give, where it says so.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
}
