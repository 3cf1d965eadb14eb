//! The rank: its state, and the only place where an op becomes a call.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::{Communicator, Pending, RankFailure, TransferObserver};
use kintsugi_model::{Context, Shape};
use kintsugi_plan::{
    Block, Computation, Coordinate, Group, LossScale, Op, Phase, Plan, Program, StepOp, Transfer, Unit,
};
use kintsugi_tensor::ops::control;
use kintsugi_tensor::{Backend, Buffer, Category, DType, ReplayOutcome, ReplayRequest};
use serde::{Deserialize, Serialize};

use crate::generation::{Generation, NewTokens};
use crate::in_flight::InFlight;
use crate::initial_weights::InitialWeights;
use crate::matrices::Rounds;
use crate::replication::Replication;
use crate::store::Zeros;
use crate::unit::{ElementTypes, UnitState};
use crate::{Groups, Store, StoreError, StoredTensor, UnitValues};

/// The tokens of a micro-batch, `[rows]` each, or `[lists, rows]`.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Input ids.
    pub inputs: &'a [u32],
    /// Target ids.
    pub targets: &'a [u32],
    /// The first token of its sample that each token attends to: a list for documents that are masked, and a list for layers with a
    /// window. Empty if there is neither.
    pub starts: &'a [u32],
}

/// The source of a rank's tokens.
pub trait TokenSource {
    /// The tokens of a micro-batch of the current step; `None` on paper.
    fn batch(&mut self, micro: usize) -> Option<Tokens<'_>>;

    /// The new tokens of a micro-batch of the current generation step; `None` on paper.
    fn new_tokens(&mut self, _micro: usize) -> Option<NewTokens<'_>> {
        None
    }

    /// Samples the next token of each sample of a micro-batch from its logits, `[samples, vocabulary]`; `None` on paper.
    /// Every tp rank calls it with the same logits and must get the same tokens.
    fn choose(&mut self, _micro: usize, _logits: &[f32]) -> Option<Vec<u32>> {
        None
    }
}

/// A source for ranks on paper, and for programs that load no tokens.
pub struct NoTokens;

impl TokenSource for NoTokens {
    fn batch(&mut self, _micro: usize) -> Option<Tokens<'_>> {
        None
    }
}

/// What a rank is used for, which decides what it allocates beside its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Training: allocates gradients and states, too.
    Training,
    /// Evaluation and generation: allocates only weights.
    Inference,
}

/// A unit of a rank with values that are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NonFinite {
    /// Which of its tensors.
    pub what: NonFiniteTensor,
    /// The unit.
    pub unit: Unit,
}

/// A tensor with values that are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NonFiniteTensor {
    /// The weights.
    Weights,
    /// The gradient.
    Gradient,
}

impl NonFiniteTensor {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            NonFiniteTensor::Weights => "weights",
            NonFiniteTensor::Gradient => "gradient",
        }
    }
}

/// One worker: its share of the model, the buffers in flight, and its groups.
pub struct Rank {
    pub(crate) plan: Arc<Plan>,
    pub(crate) at: Coordinate,
    pub(crate) shape: Shape,
    pub(crate) backend: Rc<dyn Backend>,
    pub(crate) groups: Groups,
    pub(crate) units: Vec<UnitState>,
    index: HashMap<Unit, usize>,
    /// The indices of the units whose gradients each block writes.
    pub(crate) written_by: HashMap<Block, Vec<usize>>,
    pub(crate) has_positions: bool,
    /// The layers with the last backward, if there is one, and with the last forward. The starts are needed up to them.
    pub(crate) last_layers: (Option<Block>, Block),
    /// The first block with a backward.
    pub(crate) first_backward: Block,
    /// The sizes of layers whose weights are frozen: they save no factors of gradients of weights.
    frozen_shape: Shape,
    /// The units whose gradients this rank counts in the global norm.
    pub(crate) owned_units: Vec<Unit>,
    pub(crate) in_flight: InFlight,
    /// `[squared norm, loss, stop]`, summed over micro-batches and then over the mesh.
    pub(crate) sums: Option<Buffer>,
    pub(crate) sums_pending: Option<Pending>,
    pub(crate) wants_to_stop: bool,
    /// See [`control`].
    pub(crate) control: Buffer,
    /// The squared norm of this rank's own gradient of each unit, before any reduction. Shows where non-finite values
    /// began.
    pub(crate) unit_norms: Buffer,
    /// The updates of whole matrices.
    pub(crate) rounds: Rounds,
    /// The state of a running generation.
    pub(crate) generation: Option<Generation>,
    /// The copies of its states.
    pub(crate) replication: Replication,
}

