//! Fits a cluster's constants to trials, so that the next prediction starts closer.
//!
//! What is fitted are factors: on the rates of products and attention, on those of memory-bound kernels, on the time to launch
//! a kernel, and for each level of links on the share of their bandwidth and on their delays. A coordinate search changes one
//! factor at a time, and a factor that the trials say little about stays near 1. How much closer predictions become is measured
//! on trials that the fit did not see.

use std::fmt::Write as _;

use kintsugi_plan::Plan;
use kintsugi_simulate::TracedStep;
use kintsugi_spec::{ClusterSpec, Level};
use rayon::prelude::*;

/// A trial to learn from: its plan, and the seconds of a step that were measured.
pub struct Lesson {
    /// The plan.
    pub plan: Plan,
    /// Measured seconds of a step.
    pub step_s: f64,
}

/// A constant that is fitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineConstant {
    /// The rates of products and of attention.
    Products,
    /// The rates of memory-bound kernels.
    Streaming,
    /// The time to launch a kernel.
    Launch,
    /// The share of the bandwidth of a level's links that transfers reach.
    Efficiency(Level),
    /// The time to begin a transfer over a level's links, and to pass from one rank to the next.
    Delay(Level),
}

/// What was learned.
#[derive(Clone, Debug)]
pub struct Learned {
    /// The factor of each constant.
    pub factors: Vec<(MachineConstant, f64)>,
    /// The mean error of trials that were fitted, before and after.
    pub seen: [f64; 2],
    /// The mean error of each trial by a fit without it and its like, before and after.
    pub unseen: [f64; 2],
    /// Trials that it was learned from.
    pub trials: usize,
}

/// Trials that a fit needs.
pub const MIN_LESSONS: usize = 6;
/// Parts of the trials, each of which is predicted by a fit to the others.
const PARTS: usize = 5;
/// Factors of the search, from coarse to fine.
const STEPS: [f64; 4] = [1.5, 1.15, 1.05, 1.02];
/// The largest factor.
const MAX_FACTOR: f64 = 20.0;
/// What the square of the logarithm of a factor costs, beside the mean error.
const RELUCTANCE: f64 = 0.004;
/// The largest error of a trial that counts, as a logarithm.
const MAX_ERROR: f64 = 1.0;

/// Learns from trials. `None` if there are too few, or if the speed of the device is unknown.
pub fn learn(lessons: &[Lesson]) -> Option<Learned> {
    if lessons.len() < MIN_LESSONS {
        return None;
    }
    let traced: Vec<Traced> = lessons.par_iter().map(Traced::new).collect();
    let all: Vec<usize> = (0..traced.len()).collect();
    let cluster = &lessons[0].plan.cluster;
    let constants = constants(cluster);
    let none = vec![1.0; constants.len()];
    let before = error(&traced, &all, &constants, &none)?;
    let factors = fit(&traced, &all, &constants);
    let after = error(&traced, &all, &constants, &factors)?;
    let unseen = (0..PARTS).map(|part| {
        let (held, rest): (Vec<usize>, Vec<usize>) = all.iter().partition(|&&i| i % PARTS == part);
        let factors = fit(&traced, &rest, &constants);
        let errors = [&none, &factors].map(|factors| error(&traced, &held, &constants, factors));
        (errors.map(|error| error.unwrap_or(0.0)), held.len())
    });
    let unseen = unseen.fold([0.0; 2], |sum, (errors, count)| {
        [0, 1].map(|i| sum[i] + errors[i] * count as f64 / all.len() as f64)
    });
    Some(Learned {
        factors: constants.into_iter().zip(factors).collect(),
        seen: [before, after],
        unseen,
        trials: lessons.len(),
    })
}

/// The constants of a cluster that trials can say something about.
fn constants(cluster: &ClusterSpec) -> Vec<MachineConstant> {
    let of_device = [MachineConstant::Products, MachineConstant::Streaming, MachineConstant::Launch];
    let levels = cluster.links.iter().map(|link| link.level);
    let of_links =
        levels.flat_map(|level| [MachineConstant::Efficiency(level), MachineConstant::Delay(level)]);
    of_device.into_iter().chain(of_links).collect()
}

