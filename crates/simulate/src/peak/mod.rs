//! The largest peak of a plan's ranks in microseconds, for a search over many plans of one model and batch.
//!
//! A rank runs each kind of op once on paper, which shows how much memory the op adds and how much it needs temporarily
//! (`trace`). A newly created rank shows the resident memory. A program is compiled once into the kinds of its ops, and the
//! peak of a plan is one pass over them with its own sizes.

mod trace;

use std::sync::Arc;

use kintsugi_plan::{Block, Computation, Op, Plan, Program, ScheduleKind, Transfer, Unit};
use kintsugi_tensor::Device;
use rustc_hash::FxHashMap;

use crate::footprint::{Addition, Peak, has_own_memory, layers_in_flight, stage_parameters};
use crate::graph::short_step;
use crate::keys::{BlockMemoryKey, FullestKey, ProgramKey, ResidentKey, UnitMemoryKey};
use crate::memo::Memo;
use crate::predict::{Coverage, predict};
use trace::{Kinds, MemoryKind, OpMemory, block_ops, resident, unit_ops};

/// Exact peaks of plans that differ only in their strategy.
pub struct PeakMemory {
    device: Device,
    blocks: Memo<BlockMemoryKey, Arc<FxHashMap<MemoryKind, OpMemory>>>,
    units: Memo<UnitMemoryKey, Arc<FxHashMap<MemoryKind, OpMemory>>>,
    resident: Memo<ResidentKey, u64>,
    parameters: Memo<ResidentKey, usize>,
    stages: Memo<FullestKey, Arc<Vec<usize>>>,
    programs: Memo<ProgramKey, Arc<Vec<MemoryProgram>>>,
}

impl PeakMemory {
    /// Peaks on `device`.
    pub fn new(device: Device) -> Self {
        PeakMemory {
            device,
            blocks: Memo::default(),
            units: Memo::default(),
            resident: Memo::default(),
            parameters: Memo::default(),
            stages: Memo::default(),
            programs: Memo::default(),
        }
    }

    /// Resident bytes of the fullest rank: a cheap lower bound of its peak.
    pub fn resident(&self, plan: &Plan) -> u64 {
        self.stages(plan).iter().map(|&stage| self.resident_on(plan, stage)).max().unwrap_or(0)
    }

    /// The peak bytes of the fullest rank: the largest `total` of a full prediction, or what the plan's framework
    /// reserves, which with a zero-bubble schedule may be somewhat more.
    pub fn of(&self, plan: &Plan) -> u64 {
        if !plan.frozen.is_empty() {
            // Its layers are not alike, so no part of it stands for others.
            let stages = predict(plan, self.device, Coverage::quick(plan)).under_framework(plan).stages;
            return stages
                .iter()
                .map(|memory| if has_own_memory(plan) { memory.reserved } else { memory.total })
                .max()
                .unwrap_or(0);
        }
        let blocks = self.blocks.get(BlockMemoryKey::of(plan), || Arc::new(block_ops(plan, self.device)));
        let units = self.units.get(UnitMemoryKey::of(plan), || Arc::new(unit_ops(plan, self.device)));
        let program_key = ProgramKey::short(plan, plan.micro_batches()).for_memory();
        let programs = self.programs.get(program_key, || {
            Arc::new(self.stages(plan).iter().map(|&stage| MemoryProgram::new(plan, stage)).collect())
        });
        let of_stage = |program: &MemoryProgram| {
            let step = program.peak(plan.micro_batches(), &blocks, &units);
            let total = self.resident_on(plan, program.stage) + step.bytes as u64;
            if has_own_memory(plan) { self.under_framework(plan, program, total, step) } else { total }
        };
        programs.iter().map(of_stage).max().unwrap_or(0)
    }

    fn under_framework(&self, plan: &Plan, program: &MemoryProgram, total: u64, step: StepPeak) -> u64 {
        let stage = program.stage;
        let peak = Peak {
            total,
            // No activation is resident.
            activations: step.activations as u64,
            parameters: self.parameters.get(ResidentKey::of(plan, stage), || stage_parameters(plan, stage)),
            layers_in_flight: program.layers_in_flight(plan),
        };
        Addition::new(plan, &peak).reserved(plan, &peak)
    }

    fn resident_on(&self, plan: &Plan, stage: usize) -> u64 {
        self.resident.get(ResidentKey::of(plan, stage), || resident(plan, stage, self.device))
    }

