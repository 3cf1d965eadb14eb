//! Predicted memory and traffic: one rank of every stage plays its program on paper.
//!
//! All ranks of a stage do the same, so one of them stands for all. In the steady part of a schedule every period
//! does what the one before did, so a short play can stand for a long one: see [`Play::Short`].

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::Traffic;
use kintsugi_comm::paper::{Entry, Log};
use kintsugi_plan::{Coordinate, Op, Plan, ScheduleKind};
use kintsugi_rank::{Rank, RankMemory, StepMetrics, TokenSource, Tokens, paper_groups};
use kintsugi_tensor::paper::Paper;
use kintsugi_tensor::{Backend, Device};
use rayon::prelude::*;

use crate::structure::short_step;
use crate::traffic;

/// How much of the step is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Play {
    /// Every micro-batch.
    Full,
    /// Enough micro-batches to fill the pipeline, and a few more periods of its steady part. Each further period
    /// would hold the same bytes and send the same bytes again, so peak and traffic are those of the full play.
    /// Only `reserved` may differ: the gaps between buffers depend on all that came before.
    Short,
}

impl Play {
    /// The fullest play that takes a fraction of a second.
    pub fn quick(plan: &Plan) -> Play {
        const BLOCKS: usize = 100_000;
        let blocks = plan.micro_batches() * (plan.model.layers + 2);
        if blocks <= BLOCKS { Play::Full } else { Play::Short }
    }
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
    pub fn figures(&self) -> StepMetrics {
        let each = |memory| std::iter::repeat_n(memory, self.ranks_per_stage);
        StepMetrics::new(self.stages.iter().copied().flat_map(each).collect(), &self.traffic)
    }
}

/// Predicts memory and traffic of one step, and of the evaluations between steps.
pub fn predict(plan: &Plan, device: Device, play: Play) -> Prediction {
    let stages: Vec<Stage> = (0..plan.mesh.pp)
        .into_par_iter()
        .map(|stage| match play {
            Play::Full => play_stage(plan, stage, device).0,
            Play::Short => short_play(plan, stage, device),
        })
        .collect();
    let transfers: Vec<&Counts> = stages.iter().map(|stage| &stage.transfers).collect();
    Prediction {
        traffic: traffic::over_all_ranks(plan, &transfers),
        stages: stages.iter().map(|stage| stage.memory).collect(),
        ranks_per_stage: plan.mesh.dp * plan.mesh.tp,
    }
}

/// How often a rank starts each kind of transfer in one step.
pub(crate) type Counts = Vec<(Entry, u64)>;

struct Stage {
    memory: RankMemory,
    transfers: Counts,
}

fn short_play(plan: &Plan, stage: usize, device: Device) -> Stage {
    let (micro_batches, period) = (plan.micro_batches(), plan.period());
    let short = short_step(plan, micro_batches);
    // GPipe has no steady part: every micro-batch is kept to the end.
    if plan.pipeline.schedule == ScheduleKind::GPipe || micro_batches <= short {
        return play_stage(plan, stage, device).0;
    }
    let short = short + (micro_batches - short) % period;
    let (played, moments) = play_stage(&plan.with_micro_batches(short), stage, device);
    let periods = ((micro_batches - short) / period) as u64;
    Stage { memory: played.memory, transfers: extrapolate(&played.transfers, &moments, periods) }
}

/// Adds the transfers of `periods` more periods, each like the one between the last two moments.
fn extrapolate(played: &Counts, moments: &[Counts], periods: u64) -> Counts {
    let [.., before, after] = moments else { unreachable!("several periods were played") };
    let count = |of: &Counts, entry: Entry| of.iter().find(|(e, _)| *e == entry).map_or(0, |&(_, n)| n);
    let one = |entry| count(after, entry) - count(before, entry);
    played.iter().map(|&(entry, n)| (entry, n + periods * one(entry))).collect()
}

/// Plays a stage; also gives the transfers so far at the start of every period of the steady part.
fn play_stage(plan: &Plan, stage: usize, device: Device) -> (Stage, Vec<Counts>) {
    let paper = Rc::new(Paper::new(device));
    let log = Rc::new(RefCell::new(Log::default()));
    let at = Coordinate { pp: stage, dp: 0, tp: 0 };
    let groups = paper_groups(plan, at, &log);
    let backend: Rc<dyn Backend> = Rc::clone(&paper) as Rc<dyn Backend>;
    let mut rank = Rank::new(Arc::new(plan.clone()), at, backend, groups);
    let counts = || log.borrow().iter().collect::<Counts>();
    let mut moments = Vec::new();
    let first = plan.stage_blocks(stage)[0];
    let program = plan.program(stage);
    // The steady part: between the first backward and the last forward.
    let mut steady = false;
    rank.run(&program, &mut NoTokens, |_, op| match *op {
        Op::Backward { .. } => steady = true,
        Op::Forward { block, micro } if steady && block == first && micro % plan.period() == 0 => {
            moments.push(counts());
        }
        _ => {}
    });
    let transfers = counts();
    if plan.run.eval_every > 0 {
        rank.run(&plan.evaluation(stage, plan.micro_batches()), &mut NoTokens, |_, _| {});
    }
    let memory = paper.memory();
    (Stage { memory: RankMemory::new(memory.peak(), memory.reserved()), transfers }, moments)
}

/// Micro-batches without tokens: paper has no data.
pub(crate) struct NoTokens;

impl TokenSource for NoTokens {
    fn batch(&mut self, _micro: usize) -> Option<Tokens<'_>> {
        None
    }
}
