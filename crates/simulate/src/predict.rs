//! Predicted memory and traffic: one rank of every stage runs its program on paper.
//!
//! All ranks of a stage do the same, so one of them stands for all. In the steady state of a schedule every period repeats
//! the one before, so a short step can stand for a long one: see [`Coverage::ShortStep`].

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::Traffic;
use kintsugi_comm::paper::{Entry, Log};
use kintsugi_plan::{Computation, Coordinate, Op, Plan, ScheduleKind};
use kintsugi_rank::{NoTokens, Rank, RankMemory, ReplicationMetrics, StepMetrics, paper_groups};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Device};
use rayon::prelude::*;

use crate::cost::replication_seconds;
use crate::framework_tensors::Allocations;
use crate::graph::short_step;
use crate::traffic;
use crate::transport::transport_bytes;

/// How much of the step is run on paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// Every micro-batch.
    WholeStep,
    /// Enough micro-batches to fill the pipeline, and a few more periods of the steady state. Every further period
    /// would hold and send the same bytes, so peak and traffic are those of the whole step. Only `reserved` may differ,
    /// because the gaps between buffers depend on all earlier allocations.
    ShortStep,
}

impl Coverage {
    /// The whole step if that takes a fraction of a second, else the short one.
    pub fn quick(plan: &Plan) -> Coverage {
        const BLOCKS: usize = 100_000;
        let blocks = plan.micro_batches() * (plan.model.layers + 2);
        if blocks <= BLOCKS { Coverage::WholeStep } else { Coverage::ShortStep }
    }
}

/// The prediction of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Memory of a rank of each stage.
    pub stages: Vec<RankMemory>,
    /// Bytes sent in one step over all ranks.
    pub traffic: Traffic,
    /// The copying of states between two steps, if the plan copies them.
    pub replication: Option<ReplicationMetrics>,
    ranks_per_stage: usize,
    pub(crate) device: Device,
    pub(crate) coverage: Coverage,
}

impl Prediction {
    /// The prediction in the form of measurements.
    pub fn figures(&self) -> StepMetrics {
        let each = |memory| std::iter::repeat_n(memory, self.ranks_per_stage);
        let figures = StepMetrics::new(self.stages.iter().copied().flat_map(each).collect(), &self.traffic);
        StepMetrics { replication: self.replication.clone(), ..figures }
    }
}

/// Predicts the traffic of one step, and the peak memory of a step and of what runs between two: evaluations, and the copying of states.
pub fn predict(plan: &Plan, device: Device, coverage: Coverage) -> Prediction {
    let stages = run_stages(plan, device, coverage, Tensors::Engine);
    let transfers: Vec<&Counts> = stages.iter().map(|stage| &stage.transfers).collect();
    let copies: Vec<&Counts> = stages.iter().map(|stage| &stage.copies).collect();
    Prediction {
        traffic: traffic::over_all_ranks(plan, &transfers),
        replication: plan.copies_states().then(|| {
            let traffic = traffic::over_all_ranks(plan, &copies);
            ReplicationMetrics::new(&traffic, plan.copied_bytes_of_node(), Some(replication_seconds(plan)))
        }),
        stages: stages
            .iter()
            .zip(0..)
            .map(|(of, stage)| of.memory.with_transport(transport_bytes(plan, stage)))
            .collect(),
        ranks_per_stage: plan.mesh.ranks_per_stage(),
        device,
        coverage,
    }
}

/// The memory of a rank of each stage, with the tensors that the plan's framework holds for some ops.
pub(crate) fn framework_peaks(plan: &Plan, device: Device, coverage: Coverage) -> Vec<RankMemory> {
    let stages = run_stages(plan, device, coverage, Tensors::Framework);
    let of_stage = |(stage, ran): (usize, &Stage)| ran.memory.with_transport(transport_bytes(plan, stage));
    stages.iter().enumerate().map(of_stage).collect()
}

/// Whose tensors are on paper.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tensors {
    /// This engine's.
    Engine,
    /// Also those of the plan's framework.
    Framework,
}

