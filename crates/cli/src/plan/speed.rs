//! Speed and consumption of a plan, in the usual figures.

use kintsugi_plan::Plan;
use kintsugi_simulate::{Consumption, LINK_EFFICIENCY, TimeRange, Timing, Training, time};
use kintsugi_spec::{Level, units};

use crate::describe::{Fact, fact};

/// Tokens per parameter of a whole training: arXiv 2203.15556, and the energy figures of arXiv 2312.12705.
const TOKENS_PER_PARAMETER: f64 = 20.0;

/// Speed and consumption of a plan.
pub struct Speed {
    /// The times of a step.
    pub timing: Timing,
    /// The range of a step's time.
    pub range: TimeRange,
    /// Tokens per second and rank.
    pub tokens: f64,
    /// FLOP/s of a rank, without and with recomputation.
    pub model_flops: f64,
    /// With recomputation.
    pub hardware_flops: f64,
    /// Model FLOPs as a share of the peak.
    pub mfu: Option<f64>,
    /// Energy.
    pub consumption: Option<Consumption>,
    /// A whole training.
    pub training: Training,
}

impl Speed {
    /// The speed of a plan; `None` if the speed of its device is unknown.
    pub fn of(plan: &Plan) -> Option<Self> {
        let timing = time(plan)?;
        let (flops, ranks) = (plan.flops(), plan.mesh.ranks() as f64);
        let tokens = TOKENS_PER_PARAMETER * plan.parameter_count() as f64;
        Some(Speed {
            range: TimeRange::of(plan, &timing),
            tokens: plan.tokens_per_step() as f64 / timing.step_s / ranks,
            model_flops: flops.model / timing.step_s / ranks,
            hardware_flops: flops.hardware / timing.step_s / ranks,
            mfu: plan.mfu(timing.step_s),
            consumption: Consumption::new(plan, &timing),
            training: Training::new(plan, &timing, tokens),
            timing,
        })
    }

    /// The lines of the report.
    pub fn facts(&self, plan: &Plan) -> Vec<Fact> {
        let mfu = self.mfu.map_or(String::new(), |mfu| format!(", MFU {:.1} %", 100.0 * mfu));
        let speed = format!(
            "{} tokens/s and {}FLOP/s (hardware {}FLOP/s) for each rank{mfu}",
            units::count(self.tokens.round()),
            units::count(self.model_flops),
            units::count(self.hardware_flops),
        );
        let energy = |energy: Consumption| {
            format!(
                "{} per step, {} per token, {:.0} W for each rank",
                joules(energy.joules),
                joules(energy.joules / plan.tokens_per_step() as f64),
                energy.power_w,
            )
        };
        let mut facts = vec![
            fact("time", format!("{} per step: {}", duration(self.timing.step_s), self.shares())),
            fact("range", range(&self.range)),
            fact("speed", speed),
        ];
        facts.extend(self.consumption.map(|used| fact("energy", energy(used))));
        facts.push(fact("training", self.whole()));
        facts
    }

    /// The parts of the step's time, the largest first.
    fn shares(&self) -> String {
        let t = &self.timing;
        let exposed =
            Level::ALL.map(|level| (format!("waiting for the {}'s links", level.name()), t.exposed(level)));
        let mut parts = vec![
            ("kernels".to_owned(), t.compute_s),
            ("tensor-parallel links".to_owned(), t.tensor_s),
            ("waiting for other stages".to_owned(), t.idle_s),
            ("the framework".to_owned(), t.fixed_s),
        ];
        parts.extend(exposed);
        parts.retain(|(_, seconds)| seconds / t.step_s >= 0.0005);
        parts.sort_by(|a, b| b.1.total_cmp(&a.1));
        let share = |(name, seconds): &(String, f64)| format!("{name} {:.1} %", 100.0 * seconds / t.step_s);
        parts.iter().map(share).collect::<Vec<_>>().join(", ")
    }

    /// The time, the energy and the cost of a whole training.
    fn whole(&self) -> String {
        let t = &self.training;
        let energy = t.joules.map_or(String::new(), |joules| format!(", {}J", units::count(joules)));
        let cost = t.cost.map_or(String::new(), |cost| format!(", cost {}", units::count(cost)));
        format!(
            "{} tokens (20 per parameter): {}, {}{energy}{cost}",
            units::count(t.tokens),
            duration(t.days * 86400.0),
            match t.gpu_hours.round() {
                1.0 => "1 rank-hour".to_owned(),
                hours => format!("{} rank-hours", units::count(hours)),
            },
        )
    }
}

/// A range and what it comes from.
fn range(range: &TimeRange) -> String {
    let [low, high] = range.step_s.map(duration);
    let links = range.links.map_or(String::new(), |links| {
        let [slow, full, no_overlap] = [links.slow_s, links.full_s, links.no_overlap_s].map(duration);
        let [least, most] = LINK_EFFICIENCY.map(|share| 100.0 * share);
        format!(
            "; {slow} if collectives reach {least:.0} % of the links between nodes, {full} at {most:.0} %, \
             {no_overlap} if no transfer overlaps"
        )
    });
    format!("{low} to {high}: {}{links}", spread(range))
}

/// How long runs took, compared with their predictions.
pub fn spread(TimeRange { spread, calibrated, unknowns, .. }: &TimeRange) -> String {
    let runs = if *calibrated { "runs on calibrated devices" } else { "held-out runs" };
    let [faster, slower] = [-unknowns.faster, unknowns.slower].map(f64::exp);
    let host = if (faster - 1.0).abs().max(slower - 1.0) < 0.005 {
        String::new()
    } else {
        format!(", and what is unknown of host and links adds a factor of {faster:.2} to {slower:.2}")
    };
    format!("{runs} took {:.2} to {:.2} times as long as predicted{host}", spread.low, spread.high)
}

/// Joules in a readable unit.
fn joules(joules: f64) -> String {
    match joules {
        0.0..0.1 => format!("{:.2} mJ", 1e3 * joules),
        0.1..10.0 => format!("{joules:.3} J"),
        10.0..1000.0 => format!("{joules:.1} J"),
        _ => format!("{}J", units::count(joules)),
    }
}

/// Seconds in a readable unit.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 600.0 => format!("{s:.2} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s if s < 86400.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn energy_has_the_unit_that_fits() {
        let said = [0.001_12, 3.5, 73.165_277, 4_530_000.0].map(joules);
        assert_eq!(said, ["1.12 mJ", "3.500 J", "73.2 J", "4.53 MJ"]);
    }

    #[test]
    fn durations_have_the_unit_that_fits() {
        let said = [2e-5, 0.25, 12.0, 7200.0, 864_000.0].map(duration);
        assert_eq!(said, ["20.0 µs", "250.0 ms", "12.00 s", "2.0 h", "10.0 days"]);
    }
}
