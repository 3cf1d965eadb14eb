//! Gathers of weights: of all weights before they are used, and of updated weights after a step.
//!
//! As codes (qwZ, arXiv 2306.10209), the first phase quantises this rank's own shard and the last one restores the numbers of
//! all shards, its own included. So all ranks that gather the same weights get the same bits.

use std::ops::Range;

use kintsugi_comm::{Collective, Communicator, Pending};
use kintsugi_plan::{Codes, Phase};
use kintsugi_tensor::{Backend, Buffer, Category};

use super::codes::Slices;
use super::{UnitState, within};

/// A range of a unit's weights on one rank: its shard, the secondary shard, or the whole.
#[derive(Debug, Default)]
pub(super) enum WeightRange {
    /// Not gathered, or freed.
    #[default]
    Absent,
    /// A phase of a gather is filling it.
    Gathering(Pending),
    /// Between two phases of a gather: some shards are missing.
    PartlyGathered(Buffer),
    /// Complete.
    Ready(Buffer),
}

/// The codes of weights during a gather or refresh.
#[derive(Debug, Default)]
pub(super) enum WeightCodes {
    /// Nothing is gathered as codes.
    #[default]
    Absent,
    /// A phase is under way.
    Gathering(Pending),
    /// Between two phases.
    PartlyGathered(Buffer),
}

/// The weights of a unit on one rank.
#[derive(Debug)]
pub(super) struct UnitWeights {
    /// The range that this rank always holds: all weights, or its shard. A refresh gathers it in place.
    pub resident: WeightRange,
    /// A larger shard, from the first gather of a step to the last.
    pub secondary: WeightRange,
    /// All weights, if they are sharded: from a gather to the release.
    pub whole: WeightRange,
    pub codes: WeightCodes,
}

/// What a phase of a gather fills.
struct GatherTarget {
    /// The secondary shard, or the whole weights.
    secondary: bool,
    /// Its range of the flat buffer.
    range: Range<usize>,
    /// Whether the phase completes it.
    completes: bool,
}

impl UnitState {
    /// Starts a phase of a gather. Outer phases fill the secondary shard if there is one, and inner phases the whole.
    pub fn gather_start(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        let depth = self.sharding.depth_of(phase.over);
        let target = self.gather_target(depth);
        if let Some(codes) = phase.codes {
            let slices = Slices::new(target.range, self.resident.len(), codes);
            let buffer = self.weights.codes.take().unwrap_or_else(|| {
                let (weights, buffer) = (self.weights.resident.ready(), slices.buffer(backend));
                slices.quantize_own(backend, weights.view(), &self.resident, &buffer);
                buffer
            });
            let piece = slices.place(&self.pieces[depth]);
            self.weights.codes = WeightCodes::Gathering(group.start(Collective::AllGather, buffer, piece));
            return;
        }
        let buffer = self.weights.gathered(&target).take().unwrap_or_else(|| {
            let buffer = backend.allocate(target.range.len(), self.types.compute, Category::Weights);
            let (source, held) = match &self.weights.secondary {
                WeightRange::Absent => (self.weights.resident.ready(), &self.resident),
                secondary => (secondary.ready(), &self.pieces[self.sharding.depth(self.sharding.secondary)]),
            };
            backend.copy(source.view(), buffer.slice(within(held, &target.range)));
            buffer
        });
        let piece = within(&self.pieces[depth], &target.range);
        *self.weights.gathered(&target) =
            WeightRange::Gathering(group.start(Collective::AllGather, buffer, piece));
    }

    /// Waits for a phase of a gather.
    pub fn gather_wait(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        let target = self.gather_target(self.sharding.depth_of(phase.over));
        let Some(codes) = phase.codes else {
            return self.weights.gathered(&target).wait(group, target.completes);
        };
        let buffer = self.weights.codes.wait(group);
        if !target.completes {
            self.weights.codes = WeightCodes::PartlyGathered(buffer);
            return;
        }
        let numbers = backend.allocate(target.range.len(), self.types.compute, Category::Weights);
        let slices = Slices::new(target.range.clone(), self.resident.len(), codes);
        slices.dequantize(backend, &buffer, numbers.view());
        *self.weights.gathered(&target) = WeightRange::Ready(numbers);
    }

    /// What a gather over the part at `depth` fills.
    fn gather_target(&self, depth: usize) -> GatherTarget {
        let inner = self.sharding.depth(self.sharding.secondary);
        if self.sharding.secondary > 1 && depth >= inner {
            let range = self.pieces[inner].clone();
            GatherTarget { secondary: true, range, completes: depth == inner }
        } else {
            GatherTarget { secondary: false, range: 0..self.layout.len, completes: depth == 0 }
        }
    }

    pub fn release(&mut self) {
        self.weights.whole = WeightRange::Absent;
    }

    pub fn discard(&mut self) {
        self.weights.secondary = WeightRange::Absent;
    }

    /// Starts a phase of the gathering of updated weights.
    pub fn refresh_start(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        let depth = self.sharding.depth_of(phase.over);
        if let Some(codes) = phase.codes {
            let slices = self.refreshed_slices(codes);
            let buffer = self.weights.codes.take().unwrap_or_else(|| {
                let master = self.master.as_ref().expect("weights that are replaced by codes have a master");
                let buffer = slices.buffer(backend);
                slices.quantize_own(backend, master.view(), &self.owned, &buffer);
                buffer
            });
            let piece = slices.place(&self.pieces[depth]);
            self.weights.codes = WeightCodes::Gathering(group.start(Collective::AllGather, buffer, piece));
            return;
        }
        let weights = self.weights.resident.take_updated();
        let piece = within(&self.pieces[depth], &self.resident);
        self.weights.resident = WeightRange::Gathering(group.start(Collective::AllGather, weights, piece));
    }

