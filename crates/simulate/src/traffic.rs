//! From what one rank of each stage sends to what all ranks send, level by level.

use kintsugi_comm::Traffic;
use kintsugi_comm::paper::charge;
use kintsugi_plan::{Coordinate, Plan};

use crate::predict::Counts;

/// The bytes of one step over all ranks. Ranks of a stage send the same, but not over the same links.
pub(crate) fn over_all_ranks(plan: &Plan, stages: &[&Counts]) -> Traffic {
    let mut traffic = Traffic::default();
    for rank in 0..plan.mesh.ranks() {
        let at = plan.mesh.coordinate(rank);
        for &(entry, count) in stages[at.pp] {
            let (ranks, me, member) = group(plan, at, entry.group);
            let (level, operation, bytes) = charge(entry, ranks, me, member, plan.cluster.topology);
            traffic.add(level, operation, count * bytes);
        }
    }
    traffic
}

/// A rank's group by its name: its size, the rank's index in it, and its members' numbers.
fn group(plan: &Plan, at: Coordinate, name: &str) -> (usize, usize, impl Fn(usize) -> usize) {
    let mesh = plan.mesh;
    let (ranks, me, place): (_, _, fn(Coordinate, usize, usize) -> Coordinate) = match name {
        "tp" => (mesh.tp, at.tp, |at, tp, _| Coordinate { tp, ..at }),
        "dp" => (mesh.dp, at.dp, |at, dp, _| Coordinate { dp, ..at }),
        "pp" => (mesh.pp, at.pp, |at, pp, _| Coordinate { pp, ..at }),
        "tied" => (2, usize::from(at.pp > 0), |at, i, last| Coordinate { pp: i * last, ..at }),
        other => unreachable!("there is no group {other}"),
    };
    (ranks, me, move |i| mesh.rank(place(at, i, mesh.pp - 1)))
}
