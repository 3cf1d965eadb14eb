//! When every op of a step runs, on every stage.

use kintsugi_plan::{Op, Plan, Program};

use crate::cost::{Costs, DeviceModel};
use crate::graph::{Extent, Graph, NodeSpan, Rows, Spans, spans};
use crate::timing::{CompiledStep, StepTimer, Timing};

/// The spans of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The spans of each stage, in order. Ops that take no time have none.
    pub stages: Vec<Vec<OpSpan>>,
    /// The transfers of each stage, in the order in which they start or are awaited. Those that take no time are left
    /// out.
    pub transfers: Vec<Vec<TransferSpan>>,
    /// When the last stage is done, in seconds.
    pub end: f64,
    /// The share of the step in which a stage waits for others. It also covers what the spans leave out: the
    /// framework's time, its portions, and shared cores.
    pub bubble: f64,
}

/// When an op runs or waits, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpSpan {
    /// Its start.
    pub start: f64,
    /// Its end.
    pub end: f64,
    /// The op.
    pub op: Op,
}

/// When a transfer runs, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferSpan {
    /// Its start.
    pub start: f64,
    /// Its end.
    pub end: f64,
    /// The op that starts it. For messages and operations over several stages, the op that waits for it.
    pub op: Op,
    /// The number of the transfer in the op.
    pub number: usize,
}

/// Ops of a timeline: some hundred bytes each.
const MAX_OPS: usize = 1 << 22;

impl Timeline {
    /// The approximate number of ops in a plan's step, if a timeline of it would take gigabytes.
    pub fn too_long(plan: &Plan) -> Option<usize> {
        let ops = 4 * plan.micro_batches() * (plan.model.layers + 2 * plan.chunks());
        (ops > MAX_OPS).then_some(ops)
    }

    /// One step with predicted times. If the device's speed is unknown, a layer's forward, its input gradient and its
    /// weight gradients take a second each, and everything else takes no time.
    pub fn of(plan: &Plan) -> Self {
        Timeline::with(plan, &known_or_unit_costs(plan))
    }

    /// One step with these costs.
    pub fn with(plan: &Plan, costs: &Costs) -> Self {
        let programs: Vec<Program> = (0..plan.mesh.pp()).map(|stage| plan.program(stage)).collect();
        let mut stages: Vec<Vec<OpSpan>> = vec![Vec::new(); programs.len()];
        let seconds = |time: u128| time as f64 * 1e-12;
        // The last op of each stage that has a span.
        let mut last = vec![usize::MAX; programs.len()];
        let (Spans { nodes, transfers }, account) =
            spans(&Graph::whole(plan, Extent::Step, Rows::Single), costs);
        for NodeSpan { stage, op, start, end } in nodes.into_iter().filter(|node| node.end > node.start) {
            let of_stage = &mut stages[stage];
            match of_stage.last_mut() {
                Some(span) if last[stage] == op => span.end = seconds(end),
                _ => of_stage.push(OpSpan {
                    start: seconds(start),
                    end: seconds(end),
                    op: programs[stage].ops[op],
                }),
            }
            last[stage] = op;
        }
        let mut of_stages: Vec<Vec<TransferSpan>> = vec![Vec::new(); programs.len()];
        for span in transfers.into_iter().filter(|span| span.end > span.start) {
            of_stages[span.stage].push(TransferSpan {
                start: seconds(span.start),
                end: seconds(span.end),
                op: programs[span.stage].ops[span.op],
                number: span.transfer,
            });
        }
        let bubble = CompiledStep::new(plan).time(plan, costs).bubble;
        Timeline { stages, transfers: of_stages, end: seconds(account.end), bubble }
    }
}

/// The share of a step in which a stage waits for others: by predicted times, or in unit time if the device's speed is
/// unknown.
pub fn bubble(plan: &Plan) -> f64 {
    let timing: Timing = CompiledStep::new(plan).time(plan, &known_or_unit_costs(plan));
    timing.bubble
}

fn known_or_unit_costs(plan: &Plan) -> Costs {
    const UNIT: u64 = 1_000_000_000_000;
    match DeviceModel::new(&plan.cluster.device, &plan.framework) {
        Some(device) => StepTimer::new(&device).costs(plan),
        None => Costs::of_layers(plan, UNIT, UNIT, UNIT),
    }
}
