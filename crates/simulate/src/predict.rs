//! Predicted memory and traffic: one rank of every stage plays its program on paper.
//!
//! All ranks of a stage do the same, so one of them stands for all. In the steady part of a schedule the same ops
//! come again and again, so a short play can stand for a long one: see [`Play::Short`].

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use kintsugi_comm::Traffic;
use kintsugi_comm::paper::{Entry, Log};
use kintsugi_plan::{Coordinate, Op, Plan, ScheduleKind};
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
    /// Only until the steady part repeats itself: until what is live lies at the same addresses, in the same order
    /// of age, as some periods before. More periods would then change nothing, and each adds the same traffic.
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

/// The moment before a period of the steady part.
struct Moment {
    picture: u64,
    transfers: Counts,
}

/// Micro-batches after which the steady part of a schedule does the same again.
fn period(plan: &Plan) -> usize {
    if plan.pipeline.schedule == ScheduleKind::Interleaved { plan.mesh.pp } else { 1 }
}

fn short_play(plan: &Plan, stage: usize, device: Device) -> Stage {
    let (micro_batches, period) = (plan.micro_batches(), period(plan));
    // GPipe keeps every micro-batch, so nothing repeats.
    let mut short = match plan.pipeline.schedule {
        ScheduleKind::GPipe => micro_batches,
        _ => (plan.chunks() + 2 * plan.mesh.pp).next_multiple_of(period),
    };
    while short < micro_batches {
        let (base, moments) = play_stage(&with_micro_batches(plan, short), stage, device);
        match cycle(&moments) {
            Some(periods) => {
                let (missing, cycle) = (micro_batches - short, periods * period);
                if missing.is_multiple_of(cycle) {
                    let transfers = extrapolate(&base.transfers, &moments, (missing / period) as u64);
                    return Stage { memory: base.memory, transfers };
                }
                short += missing % cycle;
            }
            None => short *= 2,
        }
    }
    play_stage(plan, stage, device).0
}

/// After how many periods the last moment's picture came again, if it did.
fn cycle(moments: &[Moment]) -> Option<usize> {
    let (last, before) = moments.split_last()?;
    before.iter().rev().position(|moment| moment.picture == last.picture).map(|i| i + 1)
}

/// Adds the transfers of `periods` more periods, each like the last one.
fn extrapolate(played: &Counts, moments: &[Moment], periods: u64) -> Counts {
    let [.., before, after] = moments else { unreachable!("a cycle has two ends") };
    let count = |of: &Counts, entry: Entry| of.iter().find(|(e, _)| *e == entry).map_or(0, |&(_, n)| n);
    let one = |entry| count(&after.transfers, entry) - count(&before.transfers, entry);
    played.iter().map(|&(entry, n)| (entry, n + periods * one(entry))).collect()
}

fn with_micro_batches(plan: &Plan, micro_batches: usize) -> Plan {
    let mut plan = plan.clone();
    plan.batch.global = micro_batches * plan.batch.micro * plan.mesh.dp;
    plan
}

fn play_stage(plan: &Plan, stage: usize, device: Device) -> (Stage, Vec<Moment>) {
    let paper = Rc::new(Paper::new(device));
    let log = Rc::new(RefCell::new(Log::default()));
    let at = Coordinate { pp: stage, dp: 0, tp: 0 };
    let groups = paper_groups(plan, at, &log);
    let backend: Rc<dyn Backend> = Rc::clone(&paper) as Rc<dyn Backend>;
    let mut rank = Rank::new(Arc::new(plan.clone()), at, backend, groups);
    let mut blank = Blank(vec![0; plan.rows()]);
    let counts = || log.borrow().iter().collect::<Counts>();
    let mut moments = Vec::new();
    let first = plan.stage_blocks(stage)[0];
    let program = plan.program(stage);
    // The steady part: between the first backward and the last forward.
    let mut steady = false;
    rank.run(&program, &mut blank, |_, op| match *op {
        Op::Backward { .. } => steady = true,
        Op::Forward { block, micro } if steady && block == first && micro % period(plan) == 0 => {
            moments.push(Moment { picture: paper.picture(), transfers: counts() });
        }
        _ => {}
    });
    let transfers = counts();
    if plan.run.eval_every > 0 {
        rank.run(&plan.evaluation(stage, plan.micro_batches()), &mut blank, |_, _| {});
    }
    let memory = paper.memory();
    (Stage { memory: RankMemory::new(memory.peak(), memory.reserved()), transfers }, moments)
}

/// Micro-batches with nothing in them.
struct Blank(Vec<u32>);

impl Source for Blank {
    fn batch(&mut self, _micro: usize) -> (&[u32], &[u32]) {
        (&self.0, &self.0)
    }
}