/// A trial with the traces of its plan, on which the constants have no influence.
struct Traced<'a> {
    lesson: &'a Lesson,
    step: TracedStep,
}

impl<'a> Traced<'a> {
    fn new(lesson: &'a Lesson) -> Self {
        Traced { lesson, step: TracedStep::new(&lesson.plan) }
    }

    /// The logarithm of predicted over measured time.
    fn log_ratio(&self, constants: &[MachineConstant], factors: &[f64]) -> Option<f64> {
        let mut plan = self.lesson.plan.clone();
        for (constant, &factor) in constants.iter().zip(factors) {
            constant.apply(&mut plan.cluster, factor);
        }
        Some((self.step.time(&plan)?.step_s / self.lesson.step_s).ln())
    }
}

/// The mean error of some trials, as a share; `None` if there is no prediction.
fn error(traced: &[Traced], which: &[usize], constants: &[MachineConstant], factors: &[f64]) -> Option<f64> {
    let ratios: Option<Vec<f64>> =
        which.par_iter().map(|&i| traced[i].log_ratio(constants, factors)).collect();
    let errors = ratios?.into_iter().map(|ratio| ratio.abs().min(MAX_ERROR));
    Some(errors.sum::<f64>() / which.len().max(1) as f64)
}

fn fit(traced: &[Traced], which: &[usize], constants: &[MachineConstant]) -> Vec<f64> {
    let cost = |factors: &[f64]| {
        let reluctance: f64 = factors.iter().map(|factor| RELUCTANCE * factor.ln().powi(2)).sum();
        error(traced, which, constants, factors).map_or(f64::INFINITY, |error| error + reluctance)
    };
    let mut factors = vec![1.0; constants.len()];
    let mut best = cost(&factors);
    for step in STEPS {
        let mut better = true;
        while better {
            better = false;
            for i in 0..factors.len() {
                for change in [step, 1.0 / step] {
                    let mut other = factors.clone();
                    other[i] = (factors[i] * change).clamp(1.0 / MAX_FACTOR, MAX_FACTOR);
                    let found = cost(&other);
                    if found < best - 1e-6 {
                        (best, factors, better) = (found, other, true);
                    }
                }
            }
        }
    }
    factors
}

impl MachineConstant {
    /// Multiplies the constant by a factor.
    fn apply(self, cluster: &mut ClusterSpec, factor: f64) {
        let device = &mut cluster.device;
        let scale = |value: &mut Option<f64>, default: f64| *value = Some(value.unwrap_or(default) * factor);
        match self {
            MachineConstant::Products => {
                scale(&mut device.matmul, 0.8);
                for point in &mut device.products {
                    point.flops *= factor;
                    point.burst = point.burst.map(|burst| burst * factor);
                }
                for point in &mut device.attention {
                    point.forward *= factor;
                    point.backward *= factor;
                }
            }
            MachineConstant::Streaming => {
                scale(&mut device.streaming, 0.8);
                device.epilogue = device.epilogue.map(|rate| rate * factor);
                device.kernels.iter_mut().for_each(|point| point.bandwidth *= factor);
            }
            MachineConstant::Launch => scale(&mut device.launch, 4e-6),
            MachineConstant::Efficiency(level) => {
                for link in cluster.links.iter_mut().filter(|link| link.level == level) {
                    scale(&mut link.efficiency, 0.8);
                }
            }
            MachineConstant::Delay(level) => {
                let [latency, start] = match level {
                    Level::Package | Level::Node => [2e-6, 1e-5],
                    Level::Pod | Level::Cluster => [8e-6, 2e-5],
                };
                for link in cluster.links.iter_mut().filter(|link| link.level == level) {
                    scale(&mut link.latency, latency);
                    scale(&mut link.start, start);
                    link.inner_latency = link.inner_latency.map(|seconds| seconds * factor);
                }
            }
        }
    }