    /// The stages that may have the fullest rank.
    fn stages(&self, plan: &Plan) -> Arc<Vec<usize>> {
        self.stages.get(FullestKey::of(plan), || Arc::new(ends_of_runs(plan)))
    }
}

/// The first stage of every run of stages with the same blocks, because later stages of a run have fewer micro-batches
/// in flight. With a split backward, later stages defer more weight parts, so memory grows or shrinks evenly along a
/// run; then the last stage of a run is included too. A stage with all micro-batches in flight has run all of them forward
/// before it receives a gradient. The first stage without that holds messages in both directions, and is included too.
fn ends_of_runs(plan: &Plan) -> Vec<usize> {
    let chunk = |chunk: usize| -> Vec<bool> {
        plan.chunk_blocks(chunk).into_iter().map(|block| matches!(block, Block::Layer(_))).collect()
    };
    let shape = |stage: usize| -> Vec<Vec<bool>> {
        (stage..plan.chunks()).step_by(plan.mesh.pp()).map(chunk).collect()
    };
    let shapes: Vec<Vec<Vec<bool>>> = (0..plan.mesh.pp()).map(shape).collect();
    let differs = |a: Option<usize>, b: usize| a.and_then(|a| shapes.get(a)) != shapes.get(b);
    let is_split = plan.pipeline.schedule == ScheduleKind::ZeroBubble;
    let sends_both_ways = (plan.mesh.pp() + 1).checked_sub(plan.micro_batches());
    let end = |&stage: &usize| {
        differs(stage.checked_sub(1), stage)
            || (is_split && differs(Some(stage + 1), stage))
            || sends_both_ways == Some(stage)
    };
    (0..plan.mesh.pp()).filter(end).collect()
}

/// The training step of a stage and the evaluation after it, for any number of micro-batches.
struct MemoryProgram {
    stage: usize,
    /// Micro-batches of the short step that was compiled.
    micro_batches: usize,
    /// The kinds of ops. Events refer to them by number.
    kinds: Vec<MemoryKind>,
    events: Vec<Event>,
    /// Layers in flight of the short step.
    layers_in_flight: usize,
}

/// The bytes that a step takes beyond the resident memory, at its highest moment.
#[derive(Clone, Copy, Default)]
struct StepPeak {
    bytes: i64,
    activations: i64,
}

/// An event that changes memory.
#[derive(Clone, Copy)]
enum Event {
    /// An op of a kind runs.
    Run(u16),
    /// GPipe keeps every micro-batch. The micro-batches that the short step leaves out are added when half of its own
    /// have run forward: the memory added since `MiddleBegins`, once for each.
    MiddleBegins,
    MiddleEnds,
    /// The micro-batches that were left out have run backward too.
    MiddleFreed,
}

impl MemoryProgram {
    fn new(plan: &Plan, stage: usize) -> Self {
        let micro_batches = short_step(plan, plan.micro_batches());
        let short = plan.with_micro_batches(micro_batches);
        let mut compiler = Compiler::new(&short, stage);
        compiler.step(&short.program(stage));
        if plan.run.eval_every > 0 {
            compiler.ops(&short.evaluation(stage, micro_batches));
        }
        if plan.copies_states() {
            // Both neighbours have a first piece, and no piece is larger.
            for op in Op::start_and_wait(Transfer::Replicate { piece: 0 }) {
                compiler.op(op);
            }
        }
        let layers_in_flight = layers_in_flight(&short, stage);
        let (kinds, events) = (compiler.kinds, compiler.events);
        MemoryProgram { stage, micro_batches, kinds, events, layers_in_flight }
    }

    /// The largest number of the stage's layers that have run forward but not yet backward, counted per micro-batch.
    /// GPipe keeps every micro-batch.
    fn layers_in_flight(&self, plan: &Plan) -> usize {
        match plan.pipeline.schedule {
            ScheduleKind::GPipe => self.layers_in_flight / self.micro_batches * plan.micro_batches(),
            _ => self.layers_in_flight,
        }
    }

