//! What every op of a step computes and sends, from the paper trace of a short step.

use std::collections::HashMap;

use kintsugi_comm::Operation;
use kintsugi_comm::paper::{Entry, sent_bytes};
use kintsugi_plan::{Coordinate, Group, Op, OpKind, Plan, Transfer};
use kintsugi_spec::Topology;
use rayon::prelude::*;

use crate::cost::{OpTrace, trace};
use crate::graph::short_step;

/// What one rank does in an op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpWork {
    /// Floating-point operations of its kernels.
    pub flops: u64,
    /// Bytes that it sends, or that the transfer it waits for moves.
    pub bytes: u64,
}

/// One transfer of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferWork {
    /// The operation.
    pub operation: Operation,
    /// The group.
    pub group: Group,
    /// Bytes that one rank sends.
    pub bytes: u64,
}

/// The work of every op of a plan, by stage.
pub struct StepWork {
    stages: Vec<HashMap<OpKind, (OpWork, Vec<TransferWork>)>>,
}

impl StepWork {
    /// Runs a rank of each stage on paper. Ops that differ only in the number of their layer or micro-batch do the same, so a
    /// short step shows all of them.
    pub fn of(plan: &Plan) -> Self {
        let short = plan.with_micro_batches(short_step(plan, plan.micro_batches()));
        let stage = |stage| {
            let work = |(kind, traced): (OpKind, OpTrace)| (kind, work(&short, stage, &traced));
            trace(&short, stage).into_iter().map(work).collect()
        };
        StepWork { stages: (0..plan.mesh.pp()).into_par_iter().map(stage).collect() }
    }

    /// The work of an op on a stage. A wait has the bytes of its transfer.
    pub fn of_op(&self, stage: usize, op: Op) -> OpWork {
        self.traced(stage, op).map(|(work, _)| *work).unwrap_or_default()
    }

    /// The transfer with this number that an op starts or waits for. A receiver has the bytes of the message.
    pub fn transfer(&self, stage: usize, op: Op, number: usize) -> Option<TransferWork> {
        self.traced(stage, op)?.1.get(number).copied()
    }

    fn traced(&self, stage: usize, op: Op) -> Option<&(OpWork, Vec<TransferWork>)> {
        let (stage, sender) = match StepWork::started(op) {
            Op::Start(Transfer::Receive(message)) => (message.peer, Op::Start(Transfer::Send(message))),
            other => (stage, other),
        };
        self.stages.get(stage)?.get(&sender.kind())
    }

    /// The op that started the transfer that an op waits for; the op itself if it waits for none.
    pub fn started(op: Op) -> Op {
        if let Op::Wait(transfer) = op { Op::Start(transfer) } else { op }
    }
}

fn work(plan: &Plan, stage: usize, traced: &OpTrace) -> (OpWork, Vec<TransferWork>) {
    let transfer = |&entry: &Entry| TransferWork {
        operation: entry.operation(),
        group: entry.group,
        bytes: bytes(plan, stage, entry),
    };
    let transfers: Vec<TransferWork> = traced.transfers.iter().map(transfer).collect();
    let work = OpWork {
        flops: traced.kernels.iter().map(|kernel| kernel.flops).sum(),
        bytes: transfers.iter().map(|transfer| transfer.bytes).sum(),
    };
    (work, transfers)
}

/// Bytes that the first rank of a stage sends in a transfer.
fn bytes(plan: &Plan, stage: usize, entry: Entry) -> u64 {
    let (mesh, at, topology) = (plan.mesh, Coordinate::of_stage(stage), plan.cluster.topology);
    let ranks = mesh.group_size(entry.group, topology);
    let me = mesh.group_index(entry.group, at, topology);
    sent_bytes(entry, ranks, me, |i| i, Topology::ONE_NODE).map(|(.., bytes)| bytes).sum()
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::Program;
    use kintsugi_plan::config::ConfigSource;
    use kintsugi_tensor::Device;

    use super::*;
    use crate::{Coverage, predict};

    #[test]
    fn the_ops_of_all_ranks_send_the_traffic_of_the_step() {
        // On even shards every rank of a group sends as much as its first.
        for sets in [&["parallel.schedule=zero-bubble"][..], &["sharding.zero=3", "batch.micro=2"]] {
            let plan = ConfigSource::demo().sets(sets).set("run.eval_every=0").plan().unwrap();
            let work = StepWork::of(&plan);
            let program = |stage| -> Program { plan.program(stage) };
            let starts = |op: &Op| !matches!(op, Op::Wait(_) | Op::Start(Transfer::Receive(_)));
            let sent = (0..plan.mesh.pp()).flat_map(|stage| {
                let work = &work;
                program(stage).ops.into_iter().filter(starts).map(move |op| work.of_op(stage, op).bytes)
            });
            let sent: u64 = sent.sum::<u64>() * plan.mesh.ranks_per_stage() as u64;
            let predicted = predict(&plan, Device::Cpu { threads: 1 }, Coverage::WholeStep).traffic;
            let predicted: u64 = predicted.iter().map(|(_, _, bytes)| bytes).sum();
            let off = sent.abs_diff(predicted) as f64 / predicted as f64;
            assert!(off < 1e-3, "{sets:?}: {sent} beside {predicted}");
        }
    }
}