/// Index of the squared norm in the sums.
pub const SQUARES: usize = 0;
/// Index of the loss in the sums.
pub(crate) const LOSS: usize = 1;
/// Index of the number of ranks that ask to stop in the sums.
pub(crate) const STOP: usize = 2;
/// Number of sums.
pub const SUMS: usize = 3;

impl Rank {
    /// A rank for training. Allocates the persistent buffers: weights, states, and gradients that are not sharded.
    pub fn new(plan: Arc<Plan>, at: Coordinate, backend: Rc<dyn Backend>, groups: Groups) -> Self {
        Self::for_purpose(plan, at, backend, groups, Purpose::Training)
    }

    /// A rank for a purpose. Allocates the persistent buffers that the purpose needs.
    pub fn for_purpose(
        plan: Arc<Plan>,
        at: Coordinate,
        backend: Rc<dyn Backend>,
        groups: Groups,
        purpose: Purpose,
    ) -> Self {
        let shape = Shape::new(&plan, at);
        let types = ElementTypes::new(&plan, shape.compute);
        let names = plan.stage_units(at.pp());
        let units: Vec<UnitState> =
            names.iter().map(|&unit| UnitState::new(&*backend, &plan, at, unit, types, purpose)).collect();
        let accumulator = shape.compute.accumulator();
        let scalars = |len| {
            let buffer = backend.allocate(len, accumulator, Category::States);
            backend.fill(0.0, buffer.view());
            buffer
        };
        let (sums, control, unit_norms) = (scalars(SUMS), scalars(control::LEN), scalars(names.len()));
        let index: HashMap<Unit, usize> = names.into_iter().enumerate().map(|(i, unit)| (unit, i)).collect();
        let trained = |block| plan.block_units(block).into_iter().filter(|&unit| !plan.is_frozen(unit));
        let units_of = |block| trained(block).map(|unit| index[&unit]).collect();
        let rank = Rank {
            owned_units: plan.owned_units(at.pp()),
            written_by: plan
                .stage_blocks(at.pp())
                .into_iter()
                .map(|block| (block, units_of(block)))
                .collect(),
            has_positions: index.contains_key(&Unit::Positions),
            last_layers: plan.last_layers(at.pp()),
            first_backward: plan.first_backward(),
            frozen_shape: shape.frozen(),
            rounds: Rounds::new(&plan, at, &groups),
            replication: Replication::new(&plan, at),
            index,
            plan,
            at,
            shape,
            backend,
            groups,
            units,
            in_flight: InFlight::default(),
            sums: Some(sums),
            sums_pending: None,
            wants_to_stop: false,
            control,
            unit_norms,
            generation: None,
        };
        rank.reset_control();
        rank
    }

    /// Sets the control buffer ([`control`]) to that of a run without a step.
    fn reset_control(&self) {
        let initial_scale = match (self.shape.compute, self.plan.precision.loss_scale) {
            (DType::F16, LossScale::Dynamic) => INITIAL_LOSS_SCALE,
            (DType::F16, LossScale::Fixed(scale)) => scale,
            _ => 1.0,
        };
        self.backend.fill(0.0, self.control.view());
        self.set_control(control::LOSS_SCALE, initial_scale);
    }

