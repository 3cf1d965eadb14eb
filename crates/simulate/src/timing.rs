//! The time of a step and its parts: the graph of a plan's programs, evaluated with its costs.

use std::cell::OnceCell;
use std::sync::Arc;

use kintsugi_plan::{Mesh, Plan};
use kintsugi_spec::{ByLevel, Level};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::cost::{
    BlockCosts, Costs, DeviceModel, Links, Messages, PlanTraces, Sharing, StepBound, Time, UnitCosts,
};
use crate::graph::{Account, Extent, Graph, Portions, Rows, evaluate, short_step};
use crate::keys::{BlockCostKey, MessageCostKey, ProgramKey, UnitCostKey};
use crate::memo::Memo;

/// The time of a step and its parts: means over the stages, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// One step.
    pub step_s: f64,
    /// Kernels.
    pub compute_s: f64,
    /// Waiting for transfers of tensor parallelism.
    pub tensor_s: f64,
    /// Waiting for weights and gradients over the links of each level.
    #[serde(flatten, serialize_with = "by_level")]
    pub exposed_s: ByLevel<f64>,
    /// Waiting for other stages and their messages.
    pub idle_s: f64,
    /// The framework's time per step.
    pub fixed_s: f64,
    /// The share of the step in which a stage waits for others.
    pub bubble: f64,
}

/// Levels that every cluster has are one list. Pods, which few have, follow it.
fn by_level<S: Serializer>(exposed: &ByLevel<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    let &[package, node, pod, cluster] = exposed;
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("exposed_s", &[package, node, cluster])?;
    if pod > 0.0 {
        map.serialize_entry("exposed_pod_s", &pod)?;
    }
    map.end()
}

impl Timing {
    /// Waiting for weights and gradients over a level.
    pub fn exposed(&self, level: Level) -> f64 {
        self.exposed_s[level]
    }
}

/// The time of a step of a plan; `None` if its device's speed is unknown.
pub fn time(plan: &Plan) -> Option<Timing> {
    let device = DeviceModel::new(&plan.cluster.device, &plan.framework)?;
    Some(StepTimer::new(&device).time(plan))
}

/// Times plans that differ only in their strategy. The costs that several of them share are computed once.
pub struct StepTimer<'a> {
    device: &'a DeviceModel,
    links: Memo<Mesh, Links>,
    blocks: Memo<BlockCostKey, Arc<BlockCosts>>,
    units: Memo<UnitCostKey, Arc<UnitCosts>>,
    messages: Memo<MessageCostKey, Arc<Messages>>,
}

impl<'a> StepTimer<'a> {
    /// A timer for plans on a device.
    pub fn new(device: &'a DeviceModel) -> Self {
        StepTimer {
            device,
            links: Memo::default(),
            blocks: Memo::default(),
            units: Memo::default(),
            messages: Memo::default(),
        }
    }

    /// The time of a step of a plan.
    pub fn time(&self, plan: &Plan) -> Timing {
        self.time_compiled(plan, &CompiledStep::new(plan))
    }

    /// The same with the graph of a plan that has the same [`StepKey`].
    pub fn time_compiled(&self, plan: &Plan, step: &CompiledStep) -> Timing {
        step.time(plan, &self.costs(plan))
    }

    /// A time that no step of a plan is shorter than, in microseconds of work.
    pub fn bound(&self, plan: &Plan) -> StepBound {
        StepBound::of_step(plan, &self.costs(plan))
    }

    /// The same for every plan that differs from this one only in its sharding.
    pub fn bound_of_passes(&self, plan: &Plan) -> StepBound {
        // All that sharding changes in blocks is whether a backward adds to gradients or overwrites them.
        let adds = Plan { sharding: plan.sharding.unsharded(), ..plan.clone() };
        let begins = adds.with_micro_batches(1);
        let blocks = [&adds, &begins]
            .map(|plan| self.blocks.get(BlockCostKey::of(plan), || Arc::clone(&self.compute(plan).blocks)));
        let messages =
            self.messages.get(MessageCostKey::of(plan), || Arc::clone(&self.compute(plan).messages));
        StepBound::of_passes(plan, &blocks, &messages)
    }

    /// The costs of a plan's ops.
    pub fn costs(&self, plan: &Plan) -> Costs {
        let found = OnceCell::new();
        let costs = || found.get_or_init(|| self.compute(plan));
        Costs {
            blocks: self.blocks.get(BlockCostKey::of(plan), || Arc::clone(&costs().blocks)),
            units: self.units.get(UnitCostKey::of(plan), || Arc::clone(&costs().units)),
            messages: self.messages.get(MessageCostKey::of(plan), || Arc::clone(&costs().messages)),
        }
    }

