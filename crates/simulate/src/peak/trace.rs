//! The memory effect of each kind of op: a rank of a small plan runs its program on paper, and a gauge is read around
//! every op.

use std::cell::{Cell, RefCell};

use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::paper::Log;
use kintsugi_plan::{
    Axis, Batch, Block, COPY_PIECE, Computation, Coordinate, MatrixOp, Op, OpKind, Pipeline, Plan,
    ScheduleKind, Sharding, Transfer, Unit,
};
use kintsugi_rank::{NoTokens, Rank, paper_groups};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{AddressSpace, Arena, Backend, Block as MemoryBlock, Category, Device, Memory, Usage};
use rustc_hash::FxHashMap;

use crate::footprint::has_own_memory;
use crate::framework_tensors::{Beside, FrameworkTensors};

/// The memory effect of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpMemory {
    /// Temporary increase in bytes, at the worst moment.
    pub rise: i64,
    /// Permanent change in bytes.
    pub change: i64,
    /// How much of the rise and of the change is activations.
    pub activations: ActivationShare,
}

/// The activations in the memory effect of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ActivationShare {
    pub rise: i64,
    pub change: i64,
}

impl OpMemory {
    /// With what a framework keeps and needs beside the op.
    fn with(self, Beside { kept, activations, temporary }: Beside) -> Self {
        let allocated = kept.max(0);
        let share = |bytes: i64| if activations { bytes } else { 0 };
        OpMemory {
            rise: self.rise + allocated + temporary as i64,
            change: self.change + kept,
            activations: ActivationShare {
                rise: self.activations.rise + share(allocated),
                change: self.activations.change + share(kept),
            },
        }
    }

    const NONE: OpMemory =
        OpMemory { rise: 0, change: 0, activations: ActivationShare { rise: 0, change: 0 } };
}

/// Ops of one kind have the same memory effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum MemoryKind {
    /// A kind of op.
    Op(OpKind),
    /// The load of a stage that is the first, the last, both or neither: each end loads its own tokens.
    Load { first: bool, last: bool },
    /// An op of the last layer of a stage that needs starts.
    LastUseOfStarts(OpKind),
    /// The allocation of a whole gradient, for a unit with sharded gradients.
    Gradient(Unit),
}

/// Determines the kinds of a stage's ops.
pub(super) struct Kinds {
    first: bool,
    last: bool,
    sharding: Sharding,
    /// The layers whose backward and whose evaluation are the last that need starts, if any layer is masked.
    last_uses: Option<(Option<Block>, Block)>,
}

impl Kinds {
    pub(super) fn new(plan: &Plan, stage: usize) -> Self {
        Kinds {
            first: stage == 0,
            last: stage + 1 == plan.mesh.pp(),
            sharding: plan.sharding,
            last_uses: plan.loads_starts().then(|| plan.last_layers(stage)),
        }
    }

    /// The kind of an op; `None` if it neither allocates nor frees memory.
    pub(super) fn of(&self, op: Op) -> Option<MemoryKind> {
        let changes_memory = match op {
            Op::Load { .. } => return Some(MemoryKind::Load { first: self.first, last: self.last }),
            Op::Compute { kind: Computation::Backward(_), block, .. }
                if self.last_uses.is_some_and(|(backward, _)| backward == Some(block)) =>
            {
                return Some(MemoryKind::LastUseOfStarts(op.kind()));
            }
            Op::Compute { kind: Computation::Evaluate, block, .. }
                if self.last_uses.is_some_and(|(_, evaluated)| evaluated == block) =>
            {
                return Some(MemoryKind::LastUseOfStarts(op.kind()));
            }
            Op::Compute { .. } | Op::Release { .. } | Op::Discard { .. } => true,
            Op::Matrices { kind, .. } => match kind {
                MatrixOp::Begin | MatrixOp::Orthogonalize | MatrixOp::End => true,
                MatrixOp::Collect | MatrixOp::Apply => false,
            },
            Op::Step(_) => false,
            Op::Start(transfer) => match transfer {
                Transfer::Gather { .. }
                | Transfer::Refresh { .. }
                | Transfer::Receive(_)
                | Transfer::Replicate { .. } => true,
                // Codes have buffers of their own.
                Transfer::Reduce { phase, .. } => phase.codes.is_some(),
                Transfer::Exchange { .. } | Transfer::Send(_) | Transfer::Norm { .. } | Transfer::Share => {
                    false
                }
            },
            Op::Wait(transfer) => match transfer {
                Transfer::Gather { phase, .. } => phase.codes.is_some(),
                Transfer::Reduce { phase, .. } => phase.codes.is_some() || self.sharding.leaves_shard(phase),
                Transfer::Refresh { .. } | Transfer::Send(_) | Transfer::Replicate { .. } => true,
                Transfer::Exchange { .. }
                | Transfer::Receive(_)
                | Transfer::Norm { .. }
                | Transfer::Share => false,
            },
            Op::Feed { .. } | Op::Choose { .. } => unreachable!("a training step has no \"{op}\""),
        };
        changes_memory.then(|| MemoryKind::Op(op.kind()))
    }
}