    /// Sets the optimizer's states and the control buffer to those of a run without a step.
    pub fn reset_states(&self) {
        let states = self.plan.stored_tensors().into_iter().filter(|&stored| stored != StoredTensor::Weights);
        self.load(&Zeros, &states.collect::<Vec<_>>()).expect("zeros are made, not read");
        self.reset_control();
    }

    /// Tells an observer about every transfer of this rank from now on.
    pub fn observe(&mut self, observer: &Rc<dyn TransferObserver>) {
        self.groups.observe(observer);
    }

    /// Changes the sizes that this rank's blocks work with, to make a deliberate mistake.
    pub fn change_shape(&mut self, change: impl FnOnce(&mut Shape)) {
        change(&mut self.shape);
        self.frozen_shape = self.shape.frozen();
    }

    /// Asks all ranks to stop. The next step and every step after it carry the request in their sums.
    pub fn ask_to_stop(&mut self) {
        self.wants_to_stop = true;
    }

    /// Sets the weights to their initial values.
    pub fn initialise(&self, seed: u64) {
        self.load(&InitialWeights { seed }, &[StoredTensor::Weights])
            .expect("initial weights are made, not read");
    }

    /// Runs a whole program, to its end or to the first failure of a transfer. Calls `watch` before every op.
    pub fn run(
        &mut self,
        program: &Program,
        source: &mut dyn TokenSource,
        mut watch: impl FnMut(&Self, &Op),
    ) -> Result<(), RankFailure> {
        for op in &program.ops {
            watch(self, op);
            self.execute(op, source)?;
        }
        debug_assert!(self.in_flight.is_empty(), "something was left in flight");
        Ok(())
    }

    /// Runs the program of a step whose operations are the same every time, with other tokens. A device that has captured
    /// the step as a graph replays it and only needs the tokens. It then does not call `watch`.
    pub fn replay_step(
        &mut self,
        program: &Program,
        source: &mut dyn TokenSource,
        mut watch: impl FnMut(&Self, &Op),
    ) -> Result<ReplayOutcome, RankFailure> {
        // A step that asks to stop has an additional operation.
        if self.wants_to_stop {
            return self.run(program, source, watch).map(|()| ReplayOutcome::Enqueued);
        }
        let (backend, mut result) = (Rc::clone(&self.backend), Ok(()));
        let outcome = backend.replay_step(&mut |what| match what {
            ReplayRequest::WholeStep => result = self.run(program, source, &mut watch),
            ReplayRequest::Tokens(put) => {
                for op in &program.ops {
                    if let Op::Load { micro } = *op {
                        self.tokens_for_replay(micro, source, put);
                    }
                }
            }
        });
        result.map(|()| outcome)
    }

    /// Runs one op. Fails if one of its transfers does, or one of the layers' transfers in it.
    pub fn execute(&mut self, op: &Op, source: &mut dyn TokenSource) -> Result<(), RankFailure> {
        self.dispatch(op, source);
        self.groups.failure().map_or(Ok(()), Err)
    }

    fn dispatch(&mut self, op: &Op, source: &mut dyn TokenSource) {
        match *op {
            Op::Step(StepOp::Begin) => self.begin(),
            Op::Step(StepOp::Measure) => self.measure(),
            Op::Step(StepOp::Clip) => self.clip(),
            Op::Step(StepOp::Update) => self.update(),
            Op::Step(StepOp::Average) => self.average(),
            Op::Load { micro } => self.load_batch(micro, source),
            Op::Feed { micro } => self.feed(micro, source),
            Op::Choose { micro } => self.choose(micro, source),
            Op::Compute { kind, block, micro } => match kind {
                Computation::Forward => self.forward(block, micro),
                Computation::Evaluate => self.evaluate(block, micro),
                Computation::Decode => self.decode(block, micro),
                Computation::Recompute => self.recompute(block, micro),
                Computation::Backward(part) => self.backward(block, micro, part),
            },
            Op::Matrices { kind, unit } => self.matrices(kind, unit),
            Op::Release { unit } => self.unit_mut(unit).release(),
            Op::Discard { unit } => self.unit_mut(unit).discard(),
            Op::Start(transfer) => self.start(transfer),
            Op::Wait(transfer) => self.wait(transfer),
        }
    }

