//! From what one rank of each stage sends to what all ranks send, level by level.

use kintsugi_comm::paper::{Entry, Transfer, charge};
use kintsugi_comm::{Operation, Traffic};
use kintsugi_plan::{Coordinate, Plan};

use crate::cost::{Algorithm, Among, Links};
use crate::predict::Counts;

/// The bytes of one step over all ranks. Ranks of a stage send the same, but not over the same links.
pub(crate) fn over_all_ranks(plan: &Plan, stages: &[&Counts]) -> Traffic {
    let mut traffic = Traffic::default();
    let (links, topology) = (Links::new(&plan.cluster, plan.mesh, &plan.framework), plan.cluster.topology);
    for rank in 0..plan.mesh.ranks() {
        let at = plan.mesh.coordinate(rank);
        for &(entry, count) in stages[at.pp] {
            let (ranks, me, member) = group(plan, at, entry.group);
            match algorithm(&links, entry) {
                Algorithm::Ring => {
                    let (level, operation, bytes) = charge(entry, ranks, me, member, topology);
                    traffic.add(level, operation, count * bytes);
                }
                Algorithm::Tree => {
                    let bytes = (entry.len * entry.dtype.bytes()) as u64;
                    let node = |i: usize| topology.per_node.map_or(0, |n| member(i) / n);
                    for to in tree_neighbours(ranks, me, node) {
                        traffic.add(
                            topology.level(member(me), member(to)),
                            Operation::AllReduce,
                            count * bytes,
                        );
                    }
                }
            }
        }
    }
    traffic
}

fn algorithm(links: &Links, entry: Entry) -> Algorithm {
    match entry.transfer {
        Transfer::Collective(collective) => {
            let bytes = (entry.len * entry.dtype.bytes()) as f64;
            links.algorithm(Among::group(entry.group), collective, bytes)
        }
        Transfer::Send { .. } => Algorithm::Ring,
    }
}

/// The ranks to which a rank sends in a sum over a tree: its parent on the way up, its children on the way down. The ranks
/// of a node are a chain, and the first of each node are a binary tree.
fn tree_neighbours(ranks: usize, me: usize, node: impl Fn(usize) -> usize) -> Vec<usize> {
    let firsts: Vec<usize> = (0..ranks).filter(|&i| i == 0 || node(i) != node(i - 1)).collect();
    let mut neighbours = Vec::new();
    if let Some(place) = firsts.iter().position(|&first| first == me) {
        neighbours.extend(place.checked_sub(1).map(|above| firsts[above / 2]));
        neighbours.extend([2 * place + 1, 2 * place + 2].iter().filter_map(|&below| firsts.get(below)));
    } else {
        neighbours.push(me - 1);
    }
    neighbours.extend((me + 1 < ranks && node(me + 1) == node(me)).then_some(me + 1));
    neighbours
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_but_the_root_of_a_tree_has_one_parent() {
        for (ranks, per_node) in [(1, 8), (2, 8), (8, 8), (12, 4), (40, 8), (7, 1)] {
            let node = |i: usize| i / per_node;
            let sends: Vec<Vec<usize>> = (0..ranks).map(|me| tree_neighbours(ranks, me, node)).collect();
            let all: usize = sends.iter().map(Vec::len).sum();
            assert_eq!(
                all,
                2 * (ranks - 1),
                "{ranks} ranks, as many whole sends as a ring's parts add up to"
            );
            for (me, to) in sends.iter().enumerate().flat_map(|(me, all)| all.iter().map(move |&to| (me, to)))
            {
                assert!(sends[to].contains(&me), "{me} sends to {to}, which does not send back");
            }
        }
    }
}