impl MemoryKind {
    pub(super) fn gradient(unit: Unit) -> Self {
        MemoryKind::Gradient(unit.any_layer())
    }
}

/// Whether the memory of an op depends on the sizes of activations. Otherwise it depends on the sizes of parameters and
/// their shards.
fn follows_activations(kind: MemoryKind) -> bool {
    match kind {
        MemoryKind::Load { .. } | MemoryKind::LastUseOfStarts(_) => true,
        MemoryKind::Gradient(_) => false,
        MemoryKind::Op(kind) => {
            let op = kind.op();
            op.block().is_some() || op.transfer().is_some_and(|transfer| transfer.message().is_some())
        }
    }
}

/// The resident memory of a stage's rank.
pub(super) fn resident(plan: &Plan, stage: usize, device: Device) -> u64 {
    Probe::new(plan, stage, device).gauge.live.get().bytes
}

/// The memory of ops on blocks and of messages.
pub(super) fn block_ops(plan: &Plan, device: Device) -> FxHashMap<MemoryKind, OpMemory> {
    // Gradients that are not sharded are resident, so no backward allocates one.
    let plan = small(plan, plan.sharding.unsharded());
    let mut ops = FxHashMap::default();
    for stage in 0..plan.mesh.pp() {
        let (mut probe, kinds) = (Probe::new(&plan, stage, device), Kinds::new(&plan, stage));
        let mut program = plan.program(stage).ops;
        if plan.run.eval_every > 0 {
            program.extend(plan.evaluation(stage, 1).ops);
        }
        for op in program {
            let memory = probe.run(op);
            let kind = kinds.of(op);
            assert!(kind.is_some() || memory == OpMemory::NONE, "\"{op}\" takes or frees memory");
            if let Some(kind) = kind.filter(|&kind| follows_activations(kind)) {
                insert(&mut ops, kind, memory);
            }
        }
    }
    ops
}

/// The memory of ops on units, and of ops that run once a step.
pub(super) fn unit_ops(plan: &Plan, device: Device) -> FxHashMap<MemoryKind, OpMemory> {
    let mut ops = FxHashMap::default();
    if plan.copies_states() {
        // The small plan may be on one node.
        let both = (2 * COPY_PIECE) as i64;
        for (op, change) in
            Op::start_and_wait(Transfer::Replicate { piece: 0 }).into_iter().zip([both, -both])
        {
            let memory = OpMemory { rise: change.max(0), change, ..OpMemory::NONE };
            insert(&mut ops, MemoryKind::Op(op.kind()), memory);
        }
    }
    let plan = small(plan, plan.sharding);
    for stage in 0..plan.mesh.pp() {
        let (mut probe, kinds) = (Probe::new(&plan, stage, device), Kinds::new(&plan, stage));
        // What the reduction of each unit to its shard has added so far.
        let mut reducing: FxHashMap<Unit, i64> = FxHashMap::default();
        for op in plan.program(stage).ops {
            let memory = probe.run(op);
            let kind = kinds.of(op);
            assert!(kind.is_some() || memory == OpMemory::NONE, "\"{op}\" takes or frees memory");
            if let Some(kind) = kind.filter(|&kind| !follows_activations(kind)) {
                insert(&mut ops, kind, memory);
            }
            if let Some(Transfer::Reduce { unit, .. }) = op.transfer() {
                *reducing.entry(unit).or_default() += memory.change;
            }
            if let Op::Wait(Transfer::Reduce { unit, phase }) = op
                && plan.sharding.leaves_shard(phase)
            {
                // The reduction frees what the backward allocated.
                let gradient = -reducing.remove(&unit).unwrap_or(0);
                let made = OpMemory { rise: gradient, change: gradient, ..OpMemory::NONE };
                insert(&mut ops, MemoryKind::gradient(unit), made);
            }
        }
    }
    ops
}

