//! Fits constants to measured rows, and repeats the fit without one source to see how predictions carry over.
//!
//! The search is a coordinate search on a logarithmic scale: it multiplies one constant at a time, keeps what lowers the
//! error, and takes smaller factors when nothing does. It has no random numbers, so it gives the same result every time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use kintsugi_simulate::TracedStep;
use kintsugi_spec::Spread;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::constants::{Constant, Constants};
use super::description::Kind;
use super::run::Run;
use super::validated::{PredictionScope, ValidatedRun, predict_runs, predicted_time, traced_step};

/// The fits, as data.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fits {
    stage: Vec<Stage>,
}

/// Constants that are fitted together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stage {
    name: String,
    #[serde(default)]
    sets: Vec<String>,
    /// The largest error that a row should have, as a share. What the furthest row has beyond it counts twenty times.
    #[serde(default)]
    within: Option<f64>,
    constants: Vec<Entry>,
}

/// A constant of one or more presets.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    keys: Vec<String>,
    start: f64,
    least: f64,
    most: f64,
    #[serde(default)]
    without: Option<f64>,
    #[serde(default)]
    with_published: bool,
    why: String,
}

static FITS: LazyLock<Fits> =
    LazyLock::new(|| toml::from_str(include_str!("../data/fit.toml")).expect("the fits are legal"));

/// A fitted constant.
#[derive(Clone, Debug, Serialize)]
pub struct FittedConstant {
    /// The presets' keys, as `cluster.a100.device.matmul`.
    pub keys: Vec<String>,
    /// Its value.
    pub value: f64,
    /// What it describes.
    pub why: String,
    /// The sets that it was fitted on; empty if their source is left out.
    pub sets: Vec<String>,
    /// Mean error of these rows, in percent.
    pub error: f64,
}

/// The result of a fit.
#[derive(Clone, Debug, Default)]
pub struct Fit {
    /// The values.
    pub constants: Constants,
    /// Each constant, with what it was fitted on.
    pub fitted: Vec<FittedConstant>,
}

/// How a source is predicted by constants that were fitted without it.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    /// The source.
    pub source: String,
    /// Its healthy steps.
    pub rows: usize,
    /// Mean error of its time in percent, if it is part of the fit.
    pub seen: f64,
    /// The same if it is left out.
    pub unseen: f64,
    /// Median of predicted over measured if it is left out.
    pub bias: f64,
    /// Of its steps in percent: how many are inside the range that follows from the other sources.
    pub inside: f64,
    /// Median width of that range, high over low.
    pub width: f64,
    /// Frameworks without another source.
    pub unknown: Vec<String>,
    /// Its steps, predicted without it.
    pub runs: Vec<ValidatedRun>,
}

/// Rows of each set that a fit uses at most, spread evenly over the set.
const MAX_ROWS: usize = 60;
/// The same for constants of clusters.
const MAX_ROWS_OF_CLUSTERS: usize = 128;
/// Factors of the search, from coarse to fine.
const FACTORS: [f64; 4] = [1.4, 1.15, 1.05, 1.02];
/// The largest error of a row that counts, as a logarithm, so that outliers do not decide.
const MAX_ERROR: f64 = 0.7;

/// Fits every constant on the runs, except those of the source that is left out. `on_stage` gets the name of each stage.
pub fn fit(runs: &[Run], leave_out: Option<&str>, on_stage: &mut dyn FnMut(&str)) -> Fit {
    fit_from(runs, leave_out, None, on_stage)
}

/// The same. Stages that `earlier` fitted on the same rows, with the same devices, keep its values.
fn fit_from(
    runs: &[Run],
    leave_out: Option<&str>,
    earlier: Option<&Fit>,
    on_stage: &mut dyn FnMut(&str),
) -> Fit {
    let known: Vec<Run> = runs.iter().filter(|run| Some(run.source.as_str()) != leave_out).cloned().collect();
    let mut fit = Fit::default();
    let mut same_devices = true;
    for stage in &FITS.stage {
        on_stage(&stage.name);
        let (rows, before) = (stage.rows(&known), stage.rows(runs));
        let same = rows.len() == before.len();
        match earlier.filter(|_| same && same_devices) {
            Some(earlier) => fit.keep(stage, earlier),
            None if rows.is_empty() => fit.set_without(stage),
            None => fit.search(stage, &rows),
        }
        same_devices &= same || !stage.is_of_clusters();
    }
    fit
}

/// The number of stages of a fit.
pub fn stages() -> usize {
    FITS.stage.len()
}

