//! Whether a plan fits into the devices that it is for, and into this machine.

use kintsugi_checkpoint::snapshot_bytes;
use kintsugi_engine::platform;
use kintsugi_plan::{DeviceKind, Plan, Resume};
use kintsugi_rank::RankMemory;
use kintsugi_simulate::{Misfit, Prediction, check_memory, check_planned};
use kintsugi_spec::{Cause, units};

use crate::failure::{ErrorContext, Failure};
use crate::host;

/// Compares with the plan's devices less their headroom, or with this machine's memory if the plan is for this machine.
pub fn planned(plan: &Plan, prediction: &Prediction) -> Result<(), Misfit> {
    if plan.cluster.device.memory.is_some() {
        check_planned(plan, &prediction.stages, None)
    } else {
        here(plan, prediction, plan.mesh.ranks())
    }
}

/// Refuses a plan whose device does not exist on this machine.
pub fn check_device(plan: &Plan) -> Result<(), Failure> {
    let Some(platform) = platform(plan.run.device) else { return Ok(()) };
    let reason = match platform.devices() {
        Ok(0) => Cause::new(format!("the {} driver shows no device", platform.name())),
        Ok(_) => return Ok(()),
        Err(error) => Cause::new(error),
    };
    let advice = "a run that is resumed keeps its device: set run.device = \"cpu\" to continue it on the CPU";
    let error = ErrorContext::new(format!("run.device = \"{}\"", plan.run.device.name()), reason);
    Err(Failure::run(if plan.run.resume == Resume::No { error } else { error.advise(advice) }))
}

/// Whether a plan fits, if the memory that [`planned`] uses is known. It is unknown for a GPU on a machine without one.
pub fn known(plan: &Plan, prediction: &Prediction) -> Option<bool> {
    let known = plan.cluster.device.memory.is_some() || bound(plan).is_some();
    known.then(|| planned(plan, prediction).is_ok())
}

/// Compares with the plan's devices and with the memory of this machine, which has `ranks_here` of the ranks, whatever the
/// plan is for.
pub fn here(plan: &Plan, prediction: &Prediction, ranks_here: usize) -> Result<(), Misfit> {
    check_memory(plan, &prediction.stages, None)?;
    let Some(bound) = bound(plan) else { return Ok(()) };
    // Every node has as much memory for its part of the ranks.
    let bytes = bound.bytes / ranks_here as u64 * plan.mesh.ranks() as u64;
    let bound =
        host::Bound { bytes: if ranks_here < plan.mesh.ranks() { bytes } else { bound.bytes }, ..bound };
    let fits = |bytes, holder: String| {
        check_memory(plan, &prediction.stages, Some(bytes)).map_err(|misfit| Misfit { holder, ..misfit })
    };
    fits(bound.bytes, bound.holder.to_owned())?;
    // The copy of a checkpoint is always the host's.
    let saves = plan.run.keep > 0 && plan.run.device == DeviceKind::Cpu;
    let copy = if saves { snapshot_bytes(plan) } else { 0 };
    let less = format!("{}, less {} for the copy of a checkpoint", bound.holder, units::bytes(copy));
    fits(bound.bytes.saturating_sub(copy), less)?;
    if !plan.copies_states() || plan.run.device != DeviceKind::Cpu {
        return Ok(());
    }
    let copies = copy + plan.nodes().0 as u64 * plan.copied_bytes_of_node();
    let less =
        format!("{}, less {} for copies of checkpoints and states", bound.holder, units::bytes(copies));
    fits(bound.bytes.saturating_sub(copies), less)
}

/// The same for ranks that do not train, whose memory is given by stage.
pub fn inference_here(plan: &Plan, stages: &[RankMemory]) -> Result<(), Misfit> {
    check_memory(plan, stages, None)?;
    let Some(bound) = bound(plan) else { return Ok(()) };
    check_memory(plan, stages, Some(bound.bytes))
        .map_err(|misfit| Misfit { holder: bound.holder.to_owned(), ..misfit })
}

/// The memory that all ranks share on this machine.
pub fn bound(plan: &Plan) -> Option<host::Bound> {
    match plan.run.device {
        DeviceKind::Cpu => host::memory(),
        kind @ (DeviceKind::Cuda | DeviceKind::Hip) => host::card_memory(kind),
    }
}
