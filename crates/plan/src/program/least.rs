//! How often a stage starts the transfers of its units in a training step, without its program: at least, for a search.

use super::gather;
use crate::{Block, Plan, Transfer, Unit};

impl Plan {
    /// The gathers, reductions and refreshes of a stage in a step of so many micro-batches, with how often it starts each, at
    /// least. Layers are alike, so the first one stands for all.
    pub fn least_transfers(&self, stage: usize, micro_batches: usize) -> Vec<(Transfer, usize)> {
        let sharding = &self.sharding;
        let each = if sharding.reduces_every_micro_batch() { micro_batches } else { 1 };
        let of_layers = gather::least_of_layers(self, stage, micro_batches);
        let mut transfers = Vec::new();
        for (unit, count) in self.alike_units(stage) {
            let reduce = |times| move |phase| (Transfer::Reduce { unit, phase }, count * times);
            transfers.extend(sharding.inner_reductions().into_iter().map(reduce(each)));
            transfers.extend(sharding.outer_reductions().into_iter().map(reduce(1)));
            if sharding.weights > 1 {
                let again = if unit == Unit::Layer(0) { of_layers.saturating_sub(count) } else { 0 };
                let gather = |times| move |phase| (Transfer::Gather { unit, phase }, times);
                transfers.extend(sharding.gathers().into_iter().map(gather(count)));
                transfers.extend(sharding.later_gathers().into_iter().map(gather(again)));
            }
            let refresh = |phase| (Transfer::Refresh { unit, phase }, count);
            transfers.extend(sharding.refreshes().into_iter().map(refresh));
        }
        transfers
    }

    /// The units of a stage, each once for those that are alike, with their number.
    fn alike_units(&self, stage: usize) -> Vec<(Unit, usize)> {
        let pp = self.mesh.pp();
        let layers = self.pipeline.layers.iter().skip(stage).step_by(pp).sum();
        let ends = [(stage == 0, Block::Embedding), (stage + 1 == pp, Block::Head)];
        let mut units = vec![(Unit::Layer(0), layers)];
        for unit in ends.into_iter().filter(|end| end.0).flat_map(|(_, block)| self.units_of(block)) {
            if units.iter().all(|&(other, _)| other != unit) {
                units.push((unit, 1));
            }
        }
        units
    }
}
