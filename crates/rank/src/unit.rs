//! A unit's buffers on one rank: weights, gradient and states, whole or sharded, and their pending transfers. `weights` has the
//! transfers of weights, `gradients` those of gradients, and `codes` what both need to quantise them.

mod codes;
mod gradients;
mod weights;

use std::cell::Cell;
use std::ops::Range;

use kintsugi_comm::{Collective, Communicator, Pending};
use kintsugi_model::{Gradients, Weights};
use kintsugi_plan::parameters::UnitLayout;
use kintsugi_plan::{Codes, Coordinate, GradientType, MAX_PARTS, Phase, Plan, Sharding, Unit};
use kintsugi_tensor::ops::{Parameters, Segment, round_to_codes};
use kintsugi_tensor::{Backend, Buffer, Category, DType, View};

use crate::store::read_part;
use crate::{Purpose, Store, StoreError, StoredTensor};

/// The element types of a rank's parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ElementTypes {
    pub compute: DType,
    pub gradient: DType,
    pub moments: DType,
}

impl ElementTypes {
    pub fn new(plan: &Plan, compute: DType) -> Self {
        let gradient = match plan.precision.gradients {
            GradientType::Fp32 => compute.accumulator(),
            GradientType::Compute => compute,
        };
        let moments = match kintsugi_model::compute_type(plan.precision.states) {
            DType::F32 => compute.accumulator(),
            narrow => narrow,
        };
        ElementTypes { compute, gradient, moments }
    }
}

/// Elements that are read from a store before they are uploaded to the device.
const PIECE: usize = 1 << 18;

/// A unit on one rank.
pub(crate) struct UnitState {
    pub layout: UnitLayout,
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
    /// Weights over `resident`.
    weights: Buffer,
    /// Master weights over `owned`. `None` if the weights already have that precision and nobody replaces them by codes.
    master: Option<Buffer>,
    first_moment: Buffer,
    second_moment: Buffer,
    /// A larger shard of the weights, from the first gather of a step to the last.
    secondary: Option<Buffer>,
    /// All weights, while they are gathered.
    gathered: Option<Buffer>,
    /// The codes of weights between the phases of a gather or refresh.
    gathered_codes: Option<Buffer>,
    /// The whole gradient. If gradients are sharded, it exists only between its first write and its reduction.
    gradient: Option<Buffer>,
    /// A whole gradient, or the codes of a gradient, between the phases of its reduction.
    partly_reduced: Option<Buffer>,
    /// The range of the sharded gradient.
    gradient_range: Range<usize>,
    /// The sharded gradient, over `gradient_range`.
    gradient_shard: Option<Buffer>,
    /// Whether the shard has this step's first contribution.
    shard_written: bool,
    /// Bit `i` is set if parameter `i` has been written since the whole gradient was allocated or the step began.
    written: Cell<u32>,
    /// A pending gather or refresh of the weights.
    gathering: Option<Pending>,
    /// A pending reduction of the gradient.
    reducing: Option<Pending>,
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
        let pieces = std::array::from_fn(|depth| sharding.piece(layout.len, at.dp(), depth));
        let shard = |shards: usize| pieces[sharding.depth(shards)].clone();
        let (resident, gradient_range) = (shard(sharding.weights), shard(sharding.gradients));
        // A rank that does not train owns no states.
        let owned = if trains { shard(sharding.states) } else { 0..0 };
        let gradients_sharded = trains && sharding.gradients > 1;
        let allocate = |len, dtype, category| backend.allocate(len, dtype, category);
        let weights = allocate(resident.len(), types.compute, Category::Weights);
        let accumulator = types.compute.accumulator();
        let exact = types.compute == accumulator && sharding.quantized.refresh.is_none();
        let master = (trains && !exact).then(|| allocate(owned.len(), accumulator, Category::States));
        let moment = || {
            let moment = allocate(owned.len(), types.moments, Category::States);
            backend.fill(0.0, moment.view());
            moment
        };
        let (first_moment, second_moment) = (moment(), moment());
        let gradient_shard =
            gradients_sharded.then(|| allocate(gradient_range.len(), types.gradient, Category::Gradients));
        let has_replicated = || layout.replicated > 0;
        let first_reduction = plan.gradient_reductions(at.pp(), unit, has_replicated).first();
        let segments = segments(&layout, &owned);
        let mut state = UnitState {
            layout,
            types,
            sharding,
            pieces,
            first_reduction,
            resident,
            owned,
            weights,
            master,
            first_moment,
            second_moment,
            secondary: None,
            gathered: None,
            gathered_codes: None,
            gradient: None,
            partly_reduced: None,
            gradient_range,
            gradient_shard,
            shard_written: false,
            written: Cell::new(0),
            gathering: None,
            reducing: None,
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
        match (stored, &self.master) {
            (StoredTensor::FirstMoment, _) => fill(&self.owned, &self.first_moment, None),
            (StoredTensor::SecondMoment, _) => fill(&self.owned, &self.second_moment, None),
            (StoredTensor::Weights, Some(master)) if self.owned == self.resident => {
                fill(&self.owned, master, None)?;
                backend.copy(master.view(), self.weights.view());
                Ok(())
            }
            (StoredTensor::Weights, master) => {
                if let Some(master) = master {
                    fill(&self.owned, master, None)?;
                }
                // As after a refresh, so that a resumed run has the bits of one that did not stop.
                fill(&self.resident, &self.weights, self.sharding.quantized.refresh)
            }
        }
    }