/// Panics if ops of one kind have different effects, because every peak would be wrong.
fn insert(ops: &mut FxHashMap<MemoryKind, OpMemory>, kind: MemoryKind, memory: OpMemory) {
    let known = *ops.entry(kind).or_insert(memory);
    assert_eq!(known, memory, "{kind:?} does not always do the same");
}

/// The plan with one micro-batch, on up to three stages of two layers, which has ops of every kind.
fn small(plan: &Plan, sharding: Sharding) -> Plan {
    let pp = plan.mesh.pp().min(3);
    let schedule = match plan.pipeline.schedule {
        ScheduleKind::ZeroBubble => ScheduleKind::ZeroBubble,
        ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward | ScheduleKind::Interleaved => {
            ScheduleKind::OneForwardOneBackward
        }
    };
    // Layers with and without a window take as much memory.
    let mut small = plan.clone().with_uniform_window(plan.any_window());
    small.model.layers = 2 * pp;
    small.mesh = plan.mesh.with(Axis::Pipeline, pp);
    small.batch = Batch { global: plan.batch.micro * plan.mesh.dp(), ..plan.batch };
    small.pipeline = Pipeline { schedule, virtual_stages: 1, layers: vec![2; pp], ..plan.pipeline.clone() };
    small.sharding = sharding;
    small
}

struct Probe {
    rank: Rank,
    /// Of the plan's framework, if it has any.
    tensors: Option<FrameworkTensors>,
    gauge: Rc<Gauge>,
}

impl Probe {
    fn new(plan: &Plan, stage: usize, device: Device) -> Self {
        let gauge = Rc::new(Gauge::default());
        let memory: Rc<dyn Memory> = Rc::clone(&gauge) as Rc<dyn Memory>;
        let backend: Rc<dyn Backend> = Rc::new(Paper::over(device, memory));
        let at = Coordinate::of_stage(stage);
        let groups = paper_groups(plan, at, &Rc::new(RefCell::new(Log::default())));
        let tensors = has_own_memory(plan).then(|| FrameworkTensors::new(plan));
        Probe { tensors, rank: Rank::new(Arc::new(plan.clone()), at, backend, groups), gauge }
    }

    fn run(&mut self, op: Op) -> OpMemory {
        let before = self.gauge.live.get();
        self.gauge.highest.set(before);
        self.rank.execute(&op, &mut NoTokens).expect("paper moves nothing that could fail");
        let (highest, after) = (self.gauge.highest.get(), self.gauge.live.get());
        let bytes = |now: LiveBytes| now.bytes as i64 - before.bytes as i64;
        let activations = |now: LiveBytes| now.activations as i64 - before.activations as i64;
        let engine = OpMemory {
            rise: bytes(highest),
            change: bytes(after),
            activations: ActivationShare { rise: activations(highest), change: activations(after) },
        };
        self.tensors.map_or(engine, |tensors| engine.with(tensors.beside(op)))
    }
}

/// A memory that only counts.
#[derive(Debug, Default)]
struct Gauge {
    live: Cell<LiveBytes>,
    highest: Cell<LiveBytes>,
}

/// Bytes at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct LiveBytes {
    bytes: u64,
    activations: u64,
}

impl LiveBytes {
    fn with(self, bytes: u64, category: Category) -> Self {
        let activations = if category == Category::Activations { bytes } else { 0 };
        LiveBytes { bytes: self.bytes + bytes, activations: self.activations + activations }
    }

    fn without(self, block: MemoryBlock) -> Self {
        let activations = if block.category == Category::Activations { block.bytes } else { 0 };
        LiveBytes { bytes: self.bytes - block.bytes, activations: self.activations - activations }
    }
}

impl Memory for Gauge {
    fn address_space(&self) -> AddressSpace {
        AddressSpace::Paper
    }

    fn allocate(&self, bytes: u64, category: Category) -> MemoryBlock {
        let bytes = Arena::rounded(bytes);
        let live = self.live.get().with(bytes, category);
        self.live.set(live);
        if live.bytes > self.highest.get().bytes {
            self.highest.set(live);
        }
        MemoryBlock { address: 0, bytes, category }
    }

    fn release(&self, block: MemoryBlock) {
        self.live.set(self.live.get().without(block));
    }

    fn peak(&self) -> Usage {
        Usage::default()
    }

    fn reserved(&self) -> u64 {
        self.highest.get().bytes
    }
}