/// Predicts each source by constants that are fitted without it.
pub fn leave_each_out(runs: &[Run], on_stage: &mut dyn FnMut(&str)) -> Vec<LeftOut> {
    let seen = fit(runs, None, on_stage);
    let of_steps = runs.iter().filter(|run| run.kind == Kind::Step);
    let sources: BTreeSet<&str> = of_steps.map(|run| run.source.as_str()).collect();
    let one = |source: &&str| {
        let rows: Vec<Run> = runs
            .iter()
            .filter(|run| {
                run.source == **source && run.kind == Kind::Step && run.part_of.is_none() && run.worked
            })
            .cloned()
            .collect();
        let unseen = fit_from(runs, Some(source), Some(&seen), on_stage);
        let others: Vec<Run> = runs.iter().filter(|run| run.source != **source).cloned().collect();
        let unknown: BTreeSet<&str> = frameworks(runs).difference(&frameworks(&others)).copied().collect();
        let predicted = |fit: &Fit, wanted| predict_runs(&rows, &fit.constants, &[], wanted).0;
        let (before, runs) =
            (predicted(&seen, PredictionScope::Time), predicted(&unseen, PredictionScope::Range));
        let ratios: Vec<f64> = runs.iter().filter_map(ratio).collect();
        LeftOut {
            source: (*source).to_owned(),
            rows: ratios.len(),
            seen: percent(&before.iter().filter_map(ratio).collect::<Vec<_>>()),
            unseen: percent(&ratios),
            bias: median(ratios),
            inside: f64::NAN,
            width: f64::NAN,
            unknown: unknown.iter().map(|&framework| framework.to_owned()).collect(),
            runs,
        }
    };
    let mut left_out: Vec<LeftOut> = sources.iter().map(one).collect();
    // Some sources have only memory.
    left_out.retain(|source| source.rows > 0);
    add_ranges(&mut left_out);
    left_out
}

/// Adds how many steps of each source are inside the range that follows from the others.
fn add_ranges(sources: &mut [LeftOut]) {
    for i in 0..sources.len() {
        let others = sources.iter().enumerate().filter(|&(j, _)| j != i).map(|(_, source)| source);
        let spread = spread_of_sources(others);
        let source = &mut sources[i];
        let in_range: Vec<(bool, f64)> = source.runs.iter().filter_map(|run| in_range(run, spread)).collect();
        let inside = in_range.iter().filter(|(inside, _)| *inside).count();
        source.inside = 100.0 * inside as f64 / in_range.len() as f64;
        source.width = median(in_range.into_iter().map(|(_, width)| width).collect());
    }
}

/// What host and links do not explain of the errors on some sources. Every source counts the same.
fn spread_of_sources<'a>(sources: impl Iterator<Item = &'a LeftOut>) -> Spread {
    let of_source = |source: &LeftOut| {
        let errors: Vec<f64> = source.runs.iter().filter_map(unexplained).collect();
        let weight = 1.0 / errors.len() as f64;
        errors.into_iter().map(|error| (error, weight)).collect::<Vec<_>>()
    };
    Spread::of(sources.flat_map(of_source).collect())
}

/// What host and links do not explain of a run's error.
fn unexplained(run: &ValidatedRun) -> Option<f64> {
    Some(run.unknowns?.unexplained(-ratio(run)?.ln()))
}

/// Whether the measured time of a run is in its range, and the width of the range.
fn in_range(run: &ValidatedRun, spread: Spread) -> Option<(bool, f64)> {
    let [low, high] = run.unknowns?.factors(spread);
    let measured = 1.0 / ratio(run)?;
    Some(((low..=high).contains(&measured), high / low))
}

impl Stage {
    /// The rows that it is fitted on.
    fn rows(&self, runs: &[Run]) -> Vec<Run> {
        let most = if self.is_of_clusters() { MAX_ROWS_OF_CLUSTERS } else { MAX_ROWS };
        of_sets(runs, &self.sets, most)
    }

    fn is_of_clusters(&self) -> bool {
        self.constants.iter().flat_map(Entry::constants).any(|constant| constant.table == "cluster")
    }
}

impl Fit {
    /// Takes the values of a stage from another fit.
    fn keep(&mut self, stage: &Stage, other: &Fit) {
        for entry in &stage.constants {
            for constant in entry.constants() {
                let value = other.constants.get(&constant);
                if let Some(value) = value {
                    self.constants.set(&constant, value);
                }
            }
        }
    }

    fn set_without(&mut self, stage: &Stage) {
        for entry in &stage.constants {
            if let Some(value) = entry.without {
                entry.set(&mut self.constants, value);
            }
        }
    }

    fn search(&mut self, stage: &Stage, rows: &[Run]) {
        let rows = &traced(rows);
        let mut values: Vec<f64> = stage.constants.iter().map(|entry| entry.start).collect();
        let mut best = self.error(stage, rows, &values);
        for factor in FACTORS {
            let mut better = true;
            while better {
                better = false;
                for i in 0..values.len() {
                    for change in [factor, 1.0 / factor] {
                        let Entry { least, most, .. } = stage.constants[i];
                        let mut trial = values.clone();
                        trial[i] = (values[i] * change).clamp(least, most);
                        let error = self.error(stage, rows, &trial);
                        if error < best - 1e-6 {
                            (best, values, better) = (error, trial, true);
                            break;
                        }
                    }
                }
            }
        }
        let sets: BTreeSet<&str> = rows.iter().map(|row| row.run.set.as_str()).collect();
        for (entry, &found) in stage.constants.iter().zip(&values) {
            let published = entry.without.filter(|_| entry.with_published);
            let value = published.map_or(found, |published| (found * published).sqrt());
            entry.set(&mut self.constants, value);
            self.fitted.push(FittedConstant {
                keys: entry.keys.clone(),
                value,
                why: entry.why.clone(),
                sets: sets.iter().map(|&set| set.to_owned()).collect(),
                error: 100.0 * best,
            });
        }
    }

