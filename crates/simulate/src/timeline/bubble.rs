//! The bubble of a long step from short plays.
//!
//! Once the pipeline is full, every period takes as long as the one before and every stage computes as much in it.
//! So the makespan and the computing time grow in a straight line with the micro-batches, and two points give it.

use kintsugi_plan::Plan;

use super::{Costs, Deadlock, Timeline, play};

/// The part of all stages' time in which they compute nothing, in one step of a plan.
pub fn bubble(plan: &Plan, costs: &Costs) -> Result<f64, Deadlock> {
    let (micro_batches, pp) = (plan.micro_batches(), plan.mesh.pp);
    let period = plan.period();
    let enough = 2 * plan.chunks() + 2 * pp;
    let short = enough + micro_batches.saturating_sub(enough) % period;
    if micro_batches <= short + period {
        return Ok(play(plan, costs)?.bubble());
    }
    let [first, second] = [short, short + period].map(|m| play(&plan.with_micro_batches(m), costs));
    let (first, second) = (first?, second?);
    let periods = ((micro_batches - short) / period) as f64;
    let line = |of: &dyn Fn(&Timeline) -> f64| of(&first) + periods * (of(&second) - of(&first));
    let computing =
        |timeline: &Timeline| -> f64 { (0..pp).map(|s| timeline.makespan - timeline.idle(s)).sum() };
    let available = line(&|timeline| timeline.makespan) * pp as f64;
    Ok(if available > 0.0 { 1.0 - line(&computing) / available } else { 0.0 })
}
