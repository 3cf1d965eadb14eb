//! A time that no step of a plan can be shorter than, from the costs of its ops and without its programs.
//!
//! A stage runs its passes one after the other. Before the first, a micro-batch passes through the stages before it; after the
//! last backward, a gradient passes back through them. The transfers of a stage over one level follow each other, gradients
//! that are reduced once a step are complete only at its end, and the step ends with the sums of the norm, the update and the
//! refresh of weights.

use std::sync::Arc;

use kintsugi_plan::{Axis, BackwardPart, Block, Computation, Op, Plan, ScheduleKind, StepOp, Transfer};
use kintsugi_spec::ByLevel;

use super::costs::{BlockCosts, Costs, Messages, UnitCosts};
use super::op_cost::Time;
use crate::graph::Portions;

/// Lower bounds of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepBound {
    /// Seconds of the step.
    pub step_s: f64,
    /// Seconds of kernels, the mean over the stages.
    pub compute_s: f64,
}

impl StepBound {
    /// Nothing is known of a plan with frozen weights, whose layers are not alike.
    const NONE: StepBound = StepBound { step_s: 0.0, compute_s: 0.0 };

    /// The bound of a plan whose blocks cost at least as much as the cheapest of these.
    pub(crate) fn of_passes(plan: &Plan, blocks: &[Arc<BlockCosts>], messages: &Messages) -> Self {
        if !plan.frozen.is_empty() {
            return StepBound::NONE;
        }
        let passes = Passes::new(plan, blocks, messages);
        let Portions { others, each, last } = Portions::of(plan);
        let step = others as u128 * passes.end(each) + passes.end(last);
        passes.bound(step, 0)
    }

    /// The bound of a plan whose ops have these costs.
    pub(crate) fn of_step(plan: &Plan, costs: &Costs) -> Self {
        if !plan.frozen.is_empty() {
            return StepBound::NONE;
        }
        let passes = Passes::new(plan, std::slice::from_ref(&costs.blocks), &costs.messages);
        let units = UnitTimes { plan, units: &costs.units };
        let Portions { others, each, last } = Portions::of(plan);
        let before = u128::from(units.step_op(0, StepOp::Begin)) + others as u128 * passes.end(each);
        let pp = plan.mesh.pp();
        let transfers: Vec<StageTransfers> = (0..pp).map(|stage| units.transfers(stage, last)).collect();
        let longest = |by_level: &ByLevel<u128>| by_level.iter().copied().max().unwrap_or(0);
        // When a stage has measured its gradients, with the sums over the axes inside a stage.
        let measured = |stage: usize| {
            let StageTransfers { by_level, reductions_at_end, .. } = &transfers[stage];
            let done = if stage == 0 { passes.end(last) } else { passes.done(stage, last) };
            let reduced = passes.first_reduction(stage, last) + longest(reductions_at_end);
            let one_by_one = passes.busy(stage, last) + by_level.iter().sum::<u128>();
            let one_by_one = if plan.pipeline.overlap { 0 } else { one_by_one };
            let at = before + done.max(reduced).max(longest(by_level)).max(one_by_one);
            at + u128::from(units.step_op(stage, StepOp::Measure)) + units.sums_of_a_stage()
        };
        let measured: Vec<u128> = (0..pp).map(measured).collect();
        let together = measured.iter().copied().max().unwrap_or(0) + units.sum(Axis::Pipeline);
        let end = (0..pp).map(|stage| {
            let at = if pp > 1 { together } else { measured[stage] };
            let update = [StepOp::Clip, StepOp::Update].map(|op| u128::from(units.step_op(stage, op)));
            at + update.iter().sum::<u128>() + longest(&transfers[stage].refreshes)
        });
        let compute = StepOp::ALL.map(|op| (0..pp).map(|stage| units.kernels(stage, op)).sum::<u128>());
        let step = end.max().unwrap_or(0) + u128::from(costs.fixed());
        passes.bound(step, compute.iter().sum())
    }
}

/// The times of a plan's passes.
struct Passes<'a> {
    plan: &'a Plan,
    stages: Vec<StageTimes>,
    /// Of one micro-batch on all chunks, in kernels.
    kernels: u128,
}

