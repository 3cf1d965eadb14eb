//! A unit's buffers on one rank: weights, gradient and states, whole or sharded. `weights` and `gradients` have the states that
//! each can be in, and the transfers between them; `codes` has what both need to quantise them.

mod codes;
mod gradients;
mod state;
mod weights;

use std::ops::Range;

use kintsugi_model::{Gradients, Weights, WrittenParameters};
use kintsugi_plan::parameters::UnitLayout;
use kintsugi_plan::{Codes, Coordinate, GradientType, MAX_PARTS, Phase, Plan, Sharding, StoredTensor, Unit};
use kintsugi_tensor::ops::{MAX_STATES, Parameters, round_to_codes};
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

use self::gradients::{GradientShard, PartialSum, UnitGradient, WholeGradient};
use self::state::{Run, State};
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
    /// Whether training leaves the weights as they are.
    frozen: bool,
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
    /// The moving average of the weights over `owned`, if it is kept.
    average: Option<Buffer>,
    /// The states of the optimizer for the parameters in `owned`.
    states: Vec<State>,
    /// The runs of `owned` that are updated together.
    runs: Vec<Run>,
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
        let frozen = plan.is_frozen(unit);
        let trains = purpose == Purpose::Training && !frozen;
        let (layout, sharding) = (plan.layout(unit), plan.sharding);
        let pieces = std::array::from_fn(|depth| sharding.piece(layout.len, plan.mesh.replica(at), depth));
        let shard = |shards: usize| pieces[sharding.depth(shards)].clone();
        let (resident, gradient_range) = (shard(sharding.weights), shard(sharding.gradients));
        // A rank that does not train owns nothing.
        let owned = if purpose == Purpose::Training { shard(sharding.states) } else { 0..0 };
        let gradients_sharded = trains && sharding.gradients > 1;
        let allocate = |len, dtype, category| backend.allocate(len, dtype, category);
        let weights = UnitWeights::new(allocate(resident.len(), types.compute, Category::Weights));
        let accumulator = types.compute.accumulator();
        let exact = types.compute == accumulator && sharding.quantized.refresh.is_none();
        let master = (trains && !exact).then(|| allocate(owned.len(), accumulator, Category::States));
        let averages = trains && plan.averages_weights();
        let average = averages.then(|| allocate(owned.len(), accumulator, Category::States));
        let states = if trains {
            State::all(backend, &plan.optimizer, &layout, &owned, types.states)
        } else {
            Vec::new()
        };
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
        let runs = if trains { Run::all(&plan.optimizer, &layout, &owned) } else { Vec::new() };
        let mut state = UnitState {
            layout,
            frozen,
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
            average,
            states,
            runs,
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
        let fill = |range: &Range<usize>, to: View, codes: Option<Codes>| {
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
                backend.upload(values, to.slice(piece.start - range.start..piece.end - range.start));
            }
            Ok(())
        };
        let weights = self.weights.resident.ready();
        match (stored, &self.master) {
            (StoredTensor::Average, _) => {
                self.average.as_ref().map_or(Ok(()), |average| fill(&self.owned, average.view(), None))
            }
            (StoredTensor::FirstMoment | StoredTensor::SecondMoment | StoredTensor::Momentum, _) => {
                let state = self.states.iter().find(|state| state.stored == stored);
                let runs = state.into_iter().flat_map(|state| state.runs(&self.owned));
                runs.into_iter().try_for_each(|(range, view)| fill(&range, view, None))
            }
            (StoredTensor::Weights, Some(master)) if self.owned == self.resident => {
                fill(&self.owned, master.view(), None)?;
                backend.copy(master.view(), weights.view());
                Ok(())
            }
            (StoredTensor::Weights, master) => {
                if let Some(master) = master {
                    fill(&self.owned, master.view(), None)?;
                }
                // As after a refresh, so that a resumed run has the bits of one that did not stop. Frozen weights have none.
                let codes = self.sharding.quantized.refresh.filter(|_| !self.frozen);
                fill(&self.resident, weights.view(), codes)
            }
        }
    }

    /// A view of elements `range` of a stored tensor. This rank must hold the states of these elements.
    pub fn stored_view(&self, stored: StoredTensor, range: &Range<usize>) -> View<'_> {
        let (buffer, held) = match (stored, &self.master) {
            (StoredTensor::Weights, None) => (self.weights.resident.ready(), &self.resident),
            (StoredTensor::Weights, Some(master)) => (master, &self.owned),
            (StoredTensor::Average, _) => (self.average.as_ref().expect("an average is kept"), &self.owned),
            (StoredTensor::FirstMoment | StoredTensor::SecondMoment | StoredTensor::Momentum, _) => {
                return self.state(stored, range);
            }
        };
        buffer.slice(within(range, held))
    }

    /// A state of the elements `range`, which belong to one run. Panics if they do not have it.
    fn state(&self, stored: StoredTensor, range: &Range<usize>) -> View<'_> {
        let found = self.states.iter().find(|state| state.stored == stored);
        found.unwrap_or_else(|| panic!("{} has no {}", self.layout.unit, stored.name())).view(range)
    }

    /// The whole weights.
    pub fn weights(&self) -> Weights<'_> {
        Weights::new(self.weights.whole().view(), &self.layout)
    }

    /// Whether it has a gradient.
    pub fn is_trained(&self) -> bool {
        !self.frozen
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

    /// The whole gradient, to be written, unless the unit is frozen.
    pub fn gradients(&self) -> Gradients<'_> {
        let whole = (!self.frozen).then(|| self.gradient.whole.numbers().view());
        Gradients::new(whole, &self.layout, &self.gradient.written)
    }

    /// Begins a step: the first writes overwrite the previous step's gradient.
    pub fn begin(&mut self) {
        self.gradient.shard.begin();
        self.gradient.written.clear();
    }

    /// The part of the reduced gradient that this rank owns, and its range in the flat buffer. Frozen units have none.
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

    /// The weights that an update of this rank writes. `None` if a refresh replaces them by codes.
    pub fn updated_weights(&self) -> Option<View<'_>> {
        let is_final = self.sharding.quantized.refresh.is_none();
        is_final.then(|| self.weights.resident.ready().slice(within(&self.owned, &self.resident)))
    }

    /// The states that this rank holds.
    pub fn states(&self) -> Vec<View<'_>> {
        let states = self.states.iter().map(State::whole);
        self.master.iter().chain(&self.average).map(Buffer::view).chain(states).collect()
    }

    /// The states that this rank owns, with the weights in their highest precision: everything that the unit needs to go on.
    pub fn owned_states(&self) -> Vec<View<'_>> {
        let own_weights = || self.weights.resident.ready().slice(within(&self.owned, &self.resident));
        let weights = self.master.is_none().then(own_weights);
        weights.into_iter().chain(self.states()).collect()
    }

    /// Sets the weights of what this rank owns, after its states.
    pub fn set_owned_weights(&self, backend: &dyn Backend) {
        if let Some(master) = &self.master {
            let weights = self.weights.resident.ready().slice(within(&self.owned, &self.resident));
            backend.copy(master.view(), weights);
        }
    }

    /// The moving average of the weights that this rank owns, if it is kept, and these weights.
    pub fn average(&self) -> Option<(View<'_>, View<'_>)> {
        let own_weights = || self.weights.resident.ready().slice(within(&self.owned, &self.resident));
        let weights = || self.master.as_ref().map_or_else(own_weights, Buffer::view);
        self.average.as_ref().map(|average| (average.view(), weights()))
    }

    /// Sets the average to the weights.
    pub fn begin_average(&self, backend: &dyn Backend) {
        if let Some((average, weights)) = self.average() {
            backend.copy(weights, average);
        }
    }

    /// The number of [`UnitState::parameters`].
    pub fn parameter_count(&self) -> usize {
        self.runs.iter().filter(|run| !run.whole).count()
    }

    /// The parameters that are updated element by element.
    pub fn parameters(&self) -> impl Iterator<Item = Parameters<'_>> {
        let elementwise = self.runs.iter().filter(|run| !run.whole);
        elementwise.map(|run| {
            let gradient = self.owned_gradient().0;
            self.updated(run, gradient.slice(within(&run.range, &self.owned)))
        })
    }

    /// The gradients and momenta of matrices that are updated whole, and the places of their directions in `out`, which has an
    /// element for every one that this rank owns.
    pub fn directions<'a>(&'a self, out: View<'a>) -> impl Iterator<Item = [View<'a>; 3]> {
        let gradient = self.owned_gradient().0;
        let whole = self.runs.iter().filter(|run| run.whole);
        whole.map(move |run| {
            let gradient = gradient.slice(within(&run.range, &self.owned));
            let momentum = self.state(StoredTensor::Momentum, &run.range);
            [gradient, momentum, out.slice(within(&run.range, &self.owned))]
        })
    }

    /// The same elements, to be moved by the directions in `from`.
    pub fn directed<'a>(&'a self, from: View<'a>) -> impl Iterator<Item = Parameters<'a>> {
        let whole = self.runs.iter().filter(|run| run.whole);
        whole.map(move |run| Parameters {
            states: [None; MAX_STATES],
            ..self.updated(run, from.slice(within(&run.range, &self.owned)))
        })
    }

    /// The number of elements that this rank owns.
    pub fn owned_len(&self) -> usize {
        self.owned.len()
    }

    fn updated<'a>(&'a self, run: &'a Run, gradient: View<'a>) -> Parameters<'a> {
        let own_weights = self.weights.resident.ready().slice(within(&run.range, &self.resident));
        let master = self.master.as_ref().map(|master| master.slice(within(&run.range, &self.owned)));
        Parameters {
            gradient,
            master: master.unwrap_or(own_weights),
            states: std::array::from_fn(|i| run.states.get(i).map(|&stored| self.state(stored, &run.range))),
            // A quantised refresh writes the weights of the owner, too.
            weights: (self.master.is_some() && self.sharding.quantized.refresh.is_none())
                .then_some(own_weights),
            segments: &run.segments,
        }
    }
}

/// A range of the flat buffer, relative to the start of the range that a buffer holds.
fn within(range: &Range<usize>, held: &Range<usize>) -> Range<usize> {
    range.start - held.start..range.end - held.start
}
