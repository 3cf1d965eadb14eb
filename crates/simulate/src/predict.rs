//! Predicted memory and traffic: one rank of every stage plays its program on paper.
//!
//! All ranks of a stage do the same, so one of them stands for all. In the steady part of a schedule every
//! micro-batch looks like the one before, so a short play can stand for a long one: see [`Play::Short`].

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::Traffic;
use kintsugi_comm::paper::{Entry, Log};
use kintsugi_plan::{Coordinate, Plan, ScheduleKind};
use kintsugi_rank::{Figures, Rank, RankMemory, Source, paper_groups};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Device};
use rayon::prelude::*;

use crate::traffic;

/// How much of the step is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Play {
    /// Every micro-batch.
    Full,
    /// Enough micro-batches to fill and empty the pipeline, and one period more. If that period added nothing to
    /// the memory, more of them would not either; what it added to the traffic, every further one adds too.
    Short,
}

/// What a step will take.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Memory of a rank of each stage.
    pub stages: Vec<RankMemory>,
    /// Bytes sent in one step over all ranks.
    pub traffic: Traffic,
    ranks_per_stage: usize,
}

impl Prediction {
    /// The prediction in the shape that measurements have.
    pub fn figures(&self) -> Figures {
        let each = |memory| std::iter::repeat_n(memory, self.ranks_per_stage);
        Figures::new(self.stages.iter().copied().flat_map(each).collect(), &self.traffic)
    }
}

/// Predicts memory and traffic of one step, and of the evaluations between steps.
pub fn predict(plan: &Plan, device: Device, play: Play) -> Prediction {
    let stages: Vec<Stage> =
        (0..plan.mesh.pp).into_par_iter().map(|stage| predict_stage(plan, stage, device, play)).collect();
    let logs: Vec<&Counts> = stages.iter().map(|stage| &stage.transfers).collect();
    Prediction {
        traffic: traffic::over_all_ranks(plan, &logs),
        stages: stages.iter().map(|stage| stage.memory).collect(),
        ranks_per_stage: plan.mesh.dp * plan.mesh.tp,
    }
}

/// How often a rank starts each kind of transfer in one step.
pub(crate) type Counts = Vec<(Entry, u64)>;

#[derive(Clone, PartialEq)]
struct Stage {
    memory: RankMemory,
    transfers: Counts,
}

fn predict_stage(plan: &Plan, stage: usize, device: Device, play: Play) -> Stage {
    let micro_batches = plan.micro_batches();
    // Interleaving deals micro-batches out in groups of pp.
    let period = if plan.pipeline.schedule == ScheduleKind::Interleaved { plan.mesh.pp } else { 1 };
    let fill = plan.chunks() + plan.mesh.pp;
    let short = fill + (micro_batches.saturating_sub(fill)) % period;
    // GPipe keeps every micro-batch, so nothing can be left out.
    let steady = plan.pipeline.schedule != ScheduleKind::GPipe && micro_batches > short + period;
    if play == Play::Short && steady {
        let base = play_stage(&with_micro_batches(plan, short), stage, device);
        let next = play_stage(&with_micro_batches(plan, short + period), stage, device);
        if base.memory == next.memory {
            let periods = ((micro_batches - short) / period) as u64;
            return Stage {
                memory: base.memory,
                transfers: extrapolate(&base.transfers, &next.transfers, periods),
            };
        }
    }
    play_stage(plan, stage, device)
}

fn with_micro_batches(plan: &Plan, micro_batches: usize) -> Plan {
    let mut plan = plan.clone();
    plan.batch.global = micro_batches * plan.batch.micro * plan.mesh.dp;
    plan
}

/// `base + periods · (next − base)`, entry by entry.
fn extrapolate(base: &Counts, next: &Counts, periods: u64) -> Counts {
    let count = |of: &Counts, entry: Entry| of.iter().find(|(e, _)| *e == entry).map_or(0, |&(_, n)| n);
    next.iter()
        .map(|&(entry, after)| {
            let before = count(base, entry);
            (entry, before + periods * (after - before))
        })
        .collect()
}

fn play_stage(plan: &Plan, stage: usize, device: Device) -> Stage {
    let paper = Rc::new(Paper::new(device));
    let log = Rc::new(RefCell::new(Log::default()));
    let at = Coordinate { pp: stage, dp: 0, tp: 0 };
    let groups = paper_groups(plan, at, &log);
    let backend: Rc<dyn Backend> = Rc::clone(&paper) as Rc<dyn Backend>;
    let mut rank = Rank::new(Arc::new(plan.clone()), at, backend, groups);
    let mut blank = Blank(vec![0; plan.rows()]);
    rank.run(&plan.program(stage), &mut blank, |_, _| {});
    let transfers = log.borrow().iter().collect();
    if plan.run.eval_every > 0 {
        rank.run(&plan.evaluation(stage, plan.micro_batches()), &mut blank, |_, _| {});
    }
    let memory = paper.memory();
    Stage { memory: RankMemory::new(memory.peak(), memory.reserved()), transfers }
}

/// Micro-batches with nothing in them.
struct Blank(Vec<u32>);

impl Source for Blank {
    fn batch(&mut self, _micro: usize) -> (&[u32], &[u32]) {
        (&self.0, &self.0)
    }
}
