//! Reductions of gradients.
//!
//! As codes (qgZ, arXiv 2306.10209), a reduce-scatter is an all-to-all: the first phase of a reduction quantises the gradient,
//! later ones sum what they received in fp32 and quantise the sums, and after the last one the sums are added to the shard.

use std::ops::Range;

use kintsugi_comm::{Collective, Communicator, Pending};
use kintsugi_model::WrittenParameters;
use kintsugi_plan::{Codes, Group, Phase, PhaseKind};
use kintsugi_tensor::ops::Gradient;
use kintsugi_tensor::{Backend, Buffer, View};

use super::codes::Slices;
use super::{UnitState, within};

/// The whole gradient of a unit on one rank.
#[derive(Debug, Default)]
pub(super) enum WholeGradient {
    /// Not here: the rank does not train, or the gradient is sharded and nobody has written it since its last reduction.
    #[default]
    Absent,
    /// Backwards write it, or have written it.
    Written(Buffer),
    /// A phase reduces it in place.
    Reducing(Pending),
}

/// A gradient on its way to its shard, or the codes of a gradient. With a split backward, the next micro-batch may write a new
/// whole gradient meanwhile.
#[derive(Debug, Default)]
pub(super) enum PartialSum {
    /// No such reduction is under way.
    #[default]
    Absent,
    /// A phase is under way.
    Reducing(Pending),
    /// Between two phases.
    PartlyReduced(Buffer),
}

/// The shard of a gradient on one rank.
#[derive(Debug, Default)]
pub(super) enum GradientShard {
    /// The gradient is not sharded.
    #[default]
    NotSharded,
    /// No micro-batch of this step is in it yet: the first reduction overwrites it.
    Stale(Buffer),
    /// The sum over the micro-batches so far.
    Sum(Buffer),
    /// A phase reduces it in place.
    Reducing(Pending),
}

/// The gradient of a unit on one rank.
#[derive(Debug)]
pub(super) struct UnitGradient {
    pub whole: WholeGradient,
    /// The parameters whose whole gradient has been written since it was allocated or the step began.
    pub written: WrittenParameters,
    pub partial: PartialSum,
    pub shard: GradientShard,
    /// The range of the shard in the flat buffer.
    pub range: Range<usize>,
}

/// What a phase of a reduction works on.
enum ReductionTarget {
    /// The whole gradient, in place.
    Whole,
    /// The whole gradient, on its way to its shard.
    ToShard,
    /// The shard, in place.
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
    /// Starts a phase of a reduction: over tp of replicated parameters, between tied stages of what this rank owns, over a
    /// part of dp of the piece that its ranks share.
    pub fn reduce_start(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        if let Some(codes) = phase.codes {
            return self.codes_reduce_start(backend, phase, codes, group);
        }
        let range = match phase.over {
            Group::TENSOR => 0..self.summed_over_tp,
            Group::Tied => self.owned.clone(),
            Group::Along(..) => self.pieces[self.sharding.depth_of(phase.over)].clone(),
            Group::Nodes => unreachable!("no gradient is reduced over {}", phase.over),
        };
        let start = |buffer, range| group.start(collective(phase.kind), buffer, range);
        let target = self.reduction_target(phase);
        let UnitGradient { whole, partial, shard, range: held, .. } = &mut self.gradient;
        match target {
            ReductionTarget::Whole => *whole = WholeGradient::Reducing(start(whole.take(), range)),
            ReductionTarget::ToShard => {
                let buffer = partial.take().unwrap_or_else(|| whole.take());
                *partial = PartialSum::Reducing(start(buffer, range));
            }
            ReductionTarget::Shard => {
                *shard = GradientShard::Reducing(start(shard.take(), within(&range, held)));
            }
        }
    }

    /// Waits for a phase of a reduction. The last phase to a shard adds to it.
    pub fn reduce_wait(&mut self, backend: &dyn Backend, phase: Phase, group: &dyn Communicator) {
        if let Some(codes) = phase.codes {
            return self.codes_reduce_wait(backend, phase, codes, group);
        }
        let target = self.reduction_target(phase);
        let UnitGradient { whole, partial, shard, range, .. } = &mut self.gradient;
        match target {
            ReductionTarget::Whole => whole.wait(group),
            ReductionTarget::Shard => shard.wait(group),
            ReductionTarget::ToShard => {
                let buffer = partial.wait(group);
                if self.sharding.leaves_shard(phase) {
                    shard.add(|sum, accumulate| {
                        let own = buffer.slice(range.clone());
                        if accumulate { backend.add(own, sum) } else { backend.copy(own, sum) }
                    });
                } else {
                    *partial = PartialSum::PartlyReduced(buffer);
                }
            }
        }
    }

    /// Zeroes the gradients that are not written yet. With a split backward, a reduction can run before the next micro-batch
    /// writes the gradients of its norms.
    pub fn clear_unwritten(&self, backend: &dyn Backend) {
        let WholeGradient::Written(gradient) = &self.gradient.whole else { return };
        for i in self.gradient.written.missing() {
            backend.fill(0.0, gradient.slice(self.layout.placed[i].range.clone()));
        }
        self.gradient.written.set_all();
    }

