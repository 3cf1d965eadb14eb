//! Reductions of gradients.
//!
//! As codes (qgZ, arXiv 2306.10209), a reduce-scatter is an all-to-all: the first phase of a reduction quantises the gradient,
//! later ones sum what they received in fp32 and quantise the sums, and after the last one the sums are added to the shard.

use kintsugi_comm::{Collective, Communicator};
use kintsugi_plan::{Codes, Group, Phase, PhaseKind};
use kintsugi_tensor::ops::Gradient;
use kintsugi_tensor::{Backend, View};

use super::codes::Slices;
use super::{UnitState, start, wait, within};

/// The buffers that a gradient passes through.
enum GradientBuffer {
    Whole,
    PartlyReduced,
    Shard,
}

/// A reduction that carries codes, as the parts of dp that it scatters over: from the one at depth `first` to the one before
/// `end`. It ends with the piece of a rank after `end` divisions.
#[derive(Clone, Copy)]
struct CodedReduction {
    first: usize,
    end: usize,
    codes: Codes,
}

impl UnitState {
    /// Starts a phase of a reduction: over tp of the replicated parameters, between tied stages of what this rank owns, over a
    /// part of dp of the piece that its ranks share.
    pub fn reduce_start(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        if let Some(codes) = phase.codes {
            return self.codes_reduce_start(backend, phase, codes, group);
        }
        let range = match phase.over {
            Group::TENSOR => 0..self.layout.replicated,
            Group::Tied => self.owned.clone(),
            Group::Along(..) => self.pieces[self.sharding.depth_of(phase.over)].clone(),
        };
        let (buffer, held) = match self.gradient_of(phase) {
            GradientBuffer::Whole => (self.gradient.take(), 0..self.layout.len),
            GradientBuffer::PartlyReduced => (self.partly_reduced.take(), 0..self.layout.len),
            GradientBuffer::Shard => (self.gradient_shard.take(), self.gradient_range.clone()),
        };
        let buffer = buffer.expect("a gradient is reduced after it is written");
        start(&mut self.reducing, group, collective(phase.kind), buffer, within(&range, &held));
    }

    /// Waits for a phase of a reduction. The last phase to a shard adds to it.
    pub fn reduce_wait(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        if let Some(codes) = phase.codes {
            return self.codes_reduce_wait(backend, phase, codes, group);
        }
        let buffer = wait(&mut self.reducing, group);
        if self.sharding.leaves_shard(phase) {
            let shard =
                self.gradient_shard.as_ref().expect("the shard of a sharded gradient is always there");
            let own = buffer.slice(self.gradient_range.clone());
            if self.shard_written {
                backend.add(own, shard.view());
            } else {
                backend.copy(own, shard.view());
            }
            self.shard_written = true;
            return;
        }
        match self.gradient_of(phase) {
            GradientBuffer::Shard => self.gradient_shard = Some(buffer),
            GradientBuffer::Whole if phase.over != Group::TENSOR && self.sharding.gradients > 1 => {
                self.partly_reduced = Some(buffer);
            }
            GradientBuffer::Whole => self.gradient = Some(buffer),
            GradientBuffer::PartlyReduced => self.partly_reduced = Some(buffer),
        }
    }

    /// Zeroes the gradients that are not written yet. With a split backward, a reduction can run before the next micro-batch
    /// writes the gradients of its norms.
    pub fn clear_unwritten(&self, backend: &dyn Backend) {
        let Some(gradient) = &self.gradient else { return };
        for (i, placed) in self.layout.placed.iter().enumerate() {
            if self.written.get() & 1 << i == 0 {
                backend.fill(0.0, gradient.slice(placed.range.clone()));
            }
        }
        self.written.set(u32::MAX);
    }