    /// The highest moment of a step.
    fn peak(
        &self,
        micro_batches: usize,
        blocks: &FxHashMap<MemoryKind, OpMemory>,
        units: &FxHashMap<MemoryKind, OpMemory>,
    ) -> StepPeak {
        let of_kind = |kind: &MemoryKind| {
            let known = units.get(kind).or_else(|| blocks.get(kind));
            *known.unwrap_or_else(|| panic!("no trace has {kind:?}"))
        };
        let kinds: Vec<OpMemory> = self.kinds.iter().map(of_kind).collect();
        let left_out = micro_batches as i64 - self.micro_batches as i64;
        let (mut live, mut peak) = (StepPeak::default(), StepPeak::default());
        let (mut before, mut each) = (StepPeak::default(), StepPeak::default());
        for &event in &self.events {
            match event {
                Event::Run(kind) => {
                    let OpMemory { rise, change, activations } = kinds[usize::from(kind)];
                    if live.bytes + rise > peak.bytes {
                        peak = live.plus(1, rise, activations.rise);
                    }
                    live = live.plus(1, change, activations.change);
                }
                Event::MiddleBegins => before = live,
                Event::MiddleEnds => {
                    each = live.plus(-1, before.bytes, before.activations);
                    live = live.plus(left_out, each.bytes, each.activations);
                }
                Event::MiddleFreed => live = live.plus(-left_out, each.bytes, each.activations),
            }
        }
        debug_assert_eq!(live.bytes, 0, "something is left over");
        peak
    }
}

impl StepPeak {
    fn plus(self, times: i64, bytes: i64, activations: i64) -> Self {
        StepPeak { bytes: self.bytes + times * bytes, activations: self.activations + times * activations }
    }
}

struct Compiler<'a> {
    plan: &'a Plan,
    stage_kinds: Kinds,
    kinds: Vec<MemoryKind>,
    numbers: FxHashMap<MemoryKind, u16>,
    events: Vec<Event>,
    /// The units whose whole gradient exists, if gradients are sharded.
    gradients: Vec<Unit>,
}

impl<'a> Compiler<'a> {
    fn new(plan: &'a Plan, stage: usize) -> Self {
        Compiler {
            plan,
            stage_kinds: Kinds::new(plan, stage),
            kinds: Vec::new(),
            numbers: FxHashMap::default(),
            events: Vec::new(),
            gradients: Vec::new(),
        }
    }

    /// Compiles a training step. With GPipe it marks the middle micro-batches, which represent those left out.
    fn step(&mut self, program: &Program) {
        if self.plan.pipeline.schedule != ScheduleKind::GPipe {
            return self.ops(program);
        }
        let half = self.plan.micro_batches() / 2;
        let first = |wanted: usize, of: fn(Computation) -> bool| {
            let found = |op: &Op| op.computation().is_some_and(of) && op.micro() == Some(wanted);
            program.ops.iter().position(found)
        };
        let forward = |micro| first(micro, |kind| kind == Computation::Forward);
        let backward = first(half, |kind| matches!(kind, Computation::Backward(_) | Computation::Recompute));
        let marks = [
            (half.checked_sub(1).and_then(forward), Event::MiddleBegins),
            (forward(half).filter(|_| half > 0), Event::MiddleEnds),
            (backward.filter(|_| half > 0), Event::MiddleFreed),
        ];
        for (index, &op) in program.ops.iter().enumerate() {
            self.events.extend(marks.iter().filter(|(at, _)| *at == Some(index)).map(|&(_, event)| event));
            self.op(op);
        }
    }

    fn ops(&mut self, program: &Program) {
        program.ops.iter().for_each(|&op| self.op(op));
    }

    fn op(&mut self, op: Op) {
        // The first backward that writes a unit's gradient allocates it.
        if let Op::Compute { kind: Computation::Backward(_), block, .. } = op
            && self.plan.sharding.gradients > 1
        {
            for unit in self.plan.block_units(block) {
                if !self.gradients.contains(&unit) {
                    self.gradients.push(unit);
                    self.run(MemoryKind::gradient(unit));
                }
            }
        }
        if let Op::Start(Transfer::Reduce { unit, phase }) = op
            && self.plan.sharding.begins_reduction(phase)
        {
            self.gradients.retain(|&other| other != unit);
        }
        if let Some(kind) = self.stage_kinds.of(op) {
            self.run(kind);
        }
    }

    fn run(&mut self, kind: MemoryKind) {
        let next = self.kinds.len() as u16;
        let number = *self.numbers.entry(kind).or_insert(next);
        if number == next {
            self.kinds.push(kind);
        }
        self.events.push(Event::Run(number));
    }
}