    /// The error of a stage's rows with these values of its constants: the mean over its sources of the mean over their sets.
    fn error(&self, stage: &Stage, rows: &[TracedRun], values: &[f64]) -> f64 {
        let mut constants = self.constants.clone();
        for (entry, &value) in stage.constants.iter().zip(values) {
            entry.set(&mut constants, value);
        }
        let ratios: Vec<Option<f64>> = rows.par_iter().map(|row| row.ratio(&constants)).collect();
        let mut sources: BTreeMap<&str, BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
        let mut furthest = 0.0_f64;
        for (TracedRun { run, .. }, ratio) in rows.iter().zip(ratios) {
            let Some(ratio) = ratio else { continue };
            let sets = sources.entry(&run.source).or_default();
            sets.entry(&run.set).or_default().push(ratio.ln().abs().min(MAX_ERROR));
            let beyond = stage.within.map_or(0.0, |most| (ratio - 1.0).abs() - most);
            furthest = furthest.max(beyond);
        }
        if sources.is_empty() {
            return f64::INFINITY;
        }
        let of_sets = |sets: &BTreeMap<&str, Vec<f64>>| mean(sets.values().map(|e| mean(e.iter().copied())));
        mean(sources.values().map(of_sets)) + 20.0 * furthest
    }
}

/// A run with the traces of its plan, on which the fitted constants have no influence.
struct TracedRun<'a> {
    run: &'a Run,
    step: Option<TracedStep>,
}

fn traced(rows: &[Run]) -> Vec<TracedRun<'_>> {
    let traced = |run| TracedRun { run, step: traced_step(run) };
    rows.par_iter().map(traced).collect()
}

impl TracedRun<'_> {
    /// Predicted over measured time.
    fn ratio(&self, constants: &Constants) -> Option<f64> {
        ratio(&predicted_time(self.run, self.step.as_ref(), constants).ok()?)
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

impl Entry {
    fn set(&self, constants: &mut Constants, value: f64) {
        self.constants().for_each(|constant| constants.set(&constant, value));
    }

    fn constants(&self) -> impl Iterator<Item = Constant> + '_ {
        self.keys.iter().map(|key| Constant::parse(key).expect("a key has a table, a preset and a key"))
    }
}

fn frameworks(runs: &[Run]) -> BTreeSet<&str> {
    runs.iter().filter(|run| run.kind == Kind::Step).map(Run::framework).collect()
}

/// The rows of some sets, at most a few of each.
fn of_sets(runs: &[Run], sets: &[String], most: usize) -> Vec<Run> {
    let of = |set: &String| {
        spread(runs.iter().filter(|run| run.set == *set && run.worked && !run.is_outlier).collect(), most)
    };
    sets.iter().flat_map(of).collect()
}

fn spread(rows: Vec<&Run>, most: usize) -> Vec<Run> {
    let step = rows.len().div_ceil(most).max(1);
    rows.into_iter().step_by(step).cloned().collect()
}

fn ratio(run: &ValidatedRun) -> Option<f64> {
    let ratio = run.predicted_s / run.measured_s.filter(|_| !run.is_outlier)?;
    Some(ratio).filter(|ratio| ratio.is_finite() && *ratio > 0.0)
}

fn percent(ratios: &[f64]) -> f64 {
    100.0 * ratios.iter().map(|ratio| (ratio - 1.0).abs()).sum::<f64>() / ratios.len() as f64
}

fn median(mut ratios: Vec<f64>) -> f64 {
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use kintsugi_spec::presets;

    use super::*;

    #[test]
    fn every_fitted_constant_is_a_key_of_a_preset() {
        for constant in FITS.stage.iter().flat_map(|stage| &stage.constants).flat_map(Entry::constants) {
            let found = match constant.table.as_str() {
                "cluster" => presets::cluster(&constant.preset),
                _ => presets::framework(&constant.preset),
            };
            let text = found.unwrap_or_else(|error| panic!("{error}")).text;
            let table: toml::Table = toml::from_str(text).unwrap();
            let mut value = Some(&table[&constant.table]);
            for key in constant.key.split('.') {
                value = value.and_then(|value| value.get(key));
            }
            assert!(value.is_some_and(toml::Value::is_float), "{constant:?} is not in its preset");
        }
    }
}
