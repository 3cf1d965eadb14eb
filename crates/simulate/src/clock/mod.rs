//! How long a step takes, in microseconds: for a search over many plans of one model and one batch.
//!
//! The play is that of `time`, to the picosecond. It is quicker in three ways: what ops cost is put together from
//! parts that many plans share (`table`), programs are made flat once for all plans that run the same ones (`code`,
//! `loops`), and what repeats is played (`play`) only as long as it cannot be told beforehand (`steady`).

mod code;
mod loops;
mod play;
mod stage;
mod steady;
mod table;

use kintsugi_plan::{Plan, Recompute, ScheduleKind, When};

use crate::Timing;
use crate::time::{DeviceModel, Sharing, timing};
use code::Extent;
use loops::{Codes, enough};
use play::play;
use table::Tables;

/// Times plans that differ in their strategy only.
pub struct Clock<'a> {
    tables: Tables<'a>,
}

/// The programs of plans that run the same ones but for how often they do what they repeat.
pub struct Score {
    /// How many micro-batches the codes are for.
    micro_batches: usize,
    step: Codes,
    /// The passes alone, where the micro-batches go through the pipeline in portions.
    passes: Option<Codes>,
}

/// What decides the programs of a plan, for one model and one choice of prefetch and overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoreKey {
    pp: usize,
    schedule: ScheduleKind,
    virtual_stages: usize,
    micro_batches: usize,
    several: (bool, bool),
    sequence_parallel: bool,
    recompute: bool,
    sharded: (bool, bool, bool),
    when: (Option<When>, When),
}

impl<'a> Clock<'a> {
    /// A clock for plans on a device.
    pub fn new(model: &'a DeviceModel) -> Self {
        Clock { tables: Tables::new(model) }
    }

    /// How long a step of a plan takes.
    pub fn time(&self, plan: &Plan) -> Timing {
        self.time_with(plan, &Score::of(plan))
    }

    /// The same, with a score that was made for a plan with the same key.
    pub fn time_with(&self, plan: &Plan, score: &Score) -> Timing {
        let table = self.tables.of(plan);
        let (fills, portion) = portions(plan);
        let play = |codes: &Codes, extent: Extent| {
            let more = (portion - score.micro_batches) / plan.period();
            let played =
                if more == 0 || !codes.loops.is_empty() { play(codes, &table, 1 + more) } else { None };
            let whole = || play(&Codes::whole(&plan.with_micro_batches(portion), extent), &table, 1);
            played.or_else(whole).expect("a schedule that ends")
        };
        let step = play(&score.step, Extent::Step);
        // One portion after the other, and only the last is followed by the end of the step.
        let totals = match &score.passes {
            Some(passes) => step.and(play(passes, Extent::Passes), fills as u64 - 1),
            None => step,
        };
        let timing = timing(totals, plan.mesh.pp, table.units.fixed);
        Sharing::of(plan).map_or(timing, |sharing| sharing.crowd(timing, plan.mesh.pp))
    }
}

/// In how many portions the micro-batches go through the pipeline, and how large each is.
fn portions(plan: &Plan) -> (usize, usize) {
    let fills = plan.framework.fills.clamp(1, plan.micro_batches());
    (fills, plan.micro_batches().div_ceil(fills).next_multiple_of(plan.period()))
}

impl ScoreKey {
    /// The key of a plan.
    pub fn of(plan: &Plan) -> Self {
        let (mesh, sharding) = (plan.mesh, &plan.sharding);
        ScoreKey {
            pp: mesh.pp,
            schedule: plan.pipeline.schedule,
            virtual_stages: plan.pipeline.virtual_stages,
            micro_batches: enough(plan, portions(plan).1),
            several: (mesh.tp > 1, mesh.dp > 1),
            sequence_parallel: plan.sequence_parallel,
            recompute: plan.memory.recompute == Recompute::Full,
            sharded: (sharding.weights > 1, sharding.gradients > 1, sharding.states > 1),
            when: ((sharding.weights > 1).then_some(sharding.gather), sharding.reduce),
        }
    }
}

impl Score {
    /// The score of a plan.
    pub fn of(plan: &Plan) -> Self {
        let (fills, portion) = portions(plan);
        let micro_batches = enough(plan, portion);
        let plan = plan.with_micro_batches(micro_batches);
        let codes = |extent| Codes::looped(&plan, extent).unwrap_or_else(|| Codes::whole(&plan, extent));
        let passes = (fills > 1).then(|| codes(Extent::Passes));
        Score { micro_batches, step: codes(Extent::Step), passes }
    }
}
