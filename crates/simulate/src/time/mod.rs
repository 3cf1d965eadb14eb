//! How long a step takes and what it consumes: the programs of a plan played against clocks.
//!
//! Kernels come from the paper trace and are priced by the device, transfers by the links, and everything else
//! (overlap, bubbles, stragglers, contention) follows from the programs.

mod costs;
mod energy;
mod kernel;
mod links;
mod play;
mod trace;

pub use costs::{Costs, Spent, Time};
pub use energy::{Consumption, Training};
pub use kernel::DeviceModel;
pub use links::{Among, Links};
pub use play::{Account, play};

use kintsugi_plan::{Op, Plan, Program, ScheduleKind};
use kintsugi_spec::Level;
use serde::Serialize;

/// How long a step takes, and what the time goes into: means over the stages, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// One step.
    pub step_s: f64,
    /// Kernels.
    pub compute_s: f64,
    /// Transfers of tensor parallelism, which nothing overlaps.
    pub tensor_s: f64,
    /// Waiting for weights and gradients over the links of a package, a node and the cluster.
    pub exposed_s: [f64; 3],
    /// Waiting for other stages and their messages.
    pub idle_s: f64,
    /// What the framework adds to every step.
    pub fixed_s: f64,
    /// The share of the step in which a stage waits for others.
    pub bubble: f64,
}

impl Timing {
    /// Waiting for weights and gradients over a level.
    pub fn exposed(&self, level: Level) -> f64 {
        self.exposed_s[level as usize]
    }
}

/// How long a step of a plan takes; `None` where its device's speed is not known.
pub fn time(plan: &Plan) -> Option<Timing> {
    let device = DeviceModel::new(&plan.cluster.device, &plan.framework)?;
    let costs = Costs::new(plan, &device);
    Some(if plan.framework.fills > 1 { filled(plan, &costs) } else { with_costs(plan, &costs) })
}

/// How long a step takes whose micro-batches go through the pipeline in portions: one after the other, and only the
/// last is followed by the end of the step.
fn filled(plan: &Plan, costs: &Costs) -> Timing {
    let fills = plan.framework.fills.min(plan.micro_batches());
    let portion = plan.micro_batches().div_ceil(fills).next_multiple_of(plan.period());
    let plan = plan.with_micro_batches(portion);
    let last = with_costs(&plan, costs);
    let passes = steadily(&plan, |plan| totals(&play(&passes_alone(plan), costs)));
    let one = timing(passes, plan.mesh.pp, 0);
    let times = (fills - 1) as f64;
    let step_s = last.step_s + times * one.step_s;
    let idle_s = last.idle_s + times * one.idle_s;
    Timing {
        step_s,
        compute_s: last.compute_s + times * one.compute_s,
        tensor_s: last.tensor_s + times * one.tensor_s,
        exposed_s: std::array::from_fn(|i| last.exposed_s[i] + times * one.exposed_s[i]),
        idle_s,
        bubble: idle_s / step_s,
        ..last
    }
}

/// The programs up to the last backward, and the message that follows from it.
fn passes_alone(plan: &Plan) -> Vec<Program> {
    let cut = |stage: usize| {
        let mut program = plan.program(stage);
        let last = program.ops.iter().rposition(|op| matches!(op, Op::Backward { .. })).unwrap_or(0);
        let sends = program.ops.split_off(last + 1);
        program.ops.extend(sends.into_iter().filter(|op| matches!(op, Op::SendStart { .. })));
        program
    };
    (0..plan.mesh.pp).map(cut).collect()
}

/// How long a step takes with given costs.
pub fn with_costs(plan: &Plan, costs: &Costs) -> Timing {
    let whole = |plan: &Plan| {
        let programs: Vec<Program> = (0..plan.mesh.pp).map(|stage| plan.program(stage)).collect();
        totals(&play(&programs, costs))
    };
    timing(steadily(plan, whole), plan.mesh.pp, costs.fixed)
}

/// What a play of all micro-batches adds up to, from plays that are long enough to be steady.
fn steadily(plan: &Plan, played: impl Fn(&Plan) -> Totals) -> Totals {
    let (micro_batches, period) = (plan.micro_batches(), plan.period());
    let enough = match plan.pipeline.schedule {
        ScheduleKind::GPipe => micro_batches,
        _ => 2 * plan.chunks() + 4 * plan.mesh.pp,
    };
    let short = enough + micro_batches.saturating_sub(enough) % period;
    let played = |m: usize| played(&plan.with_micro_batches(m));
    if micro_batches <= short + period {
        return played(micro_batches);
    }
    // In the steady part every period takes what the one before took.
    let (first, second) = (played(short), played(short + period));
    let periods = ((micro_batches - short) / period) as u64;
    first.extended(second, periods)
}

/// Sums over the stages, and when the last is done.
#[derive(Clone, Copy)]
pub(crate) struct Totals(pub(crate) [Time; 7]);

impl Totals {
    /// These and so many periods more.
    pub(crate) fn and(self, period: Totals, periods: u64) -> Totals {
        Totals(std::array::from_fn(|i| self.0[i] + periods * period.0[i]))
    }

    fn extended(self, after: Totals, periods: u64) -> Totals {
        Totals(std::array::from_fn(|i| self.0[i] + periods * (after.0[i] - self.0[i])))
    }
}

pub(crate) fn totals(stages: &[Account]) -> Totals {
    let sum = |of: fn(&Account) -> Time| stages.iter().map(of).sum::<Time>();
    let end = stages.iter().map(|stage| stage.end).max().unwrap_or(0);
    let late: Time = stages.iter().map(|stage| end - stage.end).sum();
    Totals([
        end,
        sum(|s| s.compute),
        sum(|s| s.tensor),
        sum(|s| s.exposed[0]),
        sum(|s| s.exposed[1]),
        sum(|s| s.exposed[2]),
        sum(|s| s.idle) + late,
    ])
}

pub(crate) fn timing(totals: Totals, stages: usize, fixed: Time) -> Timing {
    let [end, compute, tensor, package, node, cluster, idle] = totals.0.map(|time| time as f64 * 1e-12);
    let mean = |sum: f64| sum / stages as f64;
    let fixed_s = fixed as f64 * 1e-12;
    let step_s = end + fixed_s;
    Timing {
        step_s,
        compute_s: mean(compute),
        tensor_s: mean(tensor),
        exposed_s: [package, node, cluster].map(mean),
        idle_s: mean(idle),
        fixed_s,
        bubble: if step_s > 0.0 { mean(idle) / step_s } else { 0.0 },
    }
}
