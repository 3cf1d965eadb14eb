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
    step: Scored,
    /// The passes alone, of the portions before the last, where micro-batches go through the pipeline in portions.
    passes: Option<Scored>,
}

/// A sheet, and how many micro-batches it is for.
struct Scored {
    micro_batches: usize,
    sheet: Sheet,
}

/// What decides the programs of a plan, for one model and one choice of prefetch and overlap, but for ops that some of
/// the plans with the same key have and others lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoreKey {
    pp: usize,
    schedule: ScheduleKind,
    virtual_stages: usize,
    last_layers: usize,
    /// What is played of the last portion and of the others.
    micro_batches: [usize; 2],
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
        let tables = plans.iter().map(|plan| self.tables.of(plan).scaled(plan));
        let (tables, scales): (Vec<Table>, Vec<u32>) = tables.unzip();
        let steps = score.step.play(Extent::Step, plans, &tables, |portions| portions.last);
        let passes = score.passes.as_ref();
        let passes =
            passes.map(|passes| passes.play(Extent::Passes, plans, &tables, |portions| portions.each));
        let one = |(i, plan): (usize, &Plan)| {
            // One portion after the other, and only the last is followed by the end of the step.
            let others = Portions::of(plan).others as u128;
            let totals = passes.as_ref().map_or(steps[i], |passes| steps[i].and(passes[i], others));
            let timing = timing(totals.unscaled(scales[i]), plan.mesh.pp, tables[i].units.fixed);
            Sharing::of(plan).map_or(timing, |sharing| sharing.crowd(timing, plan.mesh.pp))
        };
        plans.iter().enumerate().map(one).collect()
    }
}

/// The portions in which micro-batches go through the pipeline, which is drained after each.
struct Portions {
    /// How many there are before the last.
    others: usize,
    /// How large each of these is.
    each: usize,
    /// How large the last is: what is left.
    last: usize,
}

impl Portions {
    /// As many portions as the framework makes, or as there are periods of the schedule.
    fn of(plan: &Plan) -> Self {
        let periods = plan.micro_batches() / plan.period();
        let fills = plan.framework.fills.clamp(1, periods.max(1));
        let each = periods / fills * plan.period();
        Portions { others: fills - 1, each, last: plan.micro_batches() - each * (fills - 1) }
    }
}

impl ScoreKey {
    /// The key of a plan.
    pub fn of(plan: &Plan) -> Self {
        let Sharding { weights, gradients, gather, reduce, .. } = plan.sharding;
        let Portions { others, each, last } = Portions::of(plan);
        ScoreKey {
            pp: plan.mesh.pp,
            schedule: plan.pipeline.schedule,
            virtual_stages: plan.pipeline.virtual_stages,
            last_layers: plan.last_layers(),
            micro_batches: [enough(plan, last), if others > 0 { enough(plan, each) } else { 0 }],
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
        let Portions { others, each, last } = Portions::of(plan);
        let passes = (others > 0).then(|| Scored::new(plan, Extent::Passes, each));
        Score { step: Scored::new(plan, Extent::Step, last), passes }
    }
}

impl Scored {
    /// What a plan does with so many micro-batches.
    fn new(plan: &Plan, extent: Extent, micro_batches: usize) -> Self {
        let micro_batches = enough(plan, micro_batches);
        let plan = fullest(plan, micro_batches);
        let sheet = Sheet::of(Codes::looped(&plan, extent)).unwrap_or_else(|| Scored::whole(&plan, extent));
        Scored { micro_batches, sheet }
    }

    /// All that a plan does, in which nothing repeats.
    fn whole(plan: &Plan, extent: Extent) -> Sheet {
        Sheet::of(Codes::whole(plan, extent)).expect("a schedule that ends")
    }

    /// Plays one portion of each plan, of the size that `of` says.
    fn play(
        &self,
        extent: Extent,
        plans: &[Plan],
        tables: &[Table],
        of: fn(Portions) -> usize,
    ) -> Vec<Totals> {
        let portion = |plan: &Plan| of(Portions::of(plan));
        let repetitions = |plan: &Plan| (portion(plan) + plan.period() - self.micro_batches) / plan.period();
        if self.sheet.repeats() || plans.iter().all(|plan| repetitions(plan) == 1) {
            let voice = |(plan, table)| Voice { table, repetitions: repetitions(plan) };
            return play(&self.sheet, &plans.iter().zip(tables).map(voice).collect::<Vec<_>>());
        }
        let alone = |(plan, table): (&Plan, _)| {
            let whole = Scored::whole(&fullest(plan, portion(plan)), extent);
            play(&whole, &[Voice { table, repetitions: 1 }])[0]
        };
        plans.iter().zip(tables).map(alone).collect()
    }
}