    fn compute(&self, plan: &Plan) -> Costs {
        let links = self.links.get(plan.mesh, || Links::of(plan));
        Costs::new(plan, &PlanTraces::new(plan), self.device, &links)
    }
}

/// The graph and the traces of a step, for plans that differ only in the constants of their cluster and framework.
pub struct TracedStep {
    step: CompiledStep,
    traces: PlanTraces,
}

impl TracedStep {
    /// Traces and compiles a plan.
    pub fn new(plan: &Plan) -> Self {
        TracedStep { step: CompiledStep::new(plan), traces: PlanTraces::new(plan) }
    }

    /// The time of a step with a plan's constants; `None` if its device's speed is unknown.
    pub fn time(&self, plan: &Plan) -> Option<Timing> {
        let device = DeviceModel::new(&plan.cluster.device, &plan.framework)?;
        Some(self.step.time(plan, &Costs::new(plan, &self.traces, &device, &Links::of(plan))))
    }
}

/// The graphs of plans that run the same programs, except for how often they repeat a period of the schedule.
pub struct CompiledStep {
    step: CompiledPortion,
    /// Only the passes, for the portions before the last.
    passes: Option<CompiledPortion>,
}

/// A graph, and the number of its micro-batches.
struct CompiledPortion {
    extent: Extent,
    micro_batches: usize,
    graph: Graph,
}

/// What plans with the same [`CompiledStep`] have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepKey {
    last: ProgramKey,
    others: Option<ProgramKey>,
}

impl StepKey {
    /// The key of a plan.
    pub fn of(plan: &Plan) -> Self {
        let Portions { others, each, last } = Portions::of(plan);
        let others = (others > 0).then(|| ProgramKey::short(plan, each).for_time());
        StepKey { last: ProgramKey::short(plan, last).for_time(), others }
    }
}

impl CompiledStep {
    /// Compiles the programs of a plan.
    pub fn new(plan: &Plan) -> Self {
        let Portions { others, each, last } = Portions::of(plan);
        let passes = (others > 0).then(|| CompiledPortion::new(plan, Extent::Passes, each));
        CompiledStep { step: CompiledPortion::new(plan, Extent::Step, last), passes }
    }

    /// The time of a step of a plan with these costs. The plan must have the same [`StepKey`] as the compiled one.
    pub fn time(&self, plan: &Plan, costs: &Costs) -> Timing {
        let portions = Portions::of(plan);
        let mut account = self.step.evaluate(plan, costs, portions.last);
        // The portions follow each other, and the step ends after the last.
        if let Some(passes) = &self.passes {
            account = account.plus(portions.others, passes.evaluate(plan, costs, portions.each));
        }
        let timing = Timing::new(account, plan.mesh.pp(), costs.fixed());
        Sharing::of(plan).map_or(timing, |sharing| sharing.limit_by_cores(timing))
    }
}

impl CompiledPortion {
    fn new(plan: &Plan, extent: Extent, micro_batches: usize) -> Self {
        let micro_batches = short_step(plan, micro_batches);
        let graph = Graph::short(&plan.with_micro_batches(micro_batches), extent);
        CompiledPortion { extent, micro_batches, graph }
    }

    fn evaluate(&self, plan: &Plan, costs: &Costs, micro_batches: usize) -> Account {
        let periods = (micro_batches + plan.period() - self.micro_batches) / plan.period();
        if periods == 1 || self.graph.repeats() {
            return evaluate(&self.graph, costs, periods);
        }
        let plan = plan.with_micro_batches(micro_batches);
        evaluate(&Graph::whole(&plan, self.extent, Rows::Merged), costs, 1)
    }
}

impl Timing {
    fn new(account: Account, stages: usize, fixed: Time) -> Self {
        let seconds = |time: u128| time as f64 * 1e-12;
        let mean = |sum: u128| seconds(sum) / stages as f64;
        let fixed_s = seconds(fixed.into());
        let (step_s, idle_s) = (seconds(account.end) + fixed_s, mean(account.idle));
        Timing {
            step_s,
            compute_s: mean(account.compute),
            tensor_s: mean(account.tensor),
            exposed_s: account.exposed.map(mean),
            idle_s,
            fixed_s,
            bubble: if step_s > 0.0 { idle_s / step_s } else { 0.0 },
        }
    }
}
