//! Computes the traffic of all ranks from that of one rank per stage, level by level.

use kintsugi_comm::paper::{Entry, Transfer, charge};
use kintsugi_comm::{Operation, Traffic};
use kintsugi_plan::Plan;

use crate::cost::{Algorithm, Links};
use crate::predict::Counts;

/// The bytes of one step over all ranks. Ranks of a stage send the same, but not over the same links.
pub(crate) fn over_all_ranks(plan: &Plan, stages: &[&Counts]) -> Traffic {
    let mut traffic = Traffic::default();
    let (links, topology) = (Links::new(&plan.cluster, plan.mesh, &plan.framework), plan.cluster.topology);
    for rank in 0..plan.mesh.ranks() {
        let at = plan.mesh.coordinate(rank);
        for &(entry, count) in stages[at.pp] {
            let ranks = plan.mesh.group_size(entry.group, topology);
            let me = plan.mesh.group_index(entry.group, at, topology);
            let member = |i| plan.mesh.group_member(entry.group, at, i, topology);
            match algorithm(&links, entry) {
                Algorithm::Ring => {
                    for (level, operation, bytes) in charge(entry, ranks, me, member, topology) {
                        traffic.add(level, operation, count * bytes);
                    }
                }
                // Every edge carries the data up and down. The first rank of the group counts them for all.
                Algorithm::Tree if me == 0 => {
                    let bytes = 2 * (entry.len * entry.dtype.bytes()) as u64;
                    for (a, b) in tree(ranks, |i| topology.per_node.map_or(0, |n| member(i) / n)) {
                        let level = topology.level(member(a), member(b));
                        traffic.add(level, Operation::AllReduce, count * bytes);
                    }
                }
                Algorithm::Tree => {}
            }
        }
    }
    traffic
}

fn algorithm(links: &Links, entry: Entry) -> Algorithm {
    match entry.transfer {
        Transfer::Collective(collective) => {
            let bytes = (entry.len * entry.dtype.bytes()) as f64;
            links.algorithm(entry.group, collective, bytes)
        }
        Transfer::Send { .. } | Transfer::Receive { .. } => Algorithm::Ring,
    }
}

/// The edges of the tree of a group. The ranks of a node are a chain, and the first ranks of the nodes are a binary tree.
fn tree(ranks: usize, node: impl Fn(usize) -> usize) -> Vec<(usize, usize)> {
    let mut firsts = vec![0];
    let edge = |rank: usize| {
        if node(rank) == node(rank - 1) {
            return (rank - 1, rank);
        }
        firsts.push(rank);
        (firsts[(firsts.len() - 2) / 2], rank)
    };
    (1..ranks).map(edge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_a_chain_in_each_node_and_binary_between_nodes() {
        let edges = |ranks, per_node: usize| tree(ranks, |i| i / per_node);
        assert_eq!(edges(1, 8), []);
        assert_eq!(edges(4, 8), [(0, 1), (1, 2), (2, 3)]);
        assert_eq!(edges(7, 1), [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]);
        assert_eq!(edges(6, 2), [(0, 1), (0, 2), (2, 3), (0, 4), (4, 5)]);
    }
}