    /// A view of elements `range` of a stored tensor. This rank must hold the states of these elements.
    pub fn stored_view(&self, stored: StoredTensor, range: &Range<usize>) -> View<'_> {
        let (buffer, held) = match (stored, &self.master) {
            (StoredTensor::Weights, None) => (&self.weights, &self.resident),
            (StoredTensor::Weights, Some(master)) => (master, &self.owned),
            (StoredTensor::FirstMoment, _) => (&self.first_moment, &self.owned),
            (StoredTensor::SecondMoment, _) => (&self.second_moment, &self.owned),
        };
        buffer.slice(within(range, held))
    }

    /// The whole weights.
    pub fn weights(&self) -> Weights<'_> {
        Weights::new(self.gathered.as_ref().unwrap_or(&self.weights).view(), &self.layout)
    }

    /// Allocates the whole gradient unless it exists.
    pub fn make_gradient(&mut self, backend: &dyn Backend) {
        if self.gradient.is_none() {
            let gradient = backend.allocate(self.layout.len, self.types.gradient, Category::Gradients);
            // No layer writes the padding, but the norm reads it, so it must be zero.
            for padding in self.layout.padding() {
                backend.fill(0.0, gradient.slice(padding));
            }
            self.gradient = Some(gradient);
            self.written.set(0);
        }
    }

    /// The whole gradient, to be written.
    pub fn gradients(&self) -> Gradients<'_> {
        let gradient = self.gradient.as_ref().expect("the gradient was made before it is written");
        Gradients::new(gradient.view(), &self.layout, &self.written)
    }

    /// Begins a step: the first writes overwrite the previous step's gradient.
    pub fn begin(&mut self) {
        self.shard_written = false;
        self.written.set(0);
    }

    /// The part of the reduced gradient that this rank owns, and its range in the flat buffer.
    pub fn owned_gradient(&self) -> (View<'_>, Range<usize>) {
        let view = match (&self.gradient_shard, &self.gradient) {
            (Some(shard), _) => shard.slice(within(&self.owned, &self.gradient_range)),
            (None, Some(gradient)) => gradient.slice(self.owned.clone()),
            (None, None) => unreachable!("a gradient that is not sharded is always there"),
        };
        (view, self.owned.clone())
    }

    /// The whole gradient before its reduction, if there is one.
    pub fn whole_gradient(&self) -> Option<View<'_>> {
        self.gradient.as_ref().map(Buffer::view)
    }

    /// The weights that this rank always holds, and their range in the flat buffer.
    pub fn resident_weights(&self) -> (View<'_>, Range<usize>) {
        (self.weights.view(), self.resident.clone())
    }

    /// The parameters that the optimizer updates.
    pub fn parameters(&self) -> Parameters<'_> {
        let own_weights = self.weights.slice(within(&self.owned, &self.resident));
        Parameters {
            gradient: self.owned_gradient().0,
            master: self.master.as_ref().map_or(own_weights, Buffer::view),
            first_moment: self.first_moment.view(),
            second_moment: self.second_moment.view(),
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

/// Starts a transfer. A unit has at most one pending transfer of each kind.
fn start(
    pending: &mut Option<Pending>,
    group: &dyn Communicator,
    collective: Collective,
    buffer: Buffer,
    range: Range<usize>,
) {
    assert!(pending.is_none(), "a transfer is under way already");
    *pending = Some(group.start(collective, buffer, range));
}

fn wait(pending: &mut Option<Pending>, group: &dyn Communicator) -> Buffer {
    group.wait(pending.take().expect("a wait follows its start"))
}

/// The segments of `owned` with and without weight decay, relative to its start.
fn segments(layout: &UnitLayout, owned: &Range<usize>) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for placed in &layout.placed {
        let (start, end) = (placed.range.start.max(owned.start), placed.range.end.min(owned.end));
        if start >= end {
            continue;
        }
        let next = Segment { start: start - owned.start, len: end - start, decay: placed.parameter.decay };
        match segments.last_mut() {
            Some(last) if last.decay == next.decay && last.start + last.len == next.start => {
                last.len += next.len;
            }
            _ => segments.push(next),
        }
    }
    segments
}