    /// The buffer that a phase of a reduction works on.
    fn gradient_of(&self, phase: Phase) -> GradientBuffer {
        let sharded = self.sharding.gradients > 1;
        match phase.over {
            Group::TENSOR => GradientBuffer::Whole,
            _ if !sharded => GradientBuffer::Whole,
            Group::Tied => GradientBuffer::Shard,
            Group::Along(..) => match self.sharding.depth_of(phase.over) {
                0 => GradientBuffer::Whole,
                depth if depth < self.sharding.depth(self.sharding.gradients) => {
                    GradientBuffer::PartlyReduced
                }
                _ => GradientBuffer::Shard,
            },
        }
    }

    /// Starts an all-to-all of codes over a part of dp.
    fn codes_reduce_start(
        &mut self,
        backend: &dyn Backend,
        phase: Phase,
        codes: Codes,
        group: &dyn Communicator,
    ) {
        let depth = self.sharding.depth_of(phase.over);
        let reduction = self.coded_reduction(depth, codes);
        let slices = self.slices(reduction, depth);
        let buffer = slices.buffer_to_exchange(backend);
        if depth > reduction.first {
            let received = self.partly_reduced.take().expect("a phase follows the one before");
            let before = self.slices(reduction, depth - 1);
            slices.requantize_to_send(backend, (&before, &received, self.ranks_of_part(depth - 1)), &buffer);
        } else if reduction.first > 0 {
            let shard = self.gradient_shard.as_ref().expect("a shard is reduced after it is written");
            slices.quantize_to_send(backend, shard.view(), &buffer);
        } else {
            let gradient = self.gradient.as_ref().expect("a gradient is reduced after it is written");
            slices.quantize_to_send(backend, gradient.view(), &buffer);
            if self.sharding.gradients > 1 {
                self.gradient = None;
            }
        }
        let all = 0..buffer.len();
        start(&mut self.reducing, group, Collective::AllToAll, buffer, all);
    }

    fn codes_reduce_wait(
        &mut self,
        backend: &dyn Backend,
        phase: Phase,
        codes: Codes,
        group: &dyn Communicator,
    ) {
        let buffer = wait(&mut self.reducing, group);
        let depth = self.sharding.depth_of(phase.over);
        let reduction = self.coded_reduction(depth, codes);
        if depth + 1 < reduction.end {
            self.partly_reduced = Some(buffer);
            return;
        }
        let adds = self.sharding.leaves_shard(phase);
        let view = if adds { self.shard_view() } else { self.owned_gradient().0 };
        let out = Gradient { view, accumulate: adds && self.shard_written };
        self.slices(reduction, depth).sum(backend, &buffer, self.ranks_of_part(depth), out);
        self.shard_written |= adds;
    }

    fn shard_view(&self) -> View<'_> {
        self.gradient_shard.as_ref().expect("the shard of a sharded gradient is always there").view()
    }

    /// The reduction that the phase over the part at `depth` belongs to: to the gradient's shard, or from there to what this rank
    /// owns.
    fn coded_reduction(&self, depth: usize, codes: Codes) -> CodedReduction {
        let gradients = self.sharding.depth(self.sharding.gradients);
        if depth < gradients {
            CodedReduction { first: 0, end: gradients, codes }
        } else {
            CodedReduction { first: gradients, end: self.sharding.depth(self.sharding.states), codes }
        }
    }

    /// The slices that this rank sends over the part at `depth`.
    fn slices(&self, reduction: CodedReduction, depth: usize) -> Slices {
        Slices::new(self.pieces[depth].clone(), self.pieces[reduction.end].len(), reduction.codes)
    }

    fn ranks_of_part(&self, depth: usize) -> usize {
        self.pieces[depth].len() / self.pieces[depth + 1].len()
    }
}

fn collective(kind: PhaseKind) -> Collective {
    match kind {
        PhaseKind::Gather => Collective::AllGather,
        PhaseKind::Scatter => Collective::ReduceScatter,
        PhaseKind::Sum => Collective::AllReduce,
    }
}
