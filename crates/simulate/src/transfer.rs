//! The predicted time of a single transfer, with the cost model of a whole step.

use kintsugi_comm::Collective;
use kintsugi_plan::{Group, Plan};

use crate::cost::Links;

/// Seconds of a collective over `bytes` in a group of a plan.
pub fn collective_seconds(plan: &Plan, group: Group, collective: Collective, bytes: f64) -> f64 {
    Links::new(&plan.cluster, plan.mesh, &plan.framework).collective(group, collective, bytes).1
}

/// Seconds of a message of `bytes` from the first stage of a plan to the second.
pub fn message_seconds(plan: &Plan, bytes: f64) -> f64 {
    Links::new(&plan.cluster, plan.mesh, &plan.framework).message(0, 1 % plan.mesh.pp(), bytes, false).1
}
