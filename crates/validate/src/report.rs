//! The figures by which sets are judged.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::score::{Figure, Report, errors, spearman};
use super::validated::{UnsupportedRuns, ValidatedRun};

/// The bound that a figure of a set should keep.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Aim {
    set: String,
    figure: String,
    most: Option<f64>,
    least: Option<f64>,
}

static AIMS: LazyLock<Vec<Aim>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct File {
        aim: Vec<Aim>,
    }
    toml::from_str::<File>(include_str!("../data/aims.toml")).expect("the aims are legal").aim
});

/// Fewer layouts of a job are not ranked.
const MIN_RANKED: usize = 4;
/// Ranks of sixteen nodes of eight.
const SIXTEEN_NODES: usize = 128;

/// A report for each set.
pub fn reports(runs: Vec<ValidatedRun>, refused: &UnsupportedRuns) -> Vec<Report> {
    let mut order: Vec<String> = Vec::new();
    let mut sets: BTreeMap<String, Vec<ValidatedRun>> = BTreeMap::new();
    for run in runs {
        if !sets.contains_key(&run.set) {
            order.push(run.set.clone());
        }
        sets.entry(run.set.clone()).or_default().push(run);
    }
    order.extend(refused.keys().filter(|&set| !sets.contains_key(set)).cloned());
    order.into_iter().map(|set| report(&set, sets.remove(&set).unwrap_or_default(), refused)).collect()
}

fn report(set: &str, runs: Vec<ValidatedRun>, refused: &UnsupportedRuns) -> Report {
    let healthy: Vec<&ValidatedRun> =
        runs.iter().filter(|run| !run.is_outlier && run.measured_s.is_some()).collect();
    let times = times(&healthy);
    let mut figures = vec![
        Figure::of("time, mean error %", errors(&times).0),
        Figure::of("time, worst error %", errors(&times).1),
        Figure::of("time, predicted / measured", bias(&times)),
    ];
    let memories: Vec<(f64, f64)> =
        runs.iter().filter_map(|run| Some((run.predicted_memory?, run.measured_memory?))).collect();
    if !memories.is_empty() {
        figures.push(Figure::of("memory, mean error %", errors(&memories).0));
    }
    if healthy.iter().any(|run| !run.group.is_empty()) {
        figures.extend(figures_of_order(&healthy, &times));
    }
    if runs.iter().any(|run| !run.worked) {
        figures.extend(figures_of_fit(&runs));
    }
    for figure in &mut figures {
        let aim = AIMS.iter().find(|aim| aim.set == set && aim.figure == figure.name);
        (figure.aim, figure.at_least) =
            aim.map_or((None, false), |aim| (aim.most.or(aim.least), aim.least.is_some()));
    }
    Report {
        set: set.to_owned(),
        source: runs.first().map_or(String::new(), |run| run.source.clone()),
        rows: runs.len(),
        left_out: refused.get(set).map_or(0, |refused| refused.0),
        reason: refused.get(set).map(|refused| refused.1.clone()),
        outliers: runs.iter().filter(|run| run.is_outlier).count(),
        figures,
        runs,
    }
}

fn times(runs: &[&ValidatedRun]) -> Vec<(f64, f64)> {
    runs.iter().filter_map(|run| Some((run.predicted_s, run.measured_s?))).collect()
}

/// The median of predicted over measured: which side the errors are on.
fn bias(times: &[(f64, f64)]) -> f64 {
    let mut ratios: Vec<f64> = times.iter().map(|(predicted, measured)| predicted / measured).collect();
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN)
}

fn figures_of_order(healthy: &[&ValidatedRun], times: &[(f64, f64)]) -> Vec<Figure> {
    let mut groups: BTreeMap<&str, Vec<&ValidatedRun>> = BTreeMap::new();
    for run in healthy {
        groups.entry(&run.group).or_default().push(run);
    }
    let groups: Vec<Vec<&ValidatedRun>> = groups.into_values().collect();
    let picks = |most: usize| {
        let chosen = groups.iter().filter(|runs| runs.len() > 1 && runs[0].ranks <= most);
        mean(chosen.map(|runs| pick(runs)))
    };
    let ranked = groups.iter().filter(|runs| runs.len() >= MIN_RANKED);
    vec![
        Figure::of("rank correlation", spearman(times)),
        Figure::of("rank correlation in groups", mean(ranked.map(|runs| spearman(&self::times(runs))))),
        Figure::of("pick, share of the best", picks(usize::MAX)),
        Figure::of("pick up to 128 ranks", picks(SIXTEEN_NODES)),
    ]
}

/// The measured speed of the predicted best layout, as a share of the best.
fn pick(runs: &[&ValidatedRun]) -> f64 {
    let measured = |run: &&ValidatedRun| run.measured_s.unwrap_or(f64::INFINITY);
    let best = runs.iter().map(measured).fold(f64::INFINITY, f64::min);
    let picked = runs.iter().min_by(|a, b| a.predicted_s.total_cmp(&b.predicted_s));
    picked.map_or(f64::NAN, |run| best / measured(run))
}

fn figures_of_fit(runs: &[ValidatedRun]) -> Vec<Figure> {
    let share = |of: &dyn Fn(&&ValidatedRun) -> bool, whose: &dyn Fn(&&ValidatedRun) -> bool| {
        let all: Vec<&ValidatedRun> = runs.iter().filter(|run| run.fits.is_some()).filter(whose).collect();
        all.iter().filter(|run| of(run)).count() as f64 / all.len() as f64
    };
    vec![
        Figure::of("working runs predicted to fit", share(&|run| run.fits == Some(true), &|run| run.worked)),
        Figure::of("fit agreement", share(&|run| run.fits == Some(run.worked), &|_| true)),
    ]
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}
