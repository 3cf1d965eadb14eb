//! Gathers of weights: of all weights before they are used, and of updated weights after a step.
//!
//! As codes (qwZ, arXiv 2306.10209), the first phase quantises this rank's own shard and the last one restores the numbers of
//! all shards, its own included. So all ranks that gather the same weights get the same bits.

use std::ops::Range;

use kintsugi_comm::{Collective, Communicator};
use kintsugi_plan::{Codes, Phase};
use kintsugi_tensor::{Backend, Buffer, Category};

use super::codes::Slices;
use super::{UnitState, start, wait, within};

impl UnitState {
    /// Starts a phase of a gather. Outer phases fill the secondary shard if there is one, and inner phases the whole.
    pub fn gather_start(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        let depth = self.sharding.depth_of(phase.over);
        let range = self.gather_target(depth).0;
        if let Some(codes) = phase.codes {
            let (slices, own) = (Slices::new(range, self.resident.len(), codes), self.resident.clone());
            let quantize = |state: &Self, buffer: &Buffer| {
                slices.quantize_own(backend, state.weights.view(), &own, buffer);
            };
            return self.codes_start(backend, depth, &slices, group, quantize);
        }
        let known = self.gather_target(depth).1.take();
        let buffer = known.unwrap_or_else(|| {
            let buffer = backend.allocate(range.len(), self.types.compute, Category::Weights);
            let (source, held) = match (&self.secondary, self.sharding.secondary) {
                (Some(secondary), shards) => (secondary, &self.pieces[self.sharding.depth(shards)]),
                (None, _) => (&self.weights, &self.resident),
            };
            backend.copy(source.view(), buffer.slice(within(held, &range)));
            buffer
        });
        let piece = within(&self.pieces[depth], &range);
        start(&mut self.gathering, group, Collective::AllGather, buffer, piece);
    }

    /// Waits for a phase of a gather.
    pub fn gather_wait(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        let buffer = wait(&mut self.gathering, group);
        let depth = self.sharding.depth_of(phase.over);
        let Some(codes) = phase.codes else {
            *self.gather_target(depth).1 = Some(buffer);
            return;
        };
        if depth > self.sharding.depth(self.sharding.secondary) {
            self.gathered_codes = Some(buffer);
            return;
        }
        let (range, _) = self.gather_target(depth);
        let numbers = backend.allocate(range.len(), self.types.compute, Category::Weights);
        Slices::new(range, self.resident.len(), codes).dequantize(backend, &buffer, numbers.view());
        *self.gather_target(depth).1 = Some(numbers);
    }

    /// What a gather over the part at `depth` fills, and the range of that in the flat buffer.
    fn gather_target(&mut self, depth: usize) -> (Range<usize>, &mut Option<Buffer>) {
        let secondary = self.sharding.depth(self.sharding.secondary);
        if self.sharding.secondary > 1 && depth >= secondary {
            (self.pieces[secondary].clone(), &mut self.secondary)
        } else {
            (0..self.layout.len, &mut self.gathered)
        }
    }

    pub fn release(&mut self) {
        self.gathered = None;
    }

    pub fn discard(&mut self) {
        self.secondary = None;
    }

    /// Starts a phase of the gathering of updated weights.
    pub fn refresh_start(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        let depth = self.sharding.depth_of(phase.over);
        if let Some(codes) = phase.codes {
            let (slices, own) = (self.refreshed_slices(codes), self.owned.clone());
            let quantize = |state: &Self, buffer: &Buffer| {
                let master = state.master.as_ref().expect("weights that are replaced by codes have a master");
                slices.quantize_own(backend, master.view(), &own, buffer);
            };
            return self.codes_start(backend, depth, &slices, group, quantize);
        }
        // The weights themselves are being transferred. An empty buffer takes their place until the wait.
        let empty = backend.allocate(0, self.types.compute, Category::Weights);
        let weights = std::mem::replace(&mut self.weights, empty);
        let piece = within(&self.pieces[depth], &self.resident);
        start(&mut self.gathering, group, Collective::AllGather, weights, piece);
    }

    /// Waits for a phase of the gathering of updated weights.
    pub fn refresh_wait(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        let buffer = wait(&mut self.gathering, group);
        let Some(codes) = phase.codes else {
            self.weights = buffer;
            return;
        };
        if self.sharding.depth_of(phase.over) > self.sharding.depth(self.sharding.weights) {
            self.gathered_codes = Some(buffer);
            return;
        }
        self.refreshed_slices(codes).dequantize(backend, &buffer, self.weights.view());
    }

    /// The weights of this rank as slices, one for each owner of their states.
    fn refreshed_slices(&self, codes: Codes) -> Slices {
        Slices::new(self.resident.clone(), self.owned.len(), codes)
    }

    /// Starts a phase of a gather of codes over the part at `depth`. `quantize` writes this rank's own slice, in the first phase.
    fn codes_start(
        &mut self,
        backend: &dyn Backend,
        depth: usize,
        slices: &Slices,
        group: &dyn Communicator,
        quantize: impl FnOnce(&Self, &Buffer),
    ) {
        let known = self.gathered_codes.take();
        let buffer = known.unwrap_or_else(|| {
            let buffer = slices.buffer(backend);
            quantize(self, &buffer);
            buffer
        });
        let piece = slices.place(&self.pieces[depth]);
        start(&mut self.gathering, group, Collective::AllGather, buffer, piece);
    }
}
