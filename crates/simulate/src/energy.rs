//! Energy: idle power during the whole step, and more while a rank computes, sends or waits for others, up to the power cap.

use kintsugi_plan::Plan;
use serde::Serialize;

use crate::Timing;
use crate::cost::StepBound;

/// The consumption of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Consumption {
    /// Average watts of one rank during the step.
    pub power_w: f64,
    /// Joules of a step, all ranks together.
    pub joules: f64,
}

/// The consumption of a whole training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Training {
    /// Tokens.
    pub tokens: f64,
    /// Days.
    pub days: f64,
    /// Hours of all ranks together.
    pub gpu_hours: f64,
    /// Joules, if the device's power is known.
    pub joules: Option<f64>,
    /// Cost, if there is a price.
    pub cost: Option<f64>,
}

impl Consumption {
    /// The consumption of a step with these times; `None` if the device's power is unknown.
    pub fn new(plan: &Plan, timing: &Timing) -> Option<Self> {
        let Watts { idle, links, most } = Watts::of(plan)?;
        // A rank that waits for others polls in a kernel.
        let sending = timing.tensor_s + timing.exposed_s.iter().sum::<f64>() + timing.idle_s;
        let above = (most - idle) * timing.compute_s + (links - idle) * sending;
        let power_w = idle + above / timing.step_s;
        Some(Consumption { power_w, joules: power_w * timing.step_s * plan.mesh.ranks() as f64 })
    }

    /// Joules that no step within these bounds can go below; `None` if the device's power is unknown. Ranks that share cores have
    /// no such bound.
    pub fn least_joules(plan: &Plan, bound: StepBound) -> Option<f64> {
        let Watts { idle, links, most } = Watts::of(plan)?;
        if plan.cluster.cores.is_some() {
            return Some(0.0);
        }
        let StepBound { step_s, compute_s } = bound;
        let kernels = most - links;
        // A rank that does not compute sends or waits.
        let kernels = if kernels > 0.0 { kernels * compute_s } else { kernels * step_s };
        let above = kernels + (links - idle) * (step_s - plan.framework.step).max(0.0);
        Some((idle * step_s + above) * plan.mesh.ranks() as f64)
    }
}

/// What a rank draws, under its cap.
struct Watts {
    idle: f64,
    /// While it sends or waits.
    links: f64,
    /// While it computes.
    most: f64,
}

impl Watts {
    fn of(plan: &Plan) -> Option<Self> {
        let device = &plan.cluster.device;
        let idle = device.power_idle?;
        let most = device.power_cap.unwrap_or(f64::INFINITY).min(device.power_max?);
        Some(Watts { idle, links: device.power_links.unwrap_or(idle).min(most).max(idle), most })
    }
}

impl Training {
    /// A training on `tokens` tokens whose steps each take `timing`.
    pub fn new(plan: &Plan, timing: &Timing, tokens: f64) -> Self {
        let steps = tokens / plan.tokens_per_step() as f64;
        let seconds = steps * timing.step_s;
        let gpu_hours = seconds * plan.mesh.ranks() as f64 / 3600.0;
        Training {
            tokens,
            days: seconds / 86400.0,
            gpu_hours,
            joules: Consumption::new(plan, timing).map(|step| step.joules * steps),
            cost: plan.cluster.price.map(|price| price * gpu_hours),
        }
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;
    use crate::time;

    #[test]
    fn a_cap_saves_watts_and_takes_time() {
        let of = |sets: &[&str]| {
            let base =
                ["model.preset=llama3-8b", "cluster.preset=h100", "precision.compute=bf16", "parallel.dp=8"];
            let plan = ConfigSource::text("").sets(base).sets(sets).plan().unwrap();
            let timing = time(&plan).unwrap();
            (timing.step_s, Consumption::new(&plan, &timing).unwrap())
        };
        let ((full_s, full), (capped_s, capped)) = (of(&[]), of(&["cluster.device.power_cap=500"]));
        assert!(full_s < capped_s && capped_s < full_s * 1.4_f64.sqrt(), "{full_s} {capped_s}");
        assert!(capped.power_w <= 500.0 && capped.joules < full.joules, "{capped:?} {full:?}");
        assert_eq!(of(&["cluster.device.power_cap=700"]), (full_s, full));
    }
}