    fn start(&mut self, transfer: Transfer) {
        match transfer {
            Transfer::Gather { unit, phase } => self.transfer(unit, phase, UnitState::gather_start),
            Transfer::Reduce { unit, phase } => {
                if self.unit(unit).first_reduction == Some(phase) {
                    self.unit(unit).clear_unwritten(&*self.backend);
                    self.record_unit_norm(unit);
                }
                self.transfer(unit, phase, UnitState::reduce_start);
            }
            Transfer::Refresh { unit, phase } => self.transfer(unit, phase, UnitState::refresh_start),
            Transfer::Exchange { over, .. } => self.exchange_start(over),
            Transfer::Send(message) => self.send_start(message),
            Transfer::Receive(message) => self.receive_start(message),
            Transfer::Norm { axis } => self.norm_start(axis),
            Transfer::Share => self.share_start(),
            Transfer::Replicate { piece } => self.replicate_start(piece),
        }
    }

    fn wait(&mut self, transfer: Transfer) {
        match transfer {
            Transfer::Gather { unit, phase } => self.transfer(unit, phase, UnitState::gather_wait),
            Transfer::Reduce { unit, phase } => self.transfer(unit, phase, UnitState::reduce_wait),
            Transfer::Refresh { unit, phase } => self.transfer(unit, phase, UnitState::refresh_wait),
            Transfer::Exchange { over, .. } => self.exchange_wait(over),
            Transfer::Send(message) => self.send_wait(message),
            Transfer::Receive(message) => self.receive_wait(message),
            Transfer::Norm { axis } => self.norm_wait(axis),
            Transfer::Share => self.share_wait(),
            Transfer::Replicate { piece } => self.replicate_wait(piece),
        }
    }

    /// Starts a phase of a unit's transfer in its group, or waits for it.
    fn transfer(
        &mut self,
        unit: Unit,
        phase: Phase,
        act: fn(&mut UnitState, &dyn Backend, Phase, &dyn Communicator),
    ) {
        act(&mut self.units[self.index[&unit]], &*self.backend, phase, self.groups.get(phase.over));
    }

    /// Waits for the device and reads an element of the control buffer ([`control`]).
    pub fn control(&self, index: usize) -> f64 {
        self.backend.read_scalar(self.control.view(), index)
    }

    /// Sets an element of the control buffer, as when a run resumes.
    pub fn set_control(&self, index: usize, value: f64) {
        self.backend.fill(value, self.control.slice(index..index + 1));
    }

    /// The mean loss over `tokens` tokens, after an evaluation program.
    pub fn mean_loss(&self, tokens: usize) -> f64 {
        self.backend.read_scalar(self.sums().view(), LOSS) / tokens as f64
    }

    /// The first unit of this rank that is not finite: by its weights in model order, or else by its own gradient in the
    /// order of the backward pass.
    pub fn first_non_finite(&self) -> Option<NonFinite> {
        let weights = |unit: &&UnitState| {
            let (sum, (weights, _)) = (self.unit_norms.slice(0..1), unit.resident_weights());
            self.backend.fill(0.0, sum);
            self.backend.sum_of_squares(weights, sum);
            !self.backend.read_scalar(sum, 0).is_finite()
        };
        let health = self.backend.read(self.unit_norms.view());
        let gradient = health.iter().rposition(|squares| !squares.is_finite());
        let bad = |what, unit: &UnitState| NonFinite { what, unit: unit.layout.unit };
        let weights = self.units.iter().find(weights).map(|unit| bad(NonFiniteTensor::Weights, unit));
        weights.or_else(|| gradient.map(|i| bad(NonFiniteTensor::Gradient, &self.units[i])))
    }

