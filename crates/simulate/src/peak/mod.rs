//! The largest peak of a plan's ranks in microseconds, for a search over many plans of one model and batch.
//!
//! A rank runs each kind of op once on paper, which shows how much memory the op adds and how much it needs temporarily
//! (`trace`). A newly created rank shows the resident memory. A program is compiled once into the kinds of its ops
//! (`program`), and the peak of a plan is one pass over them with its own sizes.

mod program;
mod trace;

use std::sync::Arc;

use kintsugi_plan::{Block, Plan, ScheduleKind};
use kintsugi_tensor::Device;
use rustc_hash::FxHashMap;

use crate::footprint::{Addition, Peak, has_own_memory, stage_parameters};
use crate::keys::{BlockMemoryKey, FullestKey, ProgramKey, ResidentKey, UnitMemoryKey};
use crate::memo::Memo;
use program::{MemoryProgram, StepPeak};
use trace::{MemoryKind, OpMemory, block_ops, resident, unit_ops};

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

/// Whether the backward is split into two parts.
fn is_split(plan: &Plan) -> bool {
    plan.pipeline.schedule == ScheduleKind::ZeroBubble
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
    let sends_both_ways = (plan.mesh.pp() + 1).checked_sub(plan.micro_batches());
    let end = |&stage: &usize| {
        differs(stage.checked_sub(1), stage)
            || (is_split(plan) && differs(Some(stage + 1), stage))
            || sends_both_ways == Some(stage)
    };
    (0..plan.mesh.pp()).filter(end).collect()
}
