//! The memory of a device that NCCL itself holds.
//!
//! The library holds some for its kernels. Every communicator has some of its own, and for every channel a set of buffers for
//! each neighbour that it receives from: one of the size that the plan sets, and those of NCCL's two protocols for short
//! messages, whose sizes are NCCL's defaults. The constants are from measurements on an H200: see docs/transports.md.

use kintsugi_plan::{Group, Plan, Transport};

/// What the kernels of collectives take.
const COLLECTIVE_KERNELS: u64 = 392 << 20;

/// What the kernels of messages take in addition.
const MESSAGE_KERNELS: u64 = 68 << 20;

/// What a communicator holds without any buffers.
const PER_COMMUNICATOR: u64 = 4 << 20;

/// What a communicator for messages holds in each of its two ranks besides its buffers.
const PER_LINK: u64 = 16 << 20;

/// Buffers of the protocols for short messages, per channel and neighbour.
const SHORT_MESSAGES: u64 = (512 << 10) + 4800 * 1024;

/// The driver allocates device memory in multiples of this.
const GRANULARITY: u64 = 2 << 20;

/// Channels of a communicator, and bytes of a buffer, if the plan does not set them.
const CHANNELS: u64 = 4;
const BUFFER: u64 = 1 << 20;

/// Bytes that NCCL holds on a rank of a stage, or 0 if the plan does not say that the ranks communicate by NCCL.
pub(crate) fn transport_bytes(plan: &Plan, stage: usize) -> u64 {
    if plan.run.transport != Transport::Nccl || plan.mesh.ranks() == 1 {
        return 0;
    }
    let channels = plan.run.nccl_channels.unwrap_or(CHANNELS);
    let set = plan.run.nccl_buffer.unwrap_or(BUFFER) + SHORT_MESSAGES;
    let size = |group: Group| plan.mesh.group_size(group, plan.cluster.topology);
    let parts = plan.sharding.groups().filter(|&part| part != Group::DATA);
    let tied = (plan.mesh.pp() > 1 && plan.holds_tied_copy(stage)).then_some(Group::Tied);
    let nodes = plan.copies_states().then_some(Group::Nodes);
    let axes = [Group::TENSOR, Group::CONTEXT, Group::DATA, Group::PIPELINE];
    let groups = axes.into_iter().chain(parts).chain(tied).chain(nodes);
    let groups = groups.map(size).filter(|&size| size > 1);
    // A ring receives from one neighbour, and a tree from up to three. The sender has a little memory of its own for each.
    let neighbour = set.next_multiple_of(GRANULARITY) + GRANULARITY;
    let group = |size: usize| PER_COMMUNICATOR + channels * (1 + (size as u64 - 1).min(3)) * neighbour;
    // A link has a buffer at the end that receives. Every link has one in the other direction.
    let links = links(plan, stage);
    let of_links = links * PER_LINK + links / 2 * channels * set;
    let kernels = COLLECTIVE_KERNELS + if links > 0 { MESSAGE_KERNELS } else { 0 };
    // The communicator of all ranks only makes the others.
    kernels + PER_COMMUNICATOR + groups.map(group).sum::<u64>() + of_links
}

/// The communicators for messages of a rank: one in each direction for every neighbour in the pipeline.
fn links(plan: &Plan, stage: usize) -> u64 {
    let (stages, wraps) = (plan.mesh.pp(), plan.pipeline.virtual_stages > 1);
    // Around the ring of cp there is one from the previous rank and one to the next.
    let of_context = if plan.mesh.cp() > 1 { 2 } else { 0 };
    // And around that of the nodes.
    let of_rings = of_context + if plan.copies_states() { 2 } else { 0 };
    if stages == 1 {
        return of_rings;
    }
    let (before, after) = (stage > 0 || wraps, stage + 1 < stages || wraps);
    2 * (u64::from(before) + u64::from(after)) + of_rings
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    fn bytes(sets: &[&str], stage: usize) -> u64 {
        let base = ["run.device=cuda", "model.tied=false", "batch.global=8", "batch.micro=1"];
        let plan = ConfigSource::demo().sets(base).sets(sets).plan().expect("a legal config");
        transport_bytes(&plan, stage)
    }

    #[test]
    fn only_nccl_with_several_ranks_has_memory_of_its_own() {
        let two = ["parallel.tp=2", "parallel.pp=1", "parallel.dp=1"];
        assert_eq!(bytes(&two, 0), 0, "another transport");
        let nccl = |channels: &str| bytes(&[&two[..], &["run.transport=nccl", channels]].concat(), 0);
        // The buffers of a neighbour take 6.2 MiB, so 8 MiB, and the sender 2 MiB.
        assert_eq!(nccl("run.nccl_channels=1"), COLLECTIVE_KERNELS + 2 * PER_COMMUNICATOR + 2 * (10 << 20));
        assert_eq!(nccl("run.nccl_channels=3"), COLLECTIVE_KERNELS + 2 * PER_COMMUNICATOR + 6 * (10 << 20));
    }

    /// Without the kernels, two ranks with buffers of 4 MiB hold this much for the groups of all ranks and of dp (NCCL 2.32, H200).
    #[test]
    fn the_groups_of_two_ranks_take_what_was_measured() {
        for (channels, measured) in [(1, 33_554_432), (2, 58_720_256), (4, 109_051_904), (8, 209_715_200)] {
            let layout = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=2", "run.nccl_buffer=4194304"];
            let nccl = ["run.transport=nccl", &format!("run.nccl_channels={channels}")];
            assert_eq!(bytes(&[&layout[..], &nccl].concat(), 0) - COLLECTIVE_KERNELS, measured);
        }
    }

    #[test]
    fn a_part_of_the_replicas_has_a_communicator_too() {
        let of = |states: &str| {
            let layout = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=4", "cluster.per_node=2"];
            bytes(&[&layout[..], &["run.transport=nccl", states]].concat(), 0)
        };
        // The ranks of a node, and the ranks at the same place of their nodes.
        let two = PER_COMMUNICATOR + CHANNELS * 2 * (10 << 20);
        assert_eq!(of("sharding.states=node") - of("sharding.states=none"), 2 * two);
    }

    #[test]
    fn a_stage_in_the_middle_has_more_links() {
        let pipeline = ["parallel.tp=1", "parallel.pp=4", "parallel.dp=1", "run.transport=nccl"];
        let [first, second] = [0, 1].map(|stage| bytes(&pipeline, stage));
        assert_eq!(second - first, 2 * PER_LINK + CHANNELS * (BUFFER + SHORT_MESSAGES));
    }
}
