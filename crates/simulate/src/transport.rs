//! The memory of a device that NCCL itself holds.
//!
//! The library holds some for its kernels. Every communicator has some of its own, and for every channel a set of buffers for
//! each neighbour that it receives from: one of the size that the plan sets, and those of NCCL's two protocols for short
//! messages, whose sizes are NCCL's defaults.

use kintsugi_plan::{Group, Plan, Transport};

/// What the library holds besides communicators. Read off one measurement: see docs/transports.md.
const LIBRARY: u64 = 389 << 20;

/// What a communicator holds without any buffers. Not measured on its own: see docs/transports.md.
const PER_COMMUNICATOR: u64 = 8 << 20;

/// Buffers of the protocols for short messages, per channel and neighbour.
const SHORT_MESSAGES: u64 = (512 << 10) + 4800 * 1024;

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
    let tied = (plan.mesh.pp > 1 && plan.holds_tied_copy(stage)).then_some(Group::Tied);
    let groups = [Group::TENSOR, Group::DATA, Group::PIPELINE].into_iter().chain(parts).chain(tied);
    let groups = groups.map(size).filter(|&size| size > 1);
    // A ring receives from one neighbour, and a tree from up to three.
    let group = |size: usize| PER_COMMUNICATOR + channels * (1 + (size as u64 - 1).min(3)) * set;
    // A link has a buffer at the end that receives. Every link has one in the other direction.
    let links = links(plan, stage);
    let of_links = links * PER_COMMUNICATOR + links / 2 * channels * set;
    // The communicator of all ranks only makes the others.
    LIBRARY + PER_COMMUNICATOR + groups.map(group).sum::<u64>() + of_links
}

/// The communicators for messages of a rank: one in each direction for every neighbour.
fn links(plan: &Plan, stage: usize) -> u64 {
    let (stages, wraps) = (plan.mesh.pp, plan.pipeline.virtual_stages > 1);
    if stages == 1 {
        return 0;
    }
    let (before, after) = (stage > 0 || wraps, stage + 1 < stages || wraps);
    2 * (u64::from(before) + u64::from(after))
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
        let set = BUFFER + SHORT_MESSAGES;
        assert_eq!(nccl("run.nccl_channels=1"), LIBRARY + 2 * PER_COMMUNICATOR + 2 * set);
        assert_eq!(nccl("run.nccl_channels=3"), LIBRARY + 2 * PER_COMMUNICATOR + 6 * set);
    }

    #[test]
    fn a_part_of_the_replicas_has_a_communicator_too() {
        let of = |states: &str| {
            let layout = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=4", "cluster.per_node=2"];
            bytes(&[&layout[..], &["run.transport=nccl", states]].concat(), 0)
        };
        // The ranks of a node, and the ranks at the same place of their nodes.
        let two = PER_COMMUNICATOR + CHANNELS * 2 * (BUFFER + SHORT_MESSAGES);
        assert_eq!(of("sharding.states=node") - of("sharding.states=none"), 2 * two);
    }

    #[test]
    fn a_stage_in_the_middle_has_more_links() {
        let pipeline = ["parallel.tp=1", "parallel.pp=4", "parallel.dp=1", "run.transport=nccl"];
        let [first, second] = [0, 1].map(|stage| bytes(&pipeline, stage));
        assert_eq!(second - first, 2 * PER_COMMUNICATOR + CHANNELS * (BUFFER + SHORT_MESSAGES));
    }
}
