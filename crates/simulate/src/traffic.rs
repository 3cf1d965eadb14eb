//! Computes the traffic of all ranks from that of one rank per stage, level by level.

use kintsugi_comm::paper::{Entry, Transfer, sent_bytes};
use kintsugi_comm::{Collective, Operation, Traffic};
use kintsugi_plan::{Axis, Group, Plan};

use crate::cost::{Algorithm, Links, scatters_messages};
use crate::predict::Counts;

/// The bytes of one step over all ranks. Ranks of a stage send the same, but not over the same links.
pub(crate) fn over_all_ranks(plan: &Plan, stages: &[&Counts]) -> Traffic {
    let mut traffic = Traffic::default();
    let (links, topology) = (Links::of(plan), plan.cluster.topology);
    let places = plan.cluster.places();
    for rank in 0..plan.mesh.ranks() {
        let at = plan.mesh.coordinate(rank);
        let sent = stages[at.pp()].iter().flat_map(|&(entry, count)| {
            as_sent(plan, entry).into_iter().flatten().map(move |entry| (entry, count))
        });
        for (entry, count) in sent {
            let ranks = plan.mesh.group_size(entry.group, topology);
            let me = plan.mesh.group_index(entry.group, at, topology);
            let member = |i| plan.mesh.group_member(entry.group, at, i, topology);
            let entry = as_sent_by(entry, ranks, me);
            match algorithm(&links, entry) {
                Algorithm::Ring => {
                    for (level, operation, bytes) in sent_bytes(entry, ranks, me, member, places.clone()) {
                        traffic.add(level, operation, count * bytes);
                    }
                }
                // Every edge carries the data up and down. The first rank of the group counts them for all.
                Algorithm::Tree if me == 0 => {
                    let bytes = 2 * (entry.len * entry.dtype.bytes()) as u64;
                    for (a, b) in tree(ranks, |i| topology.per_node.map_or(0, |n| member(i) / n)) {
                        let level = places.level(member(a), member(b));
                        traffic.add(level, Operation::AllReduce, count * bytes);
                    }
                }
                Algorithm::Tree => {}
            }
        }
    }
    traffic
}

/// A message as rank `me` of its group sends it. The first rank of cp is on paper, and the others send as far around the ring. Copies of
/// states go to the next node.
fn as_sent_by(entry: Entry, ranks: usize, me: usize) -> Entry {
    match entry.transfer {
        Transfer::Send { to } if entry.group == Group::CONTEXT => {
            Entry { transfer: Transfer::Send { to: (me + to) % ranks }, ..entry }
        }
        Transfer::Send { .. } if entry.group == Group::Nodes => {
            Entry { transfer: Transfer::Send { to: (me + 1) % ranks }, ..entry }
        }
        _ => entry,
    }
}

/// The transfers that the plan's framework makes instead of one of this engine.
fn as_sent(plan: &Plan, entry: Entry) -> [Option<Entry>; 2] {
    match entry.transfer {
        Transfer::Collective(Collective::ReduceScatter)
            if plan.framework.whole_sums && matches!(entry.group, Group::Along(Axis::Data, _)) =>
        {
            [Some(Entry { transfer: Transfer::Collective(Collective::AllReduce), ..entry }), None]
        }
        // The ranks of the receiving stage are placed as those of this one.
        Transfer::Send { .. } if entry.group == Group::PIPELINE && scatters_messages(plan) => {
            let gather = Entry {
                group: Group::TENSOR,
                transfer: Transfer::Collective(Collective::AllGather),
                ..entry
            };
            [Some(Entry { len: entry.len.div_ceil(plan.mesh.tp()), ..entry }), Some(gather)]
        }
        _ => [Some(entry), None],
    }
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
    use kintsugi_plan::config::ConfigSource;
    use kintsugi_spec::Level;
    use kintsugi_tensor::Device;

    use super::*;
    use crate::{Coverage, predict};

    #[test]
    fn a_tree_is_a_chain_in_each_node_and_binary_between_nodes() {
        let edges = |ranks, per_node: usize| tree(ranks, |i| i / per_node);
        assert_eq!(edges(1, 8), []);
        assert_eq!(edges(4, 8), [(0, 1), (1, 2), (2, 3)]);
        assert_eq!(edges(7, 1), [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]);
        assert_eq!(edges(6, 2), [(0, 1), (0, 2), (2, 3), (0, 4), (4, 5)]);
    }

    #[test]
    fn a_framework_sends_as_its_scalars_say() {
        let bytes = |file: &str, set: &str| {
            let plan = ConfigSource::text(file).set(set).plan().unwrap();
            let prediction = predict(&plan, Device::Cpu { threads: 1 }, Coverage::ShortStep);
            prediction.traffic
        };
        let of = |traffic: &Traffic, operation| -> u64 {
            Level::ALL.into_iter().map(|level| traffic.get(level, operation)).sum()
        };
        let replicas = "[model]\npreset = \"demo\"\n[parallel]\ntp = 1\npp = 1\ndp = 2\n[sharding]\nzero = 1";
        let shards = bytes(replicas, "framework.whole_sums=false");
        let whole = bytes(replicas, "framework.whole_sums=true");
        assert_eq!(of(&whole, Operation::ReduceScatter), 0);
        assert!(of(&whole, Operation::AllReduce) >= 2 * of(&shards, Operation::ReduceScatter));
        let stages = "[model]\npreset = \"demo\"\n[parallel]\ntp = 2\npp = 2\ndp = 1";
        let plain = bytes(stages, "framework.scatter_messages=false");
        let scattered = bytes(stages, "framework.scatter_messages=true");
        assert_eq!(2 * of(&scattered, Operation::Send), of(&plain, Operation::Send));
        assert!(of(&scattered, Operation::AllGather) > of(&plain, Operation::AllGather));
    }
}
