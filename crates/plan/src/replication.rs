//! Copies of states in the memory of neighbour nodes (`run.replicate_every`).
//!
//! Every rank keeps the states that it owns in the memory of its own node, and sends them to the rank at the same place of the next node,
//! which keeps them too. After the last node comes the first. So if a node is lost, the others still have all states.
//!
//! States travel in pieces of one size. So all ranks of a stage allocate the same, whatever their neighbours own.

use crate::config::ConfigError;
use crate::config::error::invalid;
use crate::program::refresh;
use crate::{Compute, Op, Plan, Program, StoredTensor, Transfer, Unit};

/// Bytes of a piece.
pub const COPY_PIECE: usize = 1 << 20;

/// The states of a unit begin at a multiple of so many bytes in a copy, so that no element is in two pieces.
pub const COPY_ALIGNMENT: usize = 8;

/// Copies of each rank's states: the newest, and the one before, which counts until the newest is whole on all nodes.
pub const COPY_SETS: usize = 2;

/// Bytes of a master weight, and of a weight that has none.
const WEIGHT_BYTES: usize = 4;

impl Plan {
    /// Whether ranks copy their states to the next node.
    pub fn copies_states(&self) -> bool {
        self.run.replicate_every > 0 && self.nodes().0 > 1
    }

    /// Whether states are copied after a step, from 1. After the last step nothing is left to be lost.
    pub fn copies_states_after(&self, step: u64) -> bool {
        self.copies_states() && step.is_multiple_of(self.run.replicate_every) && step < self.run.steps
    }

    /// The number of nodes that the ranks are on, and the ranks of a node.
    pub fn nodes(&self) -> (usize, usize) {
        let ranks = self.mesh.ranks();
        let per_node = self.cluster.topology.per_node.map_or(ranks, |per_node| per_node.min(ranks));
        (ranks.div_ceil(per_node), per_node)
    }

    /// The rank at the same place of the node that is `distance` nodes before that of a rank. Before the first node is the last one.
    pub fn rank_before(&self, rank: usize, distance: usize) -> usize {
        let (nodes, per_node) = self.nodes();
        (rank + (nodes - distance % nodes) * per_node) % (nodes * per_node)
    }

    /// Bytes of the states that every rank of a stage owns, as they are copied: weights in their highest precision, their average and
    /// the states of the optimizer, unit by unit.
    pub fn copied_bytes(&self, stage: usize) -> usize {
        self.stage_units(stage).into_iter().map(|unit| self.copied_bytes_of_unit(unit)).sum()
    }

    fn copied_bytes_of_unit(&self, unit: Unit) -> usize {
        let layout = self.layout(unit);
        let owned = layout.len / self.sharding.states;
        let state_bytes = match self.precision.states {
            Compute::Fp32 => 4,
            Compute::Bf16 | Compute::Fp16 => 2,
        };
        let bytes = |&stored: &StoredTensor| match stored {
            StoredTensor::Weights | StoredTensor::Average => owned * WEIGHT_BYTES,
            StoredTensor::FirstMoment | StoredTensor::SecondMoment | StoredTensor::Momentum => {
                self.optimizer.state_elements(&layout, stored, owned) * state_bytes
            }
        };
        self.stored_tensors().iter().map(|stored| bytes(stored).next_multiple_of(COPY_ALIGNMENT)).sum()
    }

    /// Bytes of all copies in the memory of the fullest node.
    pub fn copied_bytes_of_node(&self) -> u64 {
        let (nodes, per_node) = self.nodes();
        let of_stage: Vec<usize> = (0..self.mesh.pp()).map(|stage| self.copied_bytes(stage)).collect();
        let of_rank = |rank| of_stage[self.mesh.coordinate(rank).pp()];
        let of_node = |node: usize| -> usize {
            let ranks = node * per_node..(node + 1) * per_node;
            ranks.map(|rank| of_rank(rank) + of_rank(self.rank_before(rank, 1))).sum()
        };
        (COPY_SETS * (0..nodes).map(of_node).max().unwrap_or(0)) as u64
    }

    /// The copying of all states on a stage, between two steps.
    pub fn replication(&self, stage: usize) -> Program {
        let bytes = (0..self.mesh.pp()).map(|stage| self.copied_bytes(stage)).max().unwrap_or(0);
        let pieces = 0..bytes.div_ceil(COPY_PIECE);
        let ops = pieces.flat_map(|piece| Op::start_and_wait(Transfer::Replicate { piece })).collect();
        Program { stage, ops }
    }

    /// What follows when the ranks of a stage have got their own states from copies: they get the other weights, as after an update.
    pub fn restoration(&self, stage: usize) -> Program {
        let mut ops = Vec::new();
        refresh(self, stage, &mut ops);
        Program { stage, ops }
    }
}

/// Refuses copies if there is no neighbour node with as many ranks.
pub(crate) fn check(plan: &Plan) -> Result<(), ConfigError> {
    let (every, ranks) = (plan.run.replicate_every, plan.mesh.ranks());
    if every == 0 {
        return Ok(());
    }
    let refused = |rule: String| Err(invalid("run.replicate_every", every, rule));
    if !plan.frozen.is_empty() {
        return refused(
            "copies no frozen parameters: train all of them, or set run.replicate_every to 0".to_owned(),
        );
    }
    match plan.cluster.topology.per_node.filter(|&per_node| per_node < ranks) {
        None => refused(format!(
            "copies states to the memory of a neighbour node, and all {ranks} ranks are on one; set cluster.per_node to the ranks of a \
             node, or run.replicate_every to 0"
        )),
        Some(per_node) if !ranks.is_multiple_of(per_node) => refused(format!(
            "needs as many ranks on every node, and {ranks} ranks do not fill nodes of cluster.per_node = {per_node}"
        )),
        Some(_) => Ok(()),
    }
}
