//! A program as the kinds of its ops, which decide its memory together with the sizes.

use kintsugi_plan::{Computation, Op, Plan, Program, ScheduleKind, Transfer, Unit};
use rustc_hash::FxHashMap;

use super::trace::{Kinds, MemoryKind, OpMemory};
use crate::footprint::layers_in_flight;
use crate::structure::short_step;

/// The training step of a stage and the evaluation after it, for any number of micro-batches.
pub(super) struct MemoryProgram {
    pub stage: usize,
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
pub(super) struct StepPeak {
    pub bytes: i64,
    pub activations: i64,
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
    pub(super) fn new(plan: &Plan, stage: usize) -> Self {
        let micro_batches = short_step(plan, plan.micro_batches());
        let short = plan.with_micro_batches(micro_batches);
        let mut compiler = Compiler::new(&short, stage);
        compiler.step(&short.program(stage));
        if plan.run.eval_every > 0 {
            compiler.ops(&short.evaluation(stage, micro_batches));
        }
        let layers_in_flight = layers_in_flight(&short, stage);
        let (kinds, events) = (compiler.kinds, compiler.events);
        MemoryProgram { stage, micro_batches, kinds, events, layers_in_flight }
    }

    /// The largest number of the stage's layers that have run forward but not yet backward, counted per micro-batch.
    /// GPipe keeps every micro-batch.
    pub(super) fn layers_in_flight(&self, plan: &Plan) -> usize {
        match plan.pipeline.schedule {
            ScheduleKind::GPipe => self.layers_in_flight / self.micro_batches * plan.micro_batches(),
            _ => self.layers_in_flight,
        }
    }

    /// The highest moment of a step.
    pub(super) fn peak(
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