/// The picoseconds of one micro-batch.
struct StageTimes {
    /// Its forwards on the stages before.
    before: u128,
    /// Its backwards on the stages before, after that of the stage.
    after: u128,
    /// All passes of the stage.
    busy: u128,
    /// The last pass of each of its chunks: the backward, or its weight part.
    last: u128,
    /// The weight parts of its split backwards.
    weight: u128,
}

/// The picoseconds of one micro-batch on a chunk.
#[derive(Clone, Copy)]
struct ChunkTimes {
    forward: Time,
    /// The backward, or its input part if it is split, with its recomputation.
    backward: Time,
    /// The weight part of a split backward.
    weight: Time,
    /// Of these, in kernels.
    kernels: Time,
}

impl<'a> Passes<'a> {
    fn new(plan: &'a Plan, blocks: &[Arc<BlockCosts>], messages: &Messages) -> Self {
        let (pp, chunks) = (plan.mesh.pp(), chunk_times(plan, blocks));
        let mut stages: Vec<StageTimes> = Vec::with_capacity(pp);
        let again = least(blocks, |blocks| blocks.duration(Computation::Recompute.on(Block::Layer(0), 0)));
        let (mut before, mut after) = (0, 0);
        for stage in 0..pp {
            let own = || chunks.iter().skip(stage).step_by(pp);
            let weight: u128 = own().map(|chunk| u128::from(chunk.weight)).sum();
            let backward: u128 = own().map(|chunk| u128::from(chunk.backward)).sum();
            let last = if weight > 0 { weight } else { backward };
            stages.push(StageTimes { before, after, busy: own().map(ChunkTimes::all).sum(), last, weight });
            // The first chunks of the stages follow each other. The first recomputation of a backward needs no gradient.
            let [forward, _] = messages[stage];
            let [_, back] = messages[(stage + 1) % pp];
            before += u128::from(chunks[stage].forward) + u128::from(forward.duration());
            after += u128::from(chunks[stage].backward - again) + u128::from(back.duration());
        }
        let kernels = chunks.iter().map(|chunk| u128::from(chunk.kernels)).sum();
        Passes { plan, stages, kernels }
    }

    /// The time that a stage needs for its passes alone.
    fn busy(&self, stage: usize, micro_batches: usize) -> u128 {
        micro_batches as u128 * self.stages[stage].busy
    }

    /// When a stage has run its passes.
    fn done(&self, stage: usize, micro_batches: usize) -> u128 {
        self.stages[stage].before + self.busy(stage, micro_batches)
    }

    /// When the first stage has run its passes: after the last gradient of every other stage has come back.
    fn end(&self, micro_batches: usize) -> u128 {
        let back = |(stage, times): (usize, &StageTimes)| {
            let done = self.done(stage, micro_batches);
            // A split backward leaves the weight parts of some micro-batches for later.
            let later = (stage + 1).min(micro_batches) as u128 * times.weight;
            done.max(done - later + times.after)
        };
        self.stages.iter().enumerate().map(back).max().unwrap_or(0)
    }

    /// When a stage's first gradient is complete, at the earliest. After that it runs the rest of the last pass of each chunk, and
    /// with several chunks no more than one backward of a group of micro-batches on each.
    fn first_reduction(&self, stage: usize, micro_batches: usize) -> u128 {
        let pipeline = &self.plan.pipeline;
        let passes = if pipeline.virtual_stages > 1 { self.plan.mesh.pp().min(micro_batches) } else { 1 };
        self.done(stage, micro_batches).saturating_sub(passes as u128 * self.stages[stage].last)
    }

    fn bound(&self, step: u128, more_kernels: u128) -> StepBound {
        let kernels = self.kernels * self.plan.micro_batches() as u128 + more_kernels;
        // A step of months is timed in units of some picoseconds.
        let seconds = |time: u128| time as f64 * 1e-12 * (1.0 - 1e-9);
        StepBound { step_s: seconds(step), compute_s: seconds(kernels) / self.plan.mesh.pp() as f64 }
    }
}

fn least(blocks: &[Arc<BlockCosts>], time: impl Fn(&BlockCosts) -> Time) -> Time {
    blocks.iter().map(|blocks| time(blocks)).min().unwrap_or(0)
}

