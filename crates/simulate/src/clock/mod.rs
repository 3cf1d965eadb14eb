//! How long a step takes, in microseconds: for a search over many plans of one model and one batch.
//!
//! The play is that of `time`, to the picosecond. It is quicker in four ways: what ops cost is put together from
//! parts that many plans share (`table`), programs are made flat (`code`, `loops`) and put in order (`order`, `sheet`) once
//! for all plans that run the same ones, several plans are played side by side (`play`, `stage`, `lanes`, `prices`), and
//! what repeats is played only until it is sure how it goes on (`steady`).

mod code;
mod lanes;
mod loops;
mod order;
mod play;
mod prices;
mod sheet;
mod stage;
mod steady;
mod table;

use kintsugi_plan::{Mesh, Plan, Recompute, ScheduleKind, Sharding, When};

use crate::Timing;
use crate::time::{DeviceModel, Sharing, Totals, timing};
use code::Extent;
use loops::{Codes, enough};
use play::{Voice, play};
use sheet::Sheet;
use table::{Table, Tables};

/// Times plans that differ in their strategy only.
pub struct Clock<'a> {
    tables: Tables<'a>,
}

/// The programs of plans that run the same ones but for how often they do what they repeat.
pub struct Score {
    /// How many micro-batches the codes are for.
    micro_batches: usize,
    step: Sheet,
    /// The passes alone, where the micro-batches go through the pipeline in portions.
    passes: Option<Sheet>,
}

/// What decides the programs of a plan, for one model and one choice of prefetch and overlap, but for ops that some of
/// the plans with the same key have and others lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoreKey {
    pp: usize,
    schedule: ScheduleKind,
    virtual_stages: usize,
    micro_batches: usize,
    replicas: bool,
    recompute: bool,
    gather: Option<When>,
    reduce: When,
}

impl<'a> Clock<'a> {
    /// A clock for plans on a device.
    pub fn new(model: &'a DeviceModel) -> Self {
        Clock { tables: Tables::new(model) }
    }

    /// How long a step of a plan takes.
    pub fn time(&self, plan: &Plan) -> Timing {
        self.times(std::slice::from_ref(plan), &Score::of(plan))[0]
    }

    /// How long a step of each plan takes, with a score that was made for a plan with the same key.
    pub fn times(&self, plans: &[Plan], score: &Score) -> Vec<Timing> {
        let tables: Vec<Table> = plans.iter().map(|plan| self.tables.of(plan)).collect();
        let steps = score.play(Extent::Step, plans, &tables);
        let passes = score.passes.is_some().then(|| score.play(Extent::Passes, plans, &tables));
        let one = |(i, plan): (usize, &Plan)| {
            // One portion after the other, and only the last is followed by the end of the step.
            let others = portions(plan).0 as u64 - 1;
            let totals = passes.as_ref().map_or(steps[i], |passes| steps[i].and(passes[i], others));
            let timing = timing(totals, plan.mesh.pp, tables[i].units.fixed);
            Sharing::of(plan).map_or(timing, |sharing| sharing.crowd(timing, plan.mesh.pp))
        };
        plans.iter().enumerate().map(one).collect()
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
        let Sharding { weights, gradients, gather, reduce, .. } = plan.sharding;
        ScoreKey {
            pp: plan.mesh.pp,
            schedule: plan.pipeline.schedule,
            virtual_stages: plan.pipeline.virtual_stages,
            micro_batches: enough(plan, portions(plan).1),
            replicas: plan.mesh.dp > 1,
            recompute: plan.memory.recompute == Recompute::Full,
            gather: (weights > 1).then_some(gather),
            reduce: if gradients > 1 { reduce } else { When::Step },
        }
    }
}

/// The plan with so many micro-batches whose programs have every op in them that those of any plan with the same key
/// have. What a plan lacks of that takes it no time: neither kernels nor a transfer.
fn fullest(plan: &Plan, micro_batches: usize) -> Plan {
    let mesh = Mesh { dp: plan.mesh.dp.min(2), tp: plan.mesh.tp.max(2), ..plan.mesh };
    let Sharding { weights, gradients, .. } = plan.sharding;
    let [weights, gradients] = [weights, gradients].map(|shards| shards.min(mesh.dp));
    let sharding = Sharding { weights, gradients, states: mesh.dp, ..plan.sharding };
    Plan { mesh, sharding, sequence_parallel: true, ..plan.clone() }.with_micro_batches(micro_batches)
}

impl Score {
    /// The score of a plan.
    pub fn of(plan: &Plan) -> Self {
        let (fills, portion) = portions(plan);
        let micro_batches = enough(plan, portion);
        let plan = fullest(plan, micro_batches);
        let sheet =
            |extent| Sheet::of(Codes::looped(&plan, extent)).unwrap_or_else(|| Score::whole(&plan, extent));
        let passes = (fills > 1).then(|| sheet(Extent::Passes));
        Score { micro_batches, step: sheet(Extent::Step), passes }
    }

    /// All that a plan does, in which nothing repeats.
    fn whole(plan: &Plan, extent: Extent) -> Sheet {
        Sheet::of(Codes::whole(plan, extent)).expect("a schedule that ends")
    }

    /// Plays plans.
    fn play(&self, extent: Extent, plans: &[Plan], tables: &[Table]) -> Vec<Totals> {
        let sheet = match (extent, &self.passes) {
            (Extent::Passes, Some(passes)) => passes,
            _ => &self.step,
        };
        let repetitions =
            |plan: &Plan| (portions(plan).1 + plan.period() - self.micro_batches) / plan.period();
        if sheet.repeats() || plans.iter().all(|plan| repetitions(plan) == 1) {
            let voice = |(plan, table)| Voice { table, repetitions: repetitions(plan) };
            return play(sheet, &plans.iter().zip(tables).map(voice).collect::<Vec<_>>());
        }
        let alone = |(plan, table): (&Plan, _)| {
            let whole = Score::whole(&fullest(plan, portions(plan).1), extent);
            play(&whole, &[Voice { table, repetitions: 1 }])[0]
        };
        plans.iter().zip(tables).map(alone).collect()
    }
}