    /// Waits for a phase of the gathering of updated weights.
    pub fn refresh_wait(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        let last = self.sharding.depth_of(phase.over) == self.sharding.depth(self.sharding.weights);
        let Some(codes) = phase.codes else {
            return self.weights.resident.wait(group, last);
        };
        let buffer = self.weights.codes.wait(group);
        if last {
            let weights = self.weights.resident.ready();
            self.refreshed_slices(codes).dequantize(backend, &buffer, weights.view());
        } else {
            self.weights.codes = WeightCodes::PartlyGathered(buffer);
        }
    }

    /// The weights of this rank as slices, one for each owner of their states.
    fn refreshed_slices(&self, codes: Codes) -> Slices {
        Slices::new(self.resident.clone(), self.owned.len(), codes)
    }
}

impl UnitWeights {
    /// The weights of a unit before any gather: only the resident range.
    pub fn new(resident: Buffer) -> Self {
        UnitWeights {
            resident: WeightRange::Ready(resident),
            secondary: WeightRange::Absent,
            whole: WeightRange::Absent,
            codes: WeightCodes::Absent,
        }
    }

    /// The whole weights, which are the resident ones unless they were gathered.
    pub fn whole(&self) -> &Buffer {
        match &self.whole {
            WeightRange::Absent => self.resident.ready(),
            gathered => gathered.ready(),
        }
    }

    fn gathered(&mut self, target: &GatherTarget) -> &mut WeightRange {
        if target.secondary { &mut self.secondary } else { &mut self.whole }
    }
}

impl WeightRange {
    /// The complete weights.
    pub fn ready(&self) -> &Buffer {
        match self {
            WeightRange::Ready(buffer) => buffer,
            other => panic!("cannot read weights in state {other:?}"),
        }
    }

    /// Takes what the phases of a gather so far have filled; `None` before the first phase.
    fn take(&mut self) -> Option<Buffer> {
        match std::mem::take(self) {
            WeightRange::Absent => None,
            WeightRange::PartlyGathered(buffer) => Some(buffer),
            other => panic!("cannot gather weights in state {other:?}"),
        }
    }

    /// Takes the weights for a phase of a refresh.
    fn take_updated(&mut self) -> Buffer {
        match std::mem::take(self) {
            WeightRange::Ready(buffer) | WeightRange::PartlyGathered(buffer) => buffer,
            other => panic!("cannot refresh weights in state {other:?}"),
        }
    }

    /// Waits for a phase, which may complete the weights.
    fn wait(&mut self, group: &dyn Communicator, completes: bool) {
        *self = match std::mem::take(self) {
            WeightRange::Gathering(pending) if completes => WeightRange::Ready(group.wait(pending)),
            WeightRange::Gathering(pending) => WeightRange::PartlyGathered(group.wait(pending)),
            other => panic!("cannot wait for weights in state {other:?}"),
        };
    }
}

impl WeightCodes {
    /// Takes the codes that were gathered so far; `None` before the first phase.
    fn take(&mut self) -> Option<Buffer> {
        match std::mem::take(self) {
            WeightCodes::Absent => None,
            WeightCodes::PartlyGathered(buffer) => Some(buffer),
            WeightCodes::Gathering(_) => panic!("codes are being gathered already"),
        }
    }

    /// Waits for a phase and takes the codes.
    fn wait(&mut self, group: &dyn Communicator) -> Buffer {
        match std::mem::take(self) {
            WeightCodes::Gathering(pending) => group.wait(pending),
            other => panic!("cannot wait for codes in state {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use kintsugi_comm::Solo;
    use kintsugi_tensor::DType;
    use kintsugi_tensor::cpu::CpuBackend;
    use kintsugi_tensor::cpu::memory::Heap;

    use super::*;

    fn gathering() -> WeightRange {
        let buffer = CpuBackend::new(Rc::new(Heap::default()), 1).allocate(4, DType::F32, Category::Weights);
        WeightRange::Gathering(Solo.start(Collective::AllGather, buffer, 0..4))
    }

    #[test]
    fn weights_are_read_after_the_last_phase_of_their_gather() {
        let mut weights = gathering();
        weights.wait(&Solo, false);
        let buffer = weights.take().expect("one phase has run");
        weights = WeightRange::Gathering(Solo.start(Collective::AllGather, buffer, 0..4));
        weights.wait(&Solo, true);
        assert_eq!(weights.ready().len(), 4);
    }

    #[test]
    #[should_panic(expected = "cannot read weights in state Gathering")]
    fn weights_are_not_read_while_they_are_gathered() {
        gathering().ready();
    }

    #[test]
    #[should_panic(expected = "cannot read weights in state PartlyGathered")]
    fn weights_are_not_read_between_two_phases() {
        let mut weights = gathering();
        weights.wait(&Solo, false);
        weights.ready();
    }

    #[test]
    #[should_panic(expected = "cannot gather weights in state Ready")]
    fn weights_are_released_before_they_are_gathered_again() {
        let mut weights = gathering();
        weights.wait(&Solo, true);
        weights.take();
    }
}
