//! The rank itself: what it holds, and the one place where an op becomes a call.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::Pending;
use kintsugi_model::{Context, Shape};
use kintsugi_plan::{Block, Coordinate, LossScale, Op, Over, Plan, Program, Unit};
use kintsugi_tensor::ops::control;
use kintsugi_tensor::{Backend, Buffer, Category, DType, Repeat, Repeated};

use crate::flow::Flow;
use crate::generation::{Generation, NewTokens};
use crate::initial::Initial;
use crate::unit::{Types, UnitState};
use crate::{Groups, Kept, Piece, Store, StoreError};

/// The tokens of a micro-batch, `[rows]` each.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// What the model reads.
    pub inputs: &'a [u32],
    /// What it is to predict.
    pub targets: &'a [u32],
    /// Where each input's document begins in its sample; asked for where documents are masked.
    pub starts: &'a [u32],
}

/// Where a rank's tokens come from.
pub trait Source {
    /// The tokens of a micro-batch of the running step; `None` on paper.
    fn batch(&mut self, micro: usize) -> Option<Tokens<'_>>;

    /// The new tokens of a micro-batch of the running step of a generation; `None` on paper.
    fn new_tokens(&mut self, _micro: usize) -> Option<NewTokens<'_>> {
        None
    }

    /// The token that follows each sample of a micro-batch, from its logits, `[samples, vocabulary]`; `None` on
    /// paper. All tp ranks are asked, with the same logits, and must give the same answer.
    fn choose(&mut self, _micro: usize, _logits: &[f32]) -> Option<Vec<u32>> {
        None
    }
}

/// What a rank is for, and so what it holds beside its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Gradients and states too.
    Training,
    /// Nothing: evaluation and generation.
    Inference,
}

/// A part of a rank that is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bad {
    /// `"weights"` or `"gradient"`.
    pub what: &'static str,
    /// Whose.
    pub unit: Unit,
}

/// One worker: its share of the model, what is in flight, and the groups it belongs to.
pub struct Rank {
    pub(crate) plan: Arc<Plan>,
    pub(crate) at: Coordinate,
    pub(crate) shape: Shape,
    pub(crate) backend: Rc<dyn Backend>,
    pub(crate) groups: Groups,
    pub(crate) units: Vec<UnitState>,
    index: HashMap<Unit, usize>,
    /// The indices of the units that each block writes.
    pub(crate) written_by: HashMap<Block, Vec<usize>>,
    pub(crate) has_positions: bool,
    /// The first and the last layer here: from one to the other the beginnings of documents are needed.
    pub(crate) outer_layers: [Block; 2],
    /// The units whose gradients this rank counts in the global norm.
    pub(crate) answers_for: Vec<Unit>,
    pub(crate) flow: Flow,
    /// `[squared norm, loss, stop]`, summed over micro-batches and then over the mesh.
    pub(crate) sums: Option<Buffer>,
    pub(crate) sums_pending: Option<Pending>,
    pub(crate) wants_to_stop: bool,
    /// See [`control`].
    pub(crate) control: Buffer,
    /// The squared norm of each unit's own contribution, before any reduction: tells who went bad first.
    pub(crate) health: Buffer,
    /// What generation keeps, while there is one.
    pub(crate) generation: Option<Generation>,
}

/// Index of the squared norm in the sums.
pub(crate) const SQUARES: usize = 0;
/// Index of the loss in the sums.
pub(crate) const LOSS: usize = 1;
/// Index of the number of ranks that want to stop in the sums.
pub(crate) const STOP: usize = 2;
/// Number of sums.
pub const SUMS: usize = 3;

impl Rank {
    /// Takes the memory of everything that stays: weights, states, gradients that are not sharded.
    pub fn new(plan: Arc<Plan>, at: Coordinate, backend: Rc<dyn Backend>, groups: Groups) -> Self {
        Self::for_purpose(plan, at, backend, groups, Purpose::Training)
    }

    /// Takes the memory of what its purpose needs.
    pub fn for_purpose(
        plan: Arc<Plan>,
        at: Coordinate,
        backend: Rc<dyn Backend>,
        groups: Groups,
        purpose: Purpose,
    ) -> Self {
        let shape = Shape::new(&plan, at.tp);
        let types = Types::new(&plan, shape.compute);
        let names = plan.stage_units(at.pp);
        let units: Vec<UnitState> =
            names.iter().map(|&unit| UnitState::new(&*backend, &plan, at, unit, types, purpose)).collect();
        let accumulator = shape.compute.accumulator();
        let scalars = |len| {
            let buffer = backend.allocate(len, accumulator, Category::States);
            backend.fill(0.0, buffer.view());
            buffer
        };
        let (sums, control, health) = (scalars(SUMS), scalars(control::LEN), scalars(names.len()));
        let initial_scale = match (shape.compute, plan.precision.loss_scale) {
            (DType::F16, LossScale::Dynamic) => INITIAL_LOSS_SCALE,
            (DType::F16, LossScale::Fixed(scale)) => scale,
            _ => 1.0,
        };
        backend.fill(initial_scale, control.slice(control::LOSS_SCALE..control::LOSS_SCALE + 1));
        let index: HashMap<Unit, usize> = names.into_iter().enumerate().map(|(i, unit)| (unit, i)).collect();
        let units_of = |block| plan.block_units(block).into_iter().map(|unit| index[&unit]).collect();
        Rank {
            answers_for: plan.answers_for(at.pp),
            written_by: plan.stage_blocks(at.pp).into_iter().map(|block| (block, units_of(block))).collect(),
            has_positions: index.contains_key(&Unit::Positions),
            outer_layers: plan.outer_layers(at.pp),
            index,
            plan,
            at,
            shape,
            backend,
            groups,
            units,
            flow: Flow::default(),
            sums: Some(sums),
            sums_pending: None,
            wants_to_stop: false,
            control,
            health,
            generation: None,
        }
    }

