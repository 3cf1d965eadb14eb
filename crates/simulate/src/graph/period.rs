//! What repeats in a step, so that a short step stands for a long one.
//!
//! After the first micro-batches have filled the pipeline, every stage does the same in each period of the schedule until the
//! last micro-batches drain it. So a step of any length is a short step whose repeated part is evaluated more often.

use std::ops::Range;

use kintsugi_plan::{Block, Computation, Message, MessageKind, Op, Plan, ScheduleKind, Transfer};

use super::compile::{GraphNodes, Node, StageNodes, Step};

/// The portions in which micro-batches pass through the pipeline. The pipeline drains after each.
pub(crate) struct Portions {
    /// The number of portions before the last.
    pub others: usize,
    /// The micro-batches of each of these.
    pub each: usize,
    /// The micro-batches of the last portion: the rest.
    pub last: usize,
}

impl Portions {
    /// As many portions as the framework makes, or as there are periods of the schedule.
    pub fn of(plan: &Plan) -> Self {
        let periods = plan.micro_batches() / plan.period();
        let fills = plan.framework.fills.clamp(1, periods.max(1));
        let each = periods / fills * plan.period();
        Portions { others: fills - 1, each, last: plan.micro_batches() - each * (fills - 1) }
    }
}

/// Micro-batches of the short step that stands for one with `micro_batches`: those that fill the pipeline, run a period
/// twice and drain it. A step with fewer stands for itself.
pub(crate) fn short_step(plan: &Plan, micro_batches: usize) -> usize {
    let period = plan.period();
    // A gather may start up to `prefetch` blocks ahead. Per chunk, a micro-batch has at least two blocks in a period if
    // its forward and backward are in the same period, else one.
    let phases = plan.sharding.depth(plan.sharding.weights).max(1);
    let ahead = if plan.sharding.weights > 1 { plan.pipeline.prefetch + phases - 1 } else { 0 };
    let ahead = if period > 1 { ahead / (2 * plan.pipeline.virtual_stages) } else { ahead };
    let short = filling(plan) + 4 * period + ahead / period * period;
    if micro_batches + period < short { micro_batches } else { short }
}

/// Micro-batches that fill the pipeline before anything can repeat.
fn filling(plan: &Plan) -> usize {
    if plan.pipeline.schedule == ScheduleKind::Interleaved { 0 } else { plan.mesh.pp() }
}

/// The steps that repeat, in order: one range for each stage. Empty if nothing repeats.
pub(super) fn repeated(plan: &Plan, compiled: &GraphNodes) -> Vec<Vec<Range<usize>>> {
    let forwards = || last_period(plan, &compiled.stages, |stage| &stage.forwards);
    let backwards = || last_period(plan, &compiled.stages, |stage| &stage.backwards);
    let all = match plan.pipeline.schedule {
        ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubble => vec![forwards()],
        ScheduleKind::Interleaved => vec![backwards()],
        ScheduleKind::GPipe => vec![forwards(), backwards()],
    };
    all.into_iter().collect::<Option<_>>().unwrap_or_default()
}

/// The last period that every stage runs twice in a row. Periods also repeat while the pipeline fills, but a longer
/// step does not have more of those.
fn last_period(
    plan: &Plan,
    stages: &[StageNodes],
    begins: impl Fn(&StageNodes) -> &Vec<usize>,
) -> Option<Vec<Range<usize>>> {
    let period = plan.period();
    let twice = |stage: &StageNodes, i: usize| {
        let at = begins(stage);
        let (one, other) = (&stage.steps[at[i]..at[i + 1]], &stage.steps[at[i + 1]..at[i + 2]]);
        let same = |(a, b): (&Step, &Step)| {
            a.node.later(period as u32) == b.node && !matches!(a.node, Node::RunStep(_))
        };
        one.len() == other.len() && one.iter().zip(other).all(same)
    };
    let filled = filling(plan) / period;
    let candidates = filled..begins(&stages[0]).len().saturating_sub(2);
    let found = candidates.rev().find(|&i| stages.iter().all(|stage| twice(stage, i)))?;
    Some(stages.iter().map(|stage| begins(stage)[found]..begins(stage)[found + 1]).collect())
}

/// Finds the starts of the periods of a stage's schedule: the message that the first pass of a period waits for, or
/// that pass.
pub(super) struct Periods {
    first: Option<Block>,
    last: Option<Block>,
    period: usize,
    by_forward: bool,
    by_backward: bool,
    forward: Option<usize>,
    backward: Option<usize>,
}

impl Periods {
    pub(super) fn new(plan: &Plan, stage: usize) -> Self {
        let (blocks, schedule) = (plan.stage_blocks(stage), plan.pipeline.schedule);
        Periods {
            first: blocks.first().copied(),
            last: blocks.last().copied(),
            period: plan.period(),
            by_forward: schedule != ScheduleKind::Interleaved,
            by_backward: matches!(schedule, ScheduleKind::GPipe | ScheduleKind::Interleaved),
            forward: None,
            backward: None,
        }
    }

    pub(super) fn begins_forward(&mut self, op: Op) -> bool {
        let (Op::Wait(Transfer::Receive(Message { kind: MessageKind::Activation, block, micro, .. }))
        | Op::Compute { kind: Computation::Forward | Computation::Evaluate, block, micro }) = op
        else {
            return false;
        };
        let begins = self.by_forward && Some(block) == self.first && self.forward != Some(micro);
        if begins {
            self.forward = Some(micro);
        }
        begins
    }

    pub(super) fn begins_backward(&mut self, op: Op) -> bool {
        let (Op::Wait(Transfer::Receive(Message { kind: MessageKind::Gradient, block, micro, .. }))
        | Op::Compute { kind: Computation::Recompute | Computation::Backward(_), block, micro }) = op
        else {
            return false;
        };
        let begins = self.by_backward
            && Some(block) == self.last
            && self.backward != Some(micro)
            && micro % self.period == 1 % self.period;
        if begins {
            self.backward = Some(micro);
        }
        begins
    }
}
