//! A unit's buffers on one rank: weights, gradient and states, whole or sharded. `weights` and `gradients` have the states that
//! each can be in, and the transfers between them; `codes` has what both need to quantise them.

mod codes;
mod gradients;
mod weights;

use std::ops::Range;

use kintsugi_model::{Gradients, Weights, WrittenParameters};
use kintsugi_plan::parameters::UnitLayout;
use kintsugi_plan::{
    Codes, Coordinate, GradientType, MAX_PARTS, Optimizer, ParameterUpdate, Phase, Plan, Sharding,
    StoredTensor, Unit,
};
use kintsugi_tensor::ops::{MAX_STATES, Parameters, Segment, round_to_codes};
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

use self::gradients::{GradientShard, PartialSum, UnitGradient, WholeGradient};
use self::weights::UnitWeights;
use crate::store::read_part;
use crate::{Purpose, Store, StoreError};

/// The element types of a rank's parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ElementTypes {
    pub compute: DType,
    pub gradient: DType,
    pub states: DType,
}

impl ElementTypes {
    pub fn new(plan: &Plan, compute: DType) -> Self {
        let gradient = match plan.precision.gradients {
            GradientType::Fp32 => compute.accumulator(),
            GradientType::Compute => compute,
        };
        let states = match kintsugi_model::compute_type(plan.precision.states) {
            DType::F32 => compute.accumulator(),
            narrow => narrow,
        };
        ElementTypes { compute, gradient, states }
    }
}

/// Elements that are read from a store before they are uploaded to the device.
const PIECE: usize = 1 << 18;

/// A unit on one rank.
pub(crate) struct UnitState {
    pub layout: UnitLayout,
    /// Number of elements at the start whose gradient is summed over tp.
    summed_over_tp: usize,
    types: ElementTypes,
    sharding: Sharding,
    /// This rank's piece of the flat buffer after 0, 1, ... divisions by the parts of the data-parallel axis.
    pieces: [Range<usize>; MAX_PARTS + 1],
    /// The first reduction of the gradient, if it has any.
    pub first_reduction: Option<Phase>,
    /// The range of the flat buffer whose weights this rank always holds: all of it, or its shard.
    resident: Range<usize>,
    /// The range whose states this rank holds.
    owned: Range<usize>,
    weights: UnitWeights,
    gradient: UnitGradient,
    /// Master weights over `owned`. `None` if the weights already have that precision and nobody replaces them by codes.
    master: Option<Buffer>,
    /// The states of the optimizer over `owned`.
    states: Vec<(StoredTensor, Buffer)>,
    segments: Vec<Segment>,
}

impl UnitState {
    pub fn new(
        backend: &dyn Backend,
        plan: &Plan,
        at: Coordinate,
        unit: Unit,
        types: ElementTypes,
        purpose: Purpose,
    ) -> Self {
        let trains = purpose == Purpose::Training;
        let (layout, sharding) = (plan.layout(unit), plan.sharding);
        let pieces = std::array::from_fn(|depth| sharding.piece(layout.len, plan.mesh.replica(at), depth));
        let shard = |shards: usize| pieces[sharding.depth(shards)].clone();
        let (resident, gradient_range) = (shard(sharding.weights), shard(sharding.gradients));
        // A rank that does not train owns no states.
        let owned = if trains { shard(sharding.states) } else { 0..0 };
        let gradients_sharded = trains && sharding.gradients > 1;
        let allocate = |len, dtype, category| backend.allocate(len, dtype, category);
        let weights = UnitWeights::new(allocate(resident.len(), types.compute, Category::Weights));
        let accumulator = types.compute.accumulator();
        let exact = types.compute == accumulator && sharding.quantized.refresh.is_none();
        let master = (trains && !exact).then(|| allocate(owned.len(), accumulator, Category::States));
        let state = |&stored: &StoredTensor| {
            let state = allocate(owned.len(), types.states, Category::States);
            backend.fill(0.0, state.view());
            (stored, state)
        };
        let states = plan.optimizer.kind.states().iter().map(state).collect();
        let gradient_shard = if gradients_sharded {
            GradientShard::Stale(allocate(gradient_range.len(), types.gradient, Category::Gradients))
        } else {
            GradientShard::NotSharded
        };
        let gradient = UnitGradient {
            whole: WholeGradient::Absent,
            written: WrittenParameters::new(&layout),
            partial: PartialSum::Absent,
            shard: gradient_shard,
            range: gradient_range,
        };
        let summed_over_tp = layout.summed_over_tp(plan.sequence_parallel);
        let first_reduction = plan.gradient_reductions(at.pp(), unit, || summed_over_tp).first();
        let segments = segments(&plan.optimizer, &layout, &owned);
        let mut state = UnitState {
            layout,
            summed_over_tp,
            types,
            sharding,
            pieces,
            first_reduction,
            resident,
            owned,
            weights,
            gradient,
            master,
            states,
            segments,
        };
        if trains && !gradients_sharded {
            state.make_gradient(backend);
        }
        state
    }

