//! The part of a schedule that repeats.
//!
//! After the first micro-batches have filled the pipeline, every stage does the same in each period until the last
//! micro-batches drain it. So a step of any length is a short step whose repeated part is evaluated more often.

use std::ops::Range;

use kintsugi_plan::{Plan, ScheduleKind};

use super::compile::{GraphNodes, StageNodes};
use super::{Node, Step};
use crate::structure::filling;

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
