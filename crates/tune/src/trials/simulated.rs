//! Trials that are predicted instead of run, by what another profile says of the machine. They show how a tuning behaves on a
//! cluster that is not there: the planner believes one profile, and another one is the truth.

use std::time::Instant;

use kintsugi_plan::Plan;
use kintsugi_plan::config::ConfigError;
use kintsugi_simulate::{Consumption, Coverage, PeakMemory, planned_device, predict, time};

use super::executor::{Executor, ExecutorError, TrialReport, TrialRequest};
use super::random::mixed;
use super::record::{Ending, StepFigures};

/// The truth, and how exactly it is measured.
pub struct Simulated<'a> {
    /// The plan of a configuration on the machine as it is.
    pub plan: &'a (dyn Fn(&str) -> Result<Plan, ConfigError> + Sync),
    /// The standard deviation of measured times, as a share of them.
    pub noise: f64,
    /// Decides the noise.
    pub seed: u64,
}

impl Executor for Simulated<'_> {
    fn run(&self, request: &TrialRequest) -> Result<TrialReport, ExecutorError> {
        let begun = Instant::now();
        let invalid =
            |error: ConfigError| ExecutorError::Config { trial: request.trial, error: error.into() };
        let plan = (self.plan)(&request.config).map_err(invalid)?;
        let limit = plan.cluster.device.planned_memory();
        let device = planned_device(&plan, plan.mesh.ranks(), 1);
        let failed =
            |ending, text: String| Ok(TrialReport::failed(ending, text, begun.elapsed().as_secs_f64()));
        if limit.is_some_and(|limit| PeakMemory::new(device).resident(&plan) > limit) {
            return failed(Ending::OutOfMemory, "the weights and states do not fit".to_owned());
        }
        let prediction = predict(&plan, device, Coverage::quick(&plan)).under_framework(&plan);
        let reserved = prediction.stages.iter().map(|stage| stage.reserved).max().unwrap_or(0);
        if limit.is_some_and(|limit| reserved > limit) {
            return failed(Ending::OutOfMemory, format!("it needs {reserved} bytes"));
        }
        let Some(timing) = time(&plan) else {
            return failed(Ending::Garbage, "the speed of the device is unknown".to_owned());
        };
        let step_s = timing.step_s * (self.noise * normal(request.trial as u64, self.seed)).exp();
        let energy_j = Consumption::new(&plan, &timing).map(|used| used.joules);
        let measured = StepFigures { step_s: Some(step_s), energy_j, reserved_bytes: Some(reserved) };
        let wall_s = begun.elapsed().as_secs_f64();
        Ok(TrialReport { ending: Ending::Finished, measured, steps: 1, message: None, wall_s })
    }
}

/// A number of a standard normal distribution (Box and Muller).
fn normal(number: u64, seed: u64) -> f64 {
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    let (radius, angle) = (unit(mixed(2 * number, seed)), unit(mixed(2 * number + 1, seed)));
    (-2.0 * radius.ln()).sqrt() * (2.0 * std::f64::consts::PI * angle).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_the_mean_and_the_deviation_of_a_normal_distribution() {
        let numbers: Vec<f64> = (0..4000).map(|i| normal(i, 7)).collect();
        let mean = numbers.iter().sum::<f64>() / 4000.0;
        let variance = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 4000.0;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.07, "{mean} {variance}");
    }
}
