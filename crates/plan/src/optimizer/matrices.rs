//! Which rank updates which whole matrices.
//!
//! The ranks that together hold all elements of a stage's weights and their states, those of tp and of the sharding of states, are
//! its owners. They take the layers of the stage in rounds of one layer each: in a round every rank sends its shard of every layer
//! to the layer's owner, who updates the layer's matrices and sends the shards of the result back. All layers are equally large, so
//! the all-to-all has equal chunks, and only the last round may leave owners without a layer.

use crate::{Group, Plan, Unit};

impl Plan {
    /// Whether the optimizer updates matrices of layers as a whole.
    pub fn needs_whole_matrices(&self) -> bool {
        // All layers have the same parameters.
        let layout = self.layout(Unit::Layer(0));
        layout.placed.iter().any(|placed| self.optimizer.kind.needs_whole(&placed.parameter))
    }

    /// The ranks that share the layers of a stage if the optimizer needs whole matrices.
    pub fn owners(&self) -> usize {
        self.mesh.tp() * self.sharding.states
    }

    /// The trained layers of a stage in rounds of one layer for each owner. Empty if the optimizer needs no whole matrices.
    pub fn matrix_rounds(&self, stage: usize) -> Vec<Vec<Unit>> {
        if !self.needs_whole_matrices() {
            return Vec::new();
        }
        let units = self.trained_units(stage);
        let layers: Vec<Unit> = units.into_iter().filter(|unit| matches!(unit, Unit::Layer(_))).collect();
        layers.chunks(self.owners()).map(<[Unit]>::to_vec).collect()
    }

    /// The groups of the all-to-alls that bring a layer to its owner, in order: the parts of dp over which states are sharded,
    /// outermost first, and tp.
    pub fn owner_groups(&self) -> Vec<Group> {
        let parts: Vec<Group> =
            self.sharding.groups().take(self.sharding.depth(self.sharding.states)).collect();
        let tensor = (self.mesh.tp() > 1).then_some(Group::TENSOR);
        parts.into_iter().rev().chain(tensor).collect()
    }
}