fn run_stages(plan: &Plan, device: Device, coverage: Coverage, tensors: Tensors) -> Vec<Stage> {
    let run = |stage| match coverage {
        Coverage::WholeStep => run_stage(plan, stage, device, tensors).0,
        Coverage::ShortStep => run_short_step(plan, stage, device, tensors),
    };
    (0..plan.mesh.pp()).into_par_iter().map(run).collect()
}

/// How often a rank starts each kind of transfer in one step.
pub(crate) type Counts = Vec<(Entry, u64)>;

struct Stage {
    memory: RankMemory,
    transfers: Counts,
    /// The transfers of the copying of states.
    copies: Counts,
}

fn run_short_step(plan: &Plan, stage: usize, device: Device, tensors: Tensors) -> Stage {
    let (micro_batches, period) = (plan.micro_batches(), plan.period());
    let short = short_step(plan, micro_batches);
    // GPipe has no steady state: every micro-batch is kept to the end.
    if plan.pipeline.schedule == ScheduleKind::GPipe || micro_batches <= short {
        return run_stage(plan, stage, device, tensors).0;
    }
    let in_short = short + (micro_batches - short) % period;
    let (short, snapshots) = run_stage(&plan.with_micro_batches(in_short), stage, device, tensors);
    let periods = ((micro_batches - in_short) / period) as u64;
    Stage { transfers: extrapolate(&short.transfers, &snapshots, periods), ..short }
}

/// Adds the transfers of `periods` more periods, each like the one between the last two snapshots.
fn extrapolate(short: &Counts, snapshots: &[Counts], periods: u64) -> Counts {
    let [.., before, after] = snapshots else { unreachable!("a short step has several periods") };
    let count = |of: &Counts, entry: Entry| of.iter().find(|(e, _)| *e == entry).map_or(0, |&(_, n)| n);
    let one = |entry| count(after, entry) - count(before, entry);
    short.iter().map(|&(entry, n)| (entry, n + periods * one(entry))).collect()
}

/// Runs a stage. Also returns the transfers so far at the start of every period of the steady state.
fn run_stage(plan: &Plan, stage: usize, device: Device, tensors: Tensors) -> (Stage, Vec<Counts>) {
    let paper = Rc::new(Paper::new(device));
    let log = Rc::new(RefCell::new(Log::default()));
    let at = Coordinate::of_stage(stage);
    let groups = paper_groups(plan, at, &log);
    let backend: Rc<dyn Backend> = Rc::clone(&paper) as Rc<dyn Backend>;
    let mut rank = Rank::new(Arc::new(plan.clone()), at, backend, groups);
    let counts = || log.borrow().iter().collect::<Counts>();
    let mut snapshots = Vec::new();
    let mut beside = (tensors == Tensors::Framework).then(|| Allocations::new(plan, paper.memory()));
    let mut begin = |op: Op| {
        if let Some(beside) = &mut beside {
            beside.begin(op);
        }
    };
    let first = plan.stage_blocks(stage)[0];
    let program = plan.program(stage);
    // The steady state: between the first backward and the last forward. Without a backward every micro-batch is like the first.
    let is_backward = |op: &Op| matches!(op.computation(), Some(Computation::Backward(_)));
    let mut steady = !program.ops.iter().any(is_backward);
    rank.run(&program, &mut NoTokens, |_, op| {
        begin(*op);
        steady |= is_backward(op);
        if let Op::Compute { kind: Computation::Forward | Computation::Evaluate, block, micro } = *op
            && steady
            && block == first
            && micro % plan.period() == 0
        {
            snapshots.push(counts());
        }
    })
    .expect("paper moves nothing that could fail");
    let transfers = counts();
    if plan.run.eval_every > 0 {
        rank.run(&plan.evaluation(stage, plan.micro_batches()), &mut NoTokens, |_, op| begin(*op))
            .expect("paper moves nothing that could fail");
    }
    drop(log.borrow_mut().take());
    if plan.copies_states() {
        rank.run(&plan.replication(stage), &mut NoTokens, |_, op| begin(*op))
            .expect("paper moves nothing that could fail");
    }
    let memory = paper.memory();
    let memory = RankMemory::new(memory.peak(), memory.reserved());
    (Stage { memory, transfers, copies: counts() }, snapshots)
}
