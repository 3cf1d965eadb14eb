//! How long a step takes, in microseconds: for a search over many plans of one model and one batch.
//!
//! The play is that of `time`, to the picosecond. It is quicker in three ways: what ops cost is put together from
//! parts that many plans share (`table`), programs are made flat once for all plans that run the same ones (`code`),
//! and once the stages do the same in every period, the periods that are left are skipped (`play`).

mod code;
mod play;
mod table;

use std::sync::Arc;

use kintsugi_plan::{Plan, Recompute, ScheduleKind, When};

use crate::Timing;
use crate::kept::Kept;
use crate::time::{DeviceModel, timing};
use code::{CUTS, Codes};
use play::{Played, play};
use table::Tables;

/// Times plans that differ in their strategy only.
pub struct Clock<'a> {
    tables: Tables<'a>,
}

/// The programs of plans that run the same ones, as far as they need to be played.
pub struct Score {
    short: Codes,
    /// Longer ones, by their micro-batches.
    long: Kept<usize, Codes>,
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
        let (stages, fixed) = (plan.mesh.pp, table.units.fixed);
        let micro_batches = plan.micro_batches();
        let extended = |played: usize, result: Played| {
            let periods = ((micro_batches - played) / plan.period()) as u64;
            match (periods, result.period) {
                (0, _) => Some(result.totals),
                (_, period) => period.map(|period| result.totals.and(period, periods)),
            }
        };
        let short = Length::Short.micro_batches(plan);
        let totals = extended(short, play(&score.short, &table)).or_else(|| {
            let long = Length::Long.micro_batches(plan);
            extended(long, play(&score.long(plan, long), &table))
        });
        let totals = totals.unwrap_or_else(|| play(&Codes::of(plan), &table).totals);
        timing(totals, stages, fixed)
    }
}

/// How much of a step is played.
#[derive(Clone, Copy)]
enum Length {
    Short,
    Long,
}

impl Length {
    /// Micro-batches that fill the pipeline, and some periods more, but never more than there are.
    fn micro_batches(self, plan: &Plan) -> usize {
        let (pp, period) = (plan.mesh.pp, plan.period());
        let filling = if period > 1 { 2 * pp } else { pp };
        // A gather may be started so many blocks, and so at most so many micro-batches, ahead.
        let ahead = if plan.sharding.weights > 1 { plan.pipeline.prefetch } else { 0 };
        let enough = match self {
            Length::Short => filling + (CUTS + 2) * period,
            Length::Long => 4 * filling + (CUTS + 8) * period,
        };
        plan.micro_batches().min((enough + ahead).next_multiple_of(period))
    }
}

impl ScoreKey {
    /// The key of a plan.
    pub fn of(plan: &Plan) -> Self {
        let (mesh, sharding) = (plan.mesh, &plan.sharding);
        ScoreKey {
            pp: mesh.pp,
            schedule: plan.pipeline.schedule,
            virtual_stages: plan.pipeline.virtual_stages,
            micro_batches: Length::Short.micro_batches(plan),
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
        let short = Codes::of(&plan.with_micro_batches(Length::Short.micro_batches(plan)));
        Score { short, long: Kept::default() }
    }

    fn long(&self, plan: &Plan, micro_batches: usize) -> Arc<Codes> {
        self.long.get(micro_batches, || Codes::of(&plan.with_micro_batches(micro_batches)))
    }
}