    fn reduction_target(&self, phase: Phase) -> ReductionTarget {
        let shards = self.sharding.gradients;
        match phase.over {
            Group::TENSOR => ReductionTarget::Whole,
            _ if shards == 1 => ReductionTarget::Whole,
            Group::Along(..) if self.sharding.depth_of(phase.over) < self.sharding.depth(shards) => {
                ReductionTarget::ToShard
            }
            Group::Tied | Group::Along(..) | Group::Nodes => ReductionTarget::Shard,
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
        match self.gradient.partial.take() {
            Some(received) => {
                let before = self.slices(reduction, depth - 1);
                let received = (&before, &received, self.ranks_of_part(depth - 1));
                slices.requantize_to_send(backend, received, &buffer);
            }
            None if reduction.first > 0 => {
                slices.quantize_to_send(backend, self.gradient.shard.numbers().view(), &buffer);
            }
            None => {
                slices.quantize_to_send(backend, self.gradient.whole.numbers().view(), &buffer);
                if self.sharding.gradients > 1 {
                    self.gradient.whole = WholeGradient::Absent;
                }
            }
        }
        let all = 0..buffer.len();
        self.gradient.partial = PartialSum::Reducing(group.start(Collective::AllToAll, buffer, all));
    }

    fn codes_reduce_wait(
        &mut self,
        backend: &dyn Backend,
        phase: Phase,
        codes: Codes,
        group: &dyn Communicator,
    ) {
        let buffer = self.gradient.partial.wait(group);
        let depth = self.sharding.depth_of(phase.over);
        let reduction = self.coded_reduction(depth, codes);
        if depth + 1 < reduction.end {
            self.gradient.partial = PartialSum::PartlyReduced(buffer);
            return;
        }
        let (slices, ranks) = (self.slices(reduction, depth), self.ranks_of_part(depth));
        if self.sharding.leaves_shard(phase) {
            self.gradient.shard.add(|view, accumulate| {
                slices.sum(backend, &buffer, ranks, Gradient { view, accumulate });
            });
        } else {
            let out = Gradient { view: self.owned_gradient().0, accumulate: false };
            slices.sum(backend, &buffer, ranks, out);
        }
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

impl WholeGradient {
    /// The gradient, to be written or read.
    pub fn numbers(&self) -> &Buffer {
        match self {
            WholeGradient::Written(buffer) => buffer,
            other => panic!("cannot use a whole gradient in state {other:?}"),
        }
    }

    fn take(&mut self) -> Buffer {
        match std::mem::take(self) {
            WholeGradient::Written(buffer) => buffer,
            other => panic!("cannot reduce a whole gradient in state {other:?}"),
        }
    }

    fn wait(&mut self, group: &dyn Communicator) {
        *self = match std::mem::take(self) {
            WholeGradient::Reducing(pending) => WholeGradient::Written(group.wait(pending)),
            other => panic!("cannot wait for a whole gradient in state {other:?}"),
        };
    }
}

impl PartialSum {
    /// Takes what the phases so far have reduced; `None` before the first phase.
    fn take(&mut self) -> Option<Buffer> {
        match std::mem::take(self) {
            PartialSum::Absent => None,
            PartialSum::PartlyReduced(buffer) => Some(buffer),
            PartialSum::Reducing(_) => panic!("a gradient is being reduced already"),
        }
    }

    /// Waits for a phase and takes its result.
    fn wait(&mut self, group: &dyn Communicator) -> Buffer {
        match std::mem::take(self) {
            PartialSum::Reducing(pending) => group.wait(pending),
            other => panic!("cannot wait for a gradient in state {other:?}"),
        }
    }
}

impl GradientShard {
    /// The shard, to be read.
    pub fn numbers(&self) -> &Buffer {
        match self {
            GradientShard::Stale(buffer) | GradientShard::Sum(buffer) => buffer,
            other => panic!("cannot read a gradient shard in state {other:?}"),
        }
    }

    /// Begins a step.
    pub fn begin(&mut self) {
        *self = match std::mem::take(self) {
            GradientShard::Sum(buffer) => GradientShard::Stale(buffer),
            other => other,
        };
    }

    fn take(&mut self) -> Buffer {
        match std::mem::take(self) {
            GradientShard::Stale(buffer) | GradientShard::Sum(buffer) => buffer,
            other => panic!("cannot reduce a gradient shard in state {other:?}"),
        }
    }

    fn wait(&mut self, group: &dyn Communicator) {
        *self = match std::mem::take(self) {
            GradientShard::Reducing(pending) => GradientShard::Sum(group.wait(pending)),
            other => panic!("cannot wait for a gradient shard in state {other:?}"),
        };
    }

    /// Adds a contribution: `add` gets the shard, and whether to add to it or to overwrite it.
    fn add(&mut self, add: impl FnOnce(View, bool)) {
        let accumulate = matches!(self, GradientShard::Sum(_));
        add(self.numbers().view(), accumulate);
        *self = GradientShard::Sum(self.take());
    }
}

fn collective(kind: PhaseKind) -> Collective {
    match kind {
        PhaseKind::Gather => Collective::AllGather,
        PhaseKind::Scatter => Collective::ReduceScatter,
        PhaseKind::Sum => Collective::AllReduce,
    }
}
