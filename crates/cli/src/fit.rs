//! Whether a plan fits into the devices it is for, and into this machine.

use kintsugi_plan::{DeviceKind, Plan};
use kintsugi_simulate::{Misfit, Prediction, check_fit};

use crate::host;

/// Against the plan's devices, or this machine's memory where the plan is for this machine.
pub fn planned(plan: &Plan, prediction: &Prediction) -> Result<(), Misfit> {
    if plan.cluster.device.memory.is_some() {
        check_fit(plan, prediction, None)
    } else {
        here(plan, prediction)
    }
}

/// Against the plan's devices and this machine's memory: the ranks are threads here, whatever the plan is for.
pub fn here(plan: &Plan, prediction: &Prediction) -> Result<(), Misfit> {
    check_fit(plan, prediction, None)?;
    let bound = match plan.run.device {
        DeviceKind::Cpu => host::memory(),
        DeviceKind::Cuda => host::card_memory(),
    };
    let Some(bound) = bound else { return Ok(()) };
    check_fit(plan, prediction, Some(bound.bytes))
        .map_err(|misfit| Misfit { holder: bound.holder.to_owned(), ..misfit })
}
