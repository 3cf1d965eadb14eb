//! From what one rank of each stage sends to what all ranks send, level by level.

use kintsugi_comm::Traffic;
use kintsugi_comm::paper::charge;
use kintsugi_plan::{Axis, Coordinate, Plan};

use crate::predict::Counts;

/// The bytes of one step over all ranks. Ranks of a stage send the same, but not over the same links.
pub(crate) fn over_all_ranks(plan: &Plan, stages: &[&Counts]) -> Traffic {
    let mut traffic = Traffic::default();
    for rank in 0..plan.mesh.ranks() {
        let at = plan.mesh.coordinate(rank);
        for &(entry, count) in stages[at.pp] {
            let (members, me) = group(plan, at, entry.group);
            let (level, operation, bytes) = charge(entry, &members, me, plan.cluster.topology);
            traffic.add(level, operation, count * bytes);
        }
    }
    traffic
}

/// The members of a rank's group by its name, and the rank's index in it.
fn group(plan: &Plan, at: Coordinate, name: &str) -> (Vec<usize>, usize) {
    match name {
        "tp" => (plan.mesh.group(Axis::Tensor, at), at.tp),
        "dp" => (plan.mesh.group(Axis::Data, at), at.dp),
        "pp" => (plan.mesh.group(Axis::Pipeline, at), at.pp),
        "tied" => (plan.mesh.tied_group(at), usize::from(at.pp > 0)),
        other => unreachable!("there is no group {other}"),
    }
}