    /// Reads one tensor of this unit's parameters. This rank holds part `part` of `tp`.
    pub fn load(
        &self,
        backend: &dyn Backend,
        store: &dyn Store,
        (tp, part): (usize, usize),
        stored: StoredTensor,
    ) -> Result<(), StoreError> {
        let fill = |range: &Range<usize>, buffer: &Buffer, codes: Option<Codes>| {
            // Reads in pieces of bounded size, so that a large unit is not in memory twice.
            let mut values = vec![0.0; PIECE.min(range.len())];
            for start in range.clone().step_by(PIECE) {
                let piece = start..(start + PIECE).min(range.end);
                let values = &mut values[..piece.len()];
                values.fill(0.0);
                for placed in &self.layout.placed {
                    let start = placed.range.start.max(piece.start);
                    let end = placed.range.end.min(piece.end);
                    if start < end {
                        let own = &mut values[start - piece.start..end - piece.start];
                        read_part(store, placed, (tp, part), stored, start - placed.range.start, own)?;
                    }
                }
                if let Some(codes) = codes {
                    round_to_codes(values, codes::format(codes));
                }
                backend.upload(values, buffer.slice(piece.start - range.start..piece.end - range.start));
            }
            Ok(())
        };
        let weights = self.weights.resident.ready();
        match (stored, &self.master) {
            (StoredTensor::FirstMoment | StoredTensor::SecondMoment | StoredTensor::Momentum, _) => {
                fill(&self.owned, self.state(stored), None)
            }
            (StoredTensor::Weights, Some(master)) if self.owned == self.resident => {
                fill(&self.owned, master, None)?;
                backend.copy(master.view(), weights.view());
                Ok(())
            }
            (StoredTensor::Weights, master) => {
                if let Some(master) = master {
                    fill(&self.owned, master, None)?;
                }
                // As after a refresh, so that a resumed run has the bits of one that did not stop.
                fill(&self.resident, weights, self.sharding.quantized.refresh)
            }
        }
    }

