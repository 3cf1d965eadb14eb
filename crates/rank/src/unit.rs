//! A unit's buffers on one rank: weights, gradient and states, whole or sharded, and their pending transfers.

use std::cell::Cell;
use std::ops::Range;

use kintsugi_comm::{Collective, Communicator, Pending};
use kintsugi_model::{Gradients, Weights};
use kintsugi_plan::parameters::UnitLayout;
use kintsugi_plan::{Coordinate, GradientType, Group, Plan, Unit};
use kintsugi_tensor::ops::{Parameters, Segment};
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
    /// The range of the flat buffer whose weights this rank always holds: all of it, or its shard.
    resident: Range<usize>,
    /// The range whose states this rank holds.
    owned: Range<usize>,
    /// Weights over `resident`.
    weights: Buffer,
    /// Master weights over `owned`. `None` if the weights already have that precision.
    master: Option<Buffer>,
    first_moment: Buffer,
    second_moment: Buffer,
    /// All weights, while they are gathered.
    gathered: Option<Buffer>,
    /// The whole gradient. If gradients are sharded, it exists only between its first write and its reduction.
    gradient: Option<Buffer>,
    /// The sharded gradient, over `owned`.
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
        let layout = plan.layout(unit);
        let shard = |shards: usize| if shards > 1 { layout.shard(shards, at.dp) } else { 0..layout.len };
        let resident = shard(plan.sharding.weights);
        // A rank that does not train owns no states.
        let owned = if trains { shard(plan.sharding.states) } else { 0..0 };
        let gradients_sharded = trains && plan.sharding.gradients > 1;
        let allocate = |len, dtype, category| backend.allocate(len, dtype, category);
        let weights = allocate(resident.len(), types.compute, Category::Weights);
        let accumulator = types.compute.accumulator();
        let master = (trains && types.compute != accumulator)
            .then(|| allocate(owned.len(), accumulator, Category::States));
        let moment = || {
            let moment = allocate(owned.len(), types.moments, Category::States);
            backend.fill(0.0, moment.view());
            moment
        };
        let (first_moment, second_moment) = (moment(), moment());
        let gradient_shard =
            gradients_sharded.then(|| allocate(owned.len(), types.gradient, Category::Gradients));
        let segments = segments(&layout, &owned);
        let mut state = UnitState {
            layout,
            types,
            resident,
            owned,
            weights,
            master,
            first_moment,
            second_moment,
            gathered: None,
            gradient: None,
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
        let fill = |range: &Range<usize>, buffer: &Buffer| {
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
                backend.upload(values, buffer.slice(piece.start - range.start..piece.end - range.start));
            }
            Ok(())
        };
        match (stored, &self.master) {
            (StoredTensor::FirstMoment, _) => fill(&self.owned, &self.first_moment),
            (StoredTensor::SecondMoment, _) => fill(&self.owned, &self.second_moment),
            (StoredTensor::Weights, Some(master)) if self.owned == self.resident => {
                fill(&self.owned, master)?;
                backend.copy(master.view(), self.weights.view());
                Ok(())
            }
            (StoredTensor::Weights, Some(master)) => {
                fill(&self.owned, master)?;
                fill(&self.resident, &self.weights)
            }
            (StoredTensor::Weights, None) => fill(&self.resident, &self.weights),
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
        buffer.slice(range.start - held.start..range.end - held.start)
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
            let end = self.layout.placed.last().map_or(0, |p| p.range.end);
            backend.fill(0.0, gradient.slice(end..self.layout.len));
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

    pub fn gather_start(&mut self, backend: &dyn Backend, data: &dyn Communicator) {
        let whole = backend.allocate(self.layout.len, self.types.compute, Category::Weights);
        backend.copy(self.weights.view(), whole.slice(self.resident.clone()));
        start(&mut self.gathering, data, Collective::AllGather, whole, 0..self.layout.len);
    }

    pub fn gather_wait(&mut self, data: &dyn Communicator) {
        self.gathered = Some(wait(&mut self.gathering, data));
    }

    pub fn release(&mut self) {
        self.gathered = None;
    }

    /// Starts a reduction: over tp of the replicated parameters, over dp of everything, between tied stages of what this
    /// rank owns.
    pub fn reduce_start(&mut self, over: Group, group: &dyn Communicator) {
        if over == Group::Tied
            && let Some(shard) = self.gradient_shard.take()
        {
            let all = 0..shard.len();
            return start(&mut self.reducing, group, Collective::AllReduce, shard, all);
        }
        let gradient = self.gradient.take().expect("a gradient is reduced after it is written");
        let sharded = self.owned.len() < self.layout.len;
        let (collective, range) = match over {
            Group::TENSOR => (Collective::AllReduce, 0..self.layout.replicated),
            Group::DATA if sharded => (Collective::ReduceScatter, 0..self.layout.len),
            Group::DATA => (Collective::AllReduce, 0..self.layout.len),
            Group::Tied => (Collective::AllReduce, self.owned.clone()),
            Group::Along(..) => panic!("no gradient is reduced over {over}"),
        };
        start(&mut self.reducing, group, collective, gradient, range);
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

    pub fn reduce_wait(&mut self, backend: &dyn Backend, over: Group, group: &dyn Communicator) {
        let buffer = wait(&mut self.reducing, group);
        match (over, &self.gradient_shard) {
            (Group::DATA, Some(shard)) => {
                let own = buffer.slice(self.owned.clone());
                if self.shard_written {
                    backend.add(own, shard.view());
                } else {
                    backend.copy(own, shard.view());
                }
                self.shard_written = true;
            }
            (Group::Tied, None) if buffer.len() < self.layout.len => self.gradient_shard = Some(buffer),
            _ => self.gradient = Some(buffer),
        }
    }

    pub fn refresh_start(&mut self, backend: &dyn Backend, data: &dyn Communicator) {
        // The weights themselves are being transferred. An empty buffer takes their place until the wait.
        let empty = backend.allocate(0, self.types.compute, Category::Weights);
        let weights = std::mem::replace(&mut self.weights, empty);
        start(&mut self.gathering, data, Collective::AllGather, weights, 0..self.layout.len);
    }

    pub fn refresh_wait(&mut self, data: &dyn Communicator) {
        self.weights = wait(&mut self.gathering, data);
    }

    /// The part of the reduced gradient that this rank owns, and its range in the flat buffer.
    pub fn owned_gradient(&self) -> (View<'_>, Range<usize>) {
        let view = match (&self.gradient_shard, &self.gradient) {
            (Some(shard), _) => shard.view(),
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
        let own_weights =
            self.weights.slice(self.owned.start - self.resident.start..self.owned.end - self.resident.start);
        Parameters {
            gradient: self.owned_gradient().0,
            master: self.master.as_ref().map_or(own_weights, Buffer::view),
            first_moment: self.first_moment.view(),
            second_moment: self.second_moment.view(),
            weights: self.master.is_some().then_some(own_weights),
            segments: &self.segments,
        }
    }
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