/// The times of one micro-batch on every chunk.
fn chunk_times(plan: &Plan, blocks: &[Arc<BlockCosts>]) -> Vec<ChunkTimes> {
    let split = plan.pipeline.schedule == ScheduleKind::ZeroBubble;
    let block = |block: Block| {
        let input = Computation::Backward(if split { BackwardPart::Input } else { BackwardPart::Both });
        let weight = split.then_some(Computation::Backward(BackwardPart::Weight));
        let time = |part: Computation| least(blocks, |blocks| blocks.duration(part.on(block, 0)));
        let parts = [Some(Computation::Forward), Some(Computation::Recompute), Some(input), weight];
        let kernels = |part: &Computation| least(blocks, |blocks| blocks.kernels(part.on(block, 0)));
        ChunkTimes {
            forward: time(Computation::Forward),
            backward: time(Computation::Recompute).saturating_add(time(input)),
            weight: weight.map_or(0, time),
            kernels: parts.iter().flatten().map(kernels).fold(0, Time::saturating_add),
        }
    };
    let (layer, embedding, head) = (block(Block::Layer(0)), block(Block::Embedding), block(Block::Head));
    let chunk = |(chunk, &layers): (usize, &usize)| {
        let mut times = layer.times(layers as Time);
        if chunk == 0 {
            times = times.plus(embedding);
        }
        if chunk + 1 == plan.chunks() {
            times = times.plus(head);
        }
        times
    };
    plan.pipeline.layers.iter().enumerate().map(chunk).collect()
}

impl ChunkTimes {
    fn all(&self) -> u128 {
        u128::from(self.forward) + u128::from(self.backward) + u128::from(self.weight)
    }

    fn times(self, n: Time) -> Self {
        let ChunkTimes { forward, backward, weight, kernels } = self;
        let times = |time: Time| time.saturating_mul(n);
        ChunkTimes {
            forward: times(forward),
            backward: times(backward),
            weight: times(weight),
            kernels: times(kernels),
        }
    }

    fn plus(self, other: Self) -> Self {
        ChunkTimes {
            forward: self.forward.saturating_add(other.forward),
            backward: self.backward.saturating_add(other.backward),
            weight: self.weight.saturating_add(other.weight),
            kernels: self.kernels.saturating_add(other.kernels),
        }
    }
}

/// The times of a plan's ops on units.
struct UnitTimes<'a> {
    plan: &'a Plan,
    units: &'a UnitCosts,
}

/// Picoseconds that the transfers of a stage's units occupy each level.
#[derive(Default)]
struct StageTransfers {
    /// All gathers and reductions.
    by_level: ByLevel<u128>,
    /// The reductions that begin when the first gradient of the step is complete.
    reductions_at_end: ByLevel<u128>,
    /// The gathers of updated weights from the owners of their states.
    refreshes: ByLevel<u128>,
}

impl UnitTimes<'_> {
    fn step_op(&self, stage: usize, op: StepOp) -> Time {
        let cost = self.units.step_op(stage, op);
        cost.compute.saturating_add(cost.links)
    }

    fn kernels(&self, stage: usize, op: StepOp) -> u128 {
        self.units.step_op(stage, op).compute.into()
    }

    fn sum(&self, axis: Axis) -> u128 {
        if self.plan.mesh.size(axis) > 1 { self.units.sum(axis).duration().into() } else { 0 }
    }

    /// The sums of the norm over the axes inside a stage.
    fn sums_of_a_stage(&self) -> u128 {
        Axis::ALL.into_iter().filter(|&axis| axis != Axis::Pipeline).map(|axis| self.sum(axis)).sum()
    }

    fn transfers(&self, stage: usize, micro_batches: usize) -> StageTransfers {
        let mut transfers = StageTransfers::default();
        let at_end = !self.plan.sharding.reduces_every_micro_batch();
        for (transfer, count) in self.plan.least_transfers(stage, micro_batches) {
            let Some(started) = self.units.op(Op::Start(transfer)).and_then(|cost| cost.started) else {
                continue;
            };
            let time = count as u128 * u128::from(started.time);
            if let Transfer::Refresh { .. } = transfer {
                transfers.refreshes[started.level] += time;
                continue;
            }
            transfers.by_level[started.level] += time;
            if at_end && matches!(transfer, Transfer::Reduce { .. }) {
                transfers.reductions_at_end[started.level] += time;
            }
        }
        transfers
    }
}