    /// Counts these units' gradients in the global norm instead of the plan's.
    pub fn answer_for(&mut self, units: Vec<Unit>) {
        self.answers_for = units;
    }

    /// Asks every rank to stop; they agree through the sums of the next step and of those after it.
    pub fn ask_to_stop(&mut self) {
        self.wants_to_stop = true;
    }

    /// Sets the weights to their initial values.
    pub fn initialise(&self, seed: u64) {
        self.load(&Initial { seed }, &[Kept::Weights]).expect("initial weights are made, not read");
    }

    /// Runs a whole program, telling `watch` of every op before it runs.
    pub fn run(&mut self, program: &Program, source: &mut dyn Source, mut watch: impl FnMut(&Self, &Op)) {
        for op in &program.ops {
            watch(self, op);
            self.execute(op, source);
        }
        debug_assert!(self.flow.is_empty(), "something was left in flight");
    }

    /// Runs a whole program that is run again and again, with other tokens each time; a device that knows it by heart
    /// needs the tokens alone, and `watch` hears of no op then.
    pub fn repeat(
        &mut self,
        program: &Program,
        source: &mut dyn Source,
        mut watch: impl FnMut(&Self, &Op),
    ) -> Repeated {
        // A step that asks to stop is not like the others.
        if self.wants_to_stop {
            self.run(program, source, watch);
            return Repeated::Enqueued;
        }
        let backend = Rc::clone(&self.backend);
        backend.repeat(&mut |what| match what {
            Repeat::Whole => self.run(program, source, &mut watch),
            Repeat::Tokens(put) => {
                for op in &program.ops {
                    if let Op::Load { micro } = *op {
                        self.hand_over(micro, source, put);
                    }
                }
            }
        })
    }

    /// Runs one op.
    pub fn execute(&mut self, op: &Op, source: &mut dyn Source) {
        match *op {
            Op::Begin => self.begin(),
            Op::Load { micro } => self.load_batch(micro, source),
            Op::Forward { block, micro } => self.forward(block, micro),
            Op::Evaluate { block, micro } => self.evaluate(block, micro),
            Op::Feed { micro } => self.feed(micro, source),
            Op::Decode { block, micro } => self.decode(block, micro),
            Op::Choose { micro } => self.choose(micro, source),
            Op::ShareStart => self.share_start(),
            Op::ShareWait => self.share_wait(),
            Op::Recompute { block, micro } => self.recompute(block, micro),
            Op::Backward { block, micro, part } => self.backward(block, micro, part),
            Op::GatherStart { unit } => {
                let (unit, backend, groups) = self.unit_with(unit);
                unit.gather_start(backend, &*groups.data);
            }
            Op::GatherWait { unit } => {
                let (unit, _, groups) = self.unit_with(unit);
                unit.gather_wait(&*groups.data);
            }
            Op::Release { unit } => self.unit_with(unit).0.release(),
            Op::ReduceStart { unit, over } => {
                self.unit(unit).clear_unwritten(&*self.backend);
                self.check_health(unit, over);
                let (unit, _, groups) = self.unit_with(unit);
                unit.reduce_start(over, groups.over(over));
            }
            Op::ReduceWait { unit, over } => {
                let (unit, backend, groups) = self.unit_with(unit);
                unit.reduce_wait(backend, over, groups.over(over));
            }
            Op::SendStart { message } => self.send_start(message),
            Op::SendWait { message } => self.send_wait(message),
            Op::ReceiveStart { message } => self.receive_start(message),
            Op::ReceiveWait { message } => self.receive_wait(message),
            Op::Measure => self.measure(),
            Op::NormStart { axis } => self.norm_start(axis),
            Op::NormWait { axis } => self.norm_wait(axis),
            Op::Clip => self.clip(),
            Op::Step => self.step(),
            Op::RefreshStart { unit } => {
                let (unit, backend, groups) = self.unit_with(unit);
                unit.refresh_start(backend, &*groups.data);
            }
            Op::RefreshWait { unit } => {
                let (unit, _, groups) = self.unit_with(unit);
                unit.refresh_wait(&*groups.data);
            }
        }
    }