    /// A view of elements `range` of a stored tensor. This rank must hold the states of these elements.
    pub fn stored_view(&self, stored: StoredTensor, range: &Range<usize>) -> View<'_> {
        let (buffer, held) = match (stored, &self.master) {
            (StoredTensor::Weights, None) => (self.weights.resident.ready(), &self.resident),
            (StoredTensor::Weights, Some(master)) => (master, &self.owned),
            (StoredTensor::FirstMoment | StoredTensor::SecondMoment | StoredTensor::Momentum, _) => {
                (self.state(stored), &self.owned)
            }
        };
        buffer.slice(within(range, held))
    }

    /// A state of the optimizer. Panics if the optimizer does not have it.
    fn state(&self, stored: StoredTensor) -> &Buffer {
        let found = self.states.iter().find(|(state, _)| *state == stored);
        &found.unwrap_or_else(|| panic!("the optimizer has no {}", stored.name())).1
    }

    /// The whole weights.
    pub fn weights(&self) -> Weights<'_> {
        Weights::new(self.weights.whole().view(), &self.layout)
    }

    /// Allocates the whole gradient unless it exists.
    pub fn make_gradient(&mut self, backend: &dyn Backend) {
        if let WholeGradient::Absent = self.gradient.whole {
            let gradient = backend.allocate(self.layout.len, self.types.gradient, Category::Gradients);
            // No layer writes the padding, but the norm reads it, so it must be zero.
            for padding in self.layout.padding() {
                backend.fill(0.0, gradient.slice(padding));
            }
            self.gradient.whole = WholeGradient::Written(gradient);
            self.gradient.written.clear();
        }
    }

    /// The whole gradient, to be written.
    pub fn gradients(&self) -> Gradients<'_> {
        Gradients::new(self.gradient.whole.numbers().view(), &self.layout, &self.gradient.written)
    }

    /// Begins a step: the first writes overwrite the previous step's gradient.
    pub fn begin(&mut self) {
        self.gradient.shard.begin();
        self.gradient.written.clear();
    }

    /// The part of the reduced gradient that this rank owns, and its range in the flat buffer.
    pub fn owned_gradient(&self) -> (View<'_>, Range<usize>) {
        let view = match &self.gradient.shard {
            GradientShard::NotSharded => self.gradient.whole.numbers().slice(self.owned.clone()),
            shard => shard.numbers().slice(within(&self.owned, &self.gradient.range)),
        };
        (view, self.owned.clone())
    }

    /// The whole gradient before its reduction, if there is one.
    pub fn whole_gradient(&self) -> Option<View<'_>> {
        match &self.gradient.whole {
            WholeGradient::Written(gradient) => Some(gradient.view()),
            WholeGradient::Absent | WholeGradient::Reducing(_) => None,
        }
    }

    /// The weights that this rank always holds, and their range in the flat buffer.
    pub fn resident_weights(&self) -> (View<'_>, Range<usize>) {
        (self.weights.resident.ready().view(), self.resident.clone())
    }

    /// The states that this rank holds.
    pub fn states(&self) -> Vec<View<'_>> {
        let states = self.states.iter().map(|(_, state)| state);
        self.master.iter().chain(states).map(Buffer::view).collect()
    }

    /// The parameters that the optimizer updates.
    pub fn parameters(&self) -> Parameters<'_> {
        let own_weights = self.weights.resident.ready().slice(within(&self.owned, &self.resident));
        Parameters {
            gradient: self.owned_gradient().0,
            master: self.master.as_ref().map_or(own_weights, Buffer::view),
            states: std::array::from_fn::<_, MAX_STATES, _>(|i| {
                self.states.get(i).map(|(_, state)| state.view())
            }),
            // A quantised refresh writes the weights of the owner, too.
            weights: (self.master.is_some() && self.sharding.quantized.refresh.is_none())
                .then_some(own_weights),
            segments: &self.segments,
        }
    }
}

/// A range of the flat buffer, relative to the start of the range that a buffer holds.
fn within(range: &Range<usize>, held: &Range<usize>) -> Range<usize> {
    range.start - held.start..range.end - held.start
}

/// The segments of `owned` with the same learning rate and weight decay, relative to its start.
fn segments(optimizer: &Optimizer, layout: &UnitLayout, owned: &Range<usize>) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for placed in &layout.placed {
        let (start, end) = (placed.range.start.max(owned.start), placed.range.end.min(owned.end));
        if start >= end {
            continue;
        }
        let ParameterUpdate { lr_factor, weight_decay } = optimizer.update_of(&placed.parameter);
        let next = Segment {
            start: start - owned.start,
            len: end - start,
            rate_factor: lr_factor,
            decay: weight_decay,
        };
        match segments.last_mut() {
            Some(last)
                if *last == (Segment { start: last.start, len: last.len, ..next })
                    && last.start + last.len == next.start =>
            {
                last.len += next.len;
            }
            _ => segments.push(next),
        }
    }
    segments
}