    /// The constant in words.
    pub fn name(self) -> String {
        match self {
            MachineConstant::Products => "rates of products and attention".to_owned(),
            MachineConstant::Streaming => "rates of memory-bound kernels".to_owned(),
            MachineConstant::Launch => "time to launch a kernel".to_owned(),
            MachineConstant::Efficiency(level) => format!("efficiency of {} links", level.name()),
            MachineConstant::Delay(level) => format!("delays of {} links", level.name()),
        }
    }
}

impl Learned {
    /// The cluster of a plan with what was learned, as the TOML text of a profile: every key of it, but not its preset and the number
    /// of nodes. `source` says where the trials are from.
    pub fn profile(&self, plan: &Plan, source: &str) -> Result<String, toml::ser::Error> {
        let mut plan = plan.clone();
        for &(constant, factor) in &self.factors {
            constant.apply(&mut plan.cluster, factor);
        }
        let mut profile = plan.to_table();
        profile.retain(|table, _| table == "cluster");
        if let Some(toml::Value::Table(cluster)) = profile.get_mut("cluster") {
            cluster.retain(|key, _| !["preset", "nodes", "emulated"].contains(&key));
        }
        let percent = |error: f64| format!("{:.1} %", 100.0 * error);
        let mut text = format!(
            "# Learned by kintsugi tune --learn from {} trials: {source}.\n# Mean error of trials that the fit did not see: {} \
             before, {} after.\n# Factors over the profile that the trials were predicted with:\n",
            self.trials,
            percent(self.unseen[0]),
            percent(self.unseen[1]),
        );
        for (constant, factor) in &self.factors {
            writeln!(text, "#   {}: {factor:.3}", constant.name()).expect("a string");
        }
        Ok(text + &toml::to_string(&profile)?)
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;
    use kintsugi_simulate::time;

    use super::*;

    fn plans() -> Vec<Plan> {
        let layouts =
            [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2), (1, 4), (2, 4), (4, 4), (8, 4)];
        let plan = |(tp, pp): (usize, usize)| {
            ConfigSource::text("")
                .sets([
                    "model.preset=gpt-1.4b",
                    "cluster.preset=h100",
                    "batch.global=64",
                    "precision.compute=bf16",
                ])
                .set(format!("parallel.tp={tp}"))
                .set(format!("parallel.pp={pp}"))
                .set(format!("parallel.dp={}", 32 / tp / pp))
                .plan()
                .expect("a valid layout")
        };
        layouts.map(plan).into()
    }

    #[test]
    fn a_machine_with_other_constants_is_learned_from_its_trials() {
        let truth = [(MachineConstant::Products, 0.7), (MachineConstant::Efficiency(Level::Cluster), 0.4)];
        let lesson = |plan: Plan| {
            let mut there = plan.clone();
            for (constant, factor) in truth {
                constant.apply(&mut there.cluster, factor);
            }
            Lesson { step_s: time(&there).expect("a known device").step_s, plan }
        };
        let lessons: Vec<Lesson> = plans().into_iter().map(lesson).collect();
        let learned = learn(&lessons).expect("enough trials");
        assert!(learned.unseen[0] > 0.2 && learned.unseen[1] < 0.05, "{learned:?}");
        let factor = |wanted: MachineConstant| {
            learned.factors.iter().find(|(constant, _)| *constant == wanted).expect("it is fitted").1
        };
        assert!((factor(MachineConstant::Products) / 0.7 - 1.0).abs() < 0.1, "{learned:?}");
        // The profile predicts as the machine does.
        let text = learned.profile(&lessons[0].plan, "a test").expect("TOML");
        let source = ConfigSource::text("")
            .sets([
                "model.preset=gpt-1.4b",
                "cluster.preset=h100",
                "batch.global=64",
                "precision.compute=bf16",
            ])
            .sets(["parallel.tp=8", "parallel.dp=4"])
            .profile("learned.toml", text);
        let plan = source.plan().expect("the profile is valid");
        let predicted = time(&plan).expect("a known device").step_s;
        let measured = lessons[3].step_s;
        assert!((predicted / measured - 1.0).abs() < 0.05, "{predicted} {measured}");
        assert!(learn(&lessons[..5]).is_none());
    }
}