    /// Reads a slot of the control buffer ([`control`]), waiting for the device.
    pub fn control(&self, slot: usize) -> f64 {
        self.backend.read_scalar(self.control.view(), slot)
    }

    /// Sets a slot of the control buffer, as when a run goes on from where another stopped.
    pub fn set_control(&self, slot: usize, value: f64) {
        self.backend.fill(value, self.control.slice(slot..slot + 1));
    }

    /// The mean loss that an evaluation program has just summed over `tokens` tokens.
    pub fn mean_loss(&self, tokens: usize) -> f64 {
        self.backend.read_scalar(self.sums().view(), LOSS) / tokens as f64
    }

    /// What on this rank is not finite, in the order in which it spreads: a unit's weights in model order, else a
    /// unit's own gradient in the order of the backward pass.
    pub fn first_bad(&self) -> Option<Bad> {
        let weights = |unit: &&UnitState| {
            let (sum, (weights, _)) = (self.health.slice(0..1), unit.resident_weights());
            self.backend.fill(0.0, sum);
            self.backend.sum_of_squares(weights, sum);
            !self.backend.read_scalar(sum, 0).is_finite()
        };
        let health = self.backend.read(self.health.view());
        let gradient = health.iter().rposition(|squares| !squares.is_finite());
        let bad = |what, unit: &UnitState| Bad { what, unit: unit.layout.unit };
        let weights = self.units.iter().find(weights).map(|unit| bad("weights", unit));
        weights.or_else(|| gradient.map(|i| bad("gradient", &self.units[i])))
    }

    /// Reads this rank's part of what is kept of every parameter; what is not asked for stays as it is.
    pub fn load(&self, store: &dyn Store, kept: &[Kept]) -> Result<(), StoreError> {
        let part = (self.plan.mesh.tp, self.at.tp);
        for unit in &self.units {
            for &kept in kept {
                unit.load(&*self.backend, store, part, kept)?;
            }
        }
        Ok(())
    }

    /// Copies elements `range` of a unit's flat buffer to the host, bit for bit in the type they are kept in. This rank
    /// must hold their states: all of them, or its shard.
    pub fn download(&self, unit: Unit, kept: Kept, range: &Range<usize>, to: &mut [u8]) {
        self.backend.download(self.unit(unit).kept(kept, range), to);
    }

    /// This rank's part of the reduced gradients, as the host sees it.
    pub fn gradients(&self) -> Vec<Piece> {
        self.pieces(UnitState::owned_gradient)
    }

    /// This rank's part of the weights, as the host sees it.
    pub fn weights(&self) -> Vec<Piece> {
        self.pieces(UnitState::resident_weights)
    }

    pub(crate) fn context(&self) -> Context<'_> {
        let (backend, tensor) = (&*self.backend, &*self.groups.tensor);
        Context { backend, tensor, shape: self.shape(), starts: None }
    }

    /// What a micro-batch is: that of the plan, or while texts are generated their new tokens.
    pub(crate) fn shape(&self) -> &Shape {
        self.generation.as_ref().map_or(&self.shape, |generation| &generation.shape)
    }

    /// The same for the layers of a micro-batch, which may see one document at a time only.
    pub(crate) fn layer_context(&self, micro: usize) -> Context<'_> {
        let starts = self.plan.masks_documents().then(|| self.flow.starts[&micro].view());
        Context { starts, ..self.context() }
    }

    pub(crate) fn unit(&self, unit: Unit) -> &UnitState {
        &self.units[self.index[&unit]]
    }

    pub(crate) fn unit_index(&self, unit: Unit) -> usize {
        self.index[&unit]
    }

    pub(crate) fn sums(&self) -> &Buffer {
        self.sums.as_ref().expect("the sums are here between start and wait")
    }

    fn unit_with(&mut self, unit: Unit) -> (&mut UnitState, &dyn Backend, &Groups) {
        (&mut self.units[self.index[&unit]], &*self.backend, &self.groups)
    }

    fn begin(&mut self) {
        self.units.iter_mut().for_each(UnitState::begin);
        self.backend.fill(0.0, self.sums().view());
        self.backend.fill(0.0, self.health.view());
        self.begin_generation_step();
    }

    /// Records the squared norm of this rank's own gradient before the first reduction mixes it with others'.
    fn check_health(&self, unit: Unit, over: Over) {
        if self.first_reduction(unit) == Some(over)
            && let Some(gradient) = self.unit(unit).whole_gradient()
        {
            let i = self.unit_index(unit);
            self.backend.sum_of_squares(gradient, self.health.slice(i..i + 1));
        }
    }

    /// The first reduction of a unit's gradient, if it has any.
    pub(crate) fn first_reduction(&self, unit: Unit) -> Option<Over> {
        let has_replicated = || self.unit(unit).layout.replicated > 0;
        self.plan.gradient_reductions(self.at.pp, unit, has_replicated).into_iter().flatten().next()
    }
}

/// Where dynamic loss scaling starts, as in PyTorch and Apex.
const INITIAL_LOSS_SCALE: f64 = 65536.0;