    /// Reads this rank's part of these tensors of every parameter. Other tensors stay unchanged.
    pub fn load(&self, store: &dyn Store, stored: &[StoredTensor]) -> Result<(), StoreError> {
        let part = (self.plan.mesh.tp(), self.at.tp());
        for unit in &self.units {
            for &stored in stored {
                unit.load(&*self.backend, store, part, stored)?;
            }
            // The average begins with the weights, unless it is loaded, too.
            if !stored.contains(&StoredTensor::Average) {
                unit.begin_average(&*self.backend);
            }
        }
        Ok(())
    }

    /// Copies elements `range` of a unit's flat buffer to the host, bit for bit in their stored type. This rank must hold
    /// the states of these elements.
    pub fn download(&self, unit: Unit, stored: StoredTensor, range: &Range<usize>, to: &mut [u8]) {
        self.backend.download(self.unit(unit).stored_view(stored, range), to);
    }

    /// This rank's part of the reduced gradients, on the host.
    pub fn gradients(&self) -> Vec<UnitValues> {
        self.pieces(self.units.iter().filter(|unit| unit.is_trained()), UnitState::owned_gradient)
    }

    /// This rank's part of the weights, on the host.
    pub fn weights(&self) -> Vec<UnitValues> {
        self.pieces(self.units.iter(), UnitState::resident_weights)
    }

    pub(crate) fn context(&self) -> Context<'_> {
        let [tensor, context] = [Group::TENSOR, Group::CONTEXT].map(|group| self.groups.get(group));
        Context { backend: &*self.backend, tensor, context, shape: self.shape(), starts: None }
    }

    /// The sizes of a micro-batch: those of the plan, or during generation those of the new tokens.
    pub(crate) fn shape(&self) -> &Shape {
        self.generation.as_ref().map_or(&self.shape, |generation| &generation.shape)
    }

    /// The context of a layer, with the first token that each token of the micro-batch attends to, if that is not token 0.
    pub(crate) fn layer_context(&self, micro: usize, layer: usize) -> Context<'_> {
        let starts = self.plan.starts_of(layer).map(|range| self.in_flight.starts[&micro].slice(range));
        let frozen = self.plan.is_frozen(Unit::Layer(layer));
        let shape = if frozen { &self.frozen_shape } else { &self.shape };
        Context { starts, shape, ..self.context() }
    }

    pub(crate) fn unit(&self, unit: Unit) -> &UnitState {
        &self.units[self.index[&unit]]
    }

    pub(crate) fn unit_index(&self, unit: Unit) -> usize {
        self.index[&unit]
    }

    /// The sums of a step over all ranks. They are here while no rank sums them.
    pub fn sums(&self) -> &Buffer {
        self.sums.as_ref().expect("the sums are here between start and wait")
    }

    fn unit_mut(&mut self, unit: Unit) -> &mut UnitState {
        &mut self.units[self.index[&unit]]
    }

    fn begin(&mut self) {
        self.units.iter_mut().for_each(UnitState::begin);
        self.backend.fill(0.0, self.sums().view());
        self.backend.fill(0.0, self.unit_norms.view());
        self.begin_generation_step();
    }

    /// Records the squared norm of this rank's own gradient before its first reduction.
    fn record_unit_norm(&self, unit: Unit) {
        if let Some(gradient) = self.unit(unit).whole_gradient() {
            let i = self.unit_index(unit);
            self.backend.sum_of_squares(gradient, self.unit_norms.slice(i..i + 1));
        }
    }
}

/// Where dynamic loss scaling starts, as in PyTorch and Apex.
const INITIAL_LOSS_SCALE: f64 = 65536.0;
