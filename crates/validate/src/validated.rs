//! Runs beside their predictions.

use std::collections::BTreeMap;

use kintsugi_comm::Collective;
use kintsugi_plan::config::ConfigError;
use kintsugi_plan::{Axis, Group, Mesh, Plan};
use kintsugi_simulate::cost::DeviceModel;
use kintsugi_simulate::{
    Coverage, Timing, TracedStep, Unknowns, collective_seconds, link_times, memory_by_stage, predict, time,
};
use kintsugi_tensor::DType;
use kintsugi_tensor::paper::{Kernel, KernelKind};
use rayon::prelude::*;
use serde::Serialize;

use super::constants::Constants;
use super::description::{Kind, MemoryOf};
use super::device;
use super::run::Run;

/// A run with its prediction. Times are in seconds, memory in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct ValidatedRun {
    /// The set.
    #[serde(skip)]
    pub set: String,
    /// The origin of the measurement.
    #[serde(skip)]
    pub source: String,
    /// The name of the run.
    pub name: String,
    /// Layouts of the same job.
    #[serde(skip)]
    pub group: String,
    /// The number of ranks.
    pub ranks: usize,
    /// Measured time, unless the run failed.
    pub measured_s: Option<f64>,
    /// Predicted time.
    pub predicted_s: f64,
    /// What may make the step faster or slower because it was not measured, if the range was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknowns: Option<Unknowns>,
    /// Its parts, for a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
    /// Measured memory.
    pub measured_memory: Option<f64>,
    /// Predicted memory of the stage that was measured.
    pub predicted_memory: Option<f64>,
    /// Whether the fullest rank is predicted to fit.
    pub fits: Option<bool>,
    /// Whether the run worked.
    pub worked: bool,
    /// Whether a slot took over twice as long as that of the same layout elsewhere.
    pub is_outlier: bool,
}

/// What to predict of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PredictionScope {
    /// Only time.
    Time,
    /// Time and its range.
    Range,
    /// Time and memory.
    All,
}

/// Runs that the engine does not support: their number and the first reason, by set.
pub type UnsupportedRuns = BTreeMap<String, (usize, String)>;

/// Why a run is not predicted.
#[derive(Debug, thiserror::Error)]
pub enum PredictionError {
    /// The engine does not support the layout.
    #[error(transparent)]
    Layout(#[from] ConfigError),
    /// A column of the row is empty or missing.
    #[error("its row has no {0}")]
    MissingColumn(&'static str),
    /// The speed of the device is unknown.
    #[error("the speed of its device is unknown")]
    UnknownSpeed,
}

/// Predicts runs, and says which it cannot predict.
pub fn predict_runs(
    runs: &[Run],
    constants: &Constants,
    over: &[String],
    wanted: PredictionScope,
) -> (Vec<ValidatedRun>, UnsupportedRuns) {
    let all: Vec<Result<ValidatedRun, PredictionError>> =
        runs.par_iter().map(|run| one(run, constants, over, wanted)).collect();
    let mut refused = UnsupportedRuns::new();
    let mut predicted = Vec::new();
    for (run, result) in runs.iter().zip(all) {
        match result {
            Ok(run) => predicted.push(run),
            Err(reason) => {
                refused.entry(run.set.clone()).or_insert((0, format!("{}: {reason}", run.name))).0 += 1;
            }
        }
    }
    (predicted, refused)
}

fn one(
    run: &Run,
    constants: &Constants,
    over: &[String],
    wanted: PredictionScope,
) -> Result<ValidatedRun, PredictionError> {
    match run.kind {
        Kind::Step => step(run, constants, over, wanted),
        Kind::Product | Kind::AllReduce => operation(run, constants, over),
    }
}

fn step(
    run: &Run,
    constants: &Constants,
    over: &[String],
    wanted: PredictionScope,
) -> Result<ValidatedRun, PredictionError> {
    let plan = run.plan(constants, over)?;
    let timing = if run.worked { time(&plan) } else { None };
    let unknowns = |timing: &Timing| Unknowns::of(&plan, timing, link_times(&plan));
    let unknowns = timing.as_ref().filter(|_| wanted == PredictionScope::Range).map(unknowns);
    let memory = if wanted == PredictionScope::All { Some(memory(run, constants, over)?) } else { None };
    Ok(ValidatedRun {
        unknowns,
        measured_memory: run.memory(),
        predicted_memory: memory.as_ref().map(|memory| memory.0),
        fits: memory.and_then(|memory| memory.1),
        ..timed(run, &plan, timing)
    })
}

fn timed(run: &Run, plan: &Plan, timing: Option<Timing>) -> ValidatedRun {
    ValidatedRun {
        ranks: plan.mesh.ranks(),
        measured_s: run.seconds(plan),
        predicted_s: timing.map_or(f64::NAN, |timing| timing.step_s),
        timing,
        ..named(run)
    }
}

/// The traces of a run's plan, for predictions with many values of the constants; `None` for a single operation, and if the
/// engine does not support the layout.
pub fn traced_step(run: &Run) -> Option<TracedStep> {
    let plan = Some(run).filter(|run| run.kind == Kind::Step)?.plan(&Constants::default(), &[]).ok()?;
    Some(TracedStep::new(&plan))
}

/// The predicted time of a run, by its traces if there are any.
pub fn predicted_time(
    run: &Run,
    traced: Option<&TracedStep>,
    constants: &Constants,
) -> Result<ValidatedRun, PredictionError> {
    let Some(traced) = traced else { return one(run, constants, &[], PredictionScope::Time) };
    let plan = run.plan(constants, &[])?;
    Ok(timed(run, &plan, traced.time(&plan)))
}

/// Memory of the measured stage, and whether the fullest fits.
fn memory(run: &Run, constants: &Constants, over: &[String]) -> Result<(f64, Option<bool>), PredictionError> {
    let plan = run.memory_plan(constants, over)?;
    let stages = memory_by_stage(&plan, &predict(&plan, device(&plan), Coverage::ShortStep));
    let fullest = stages.iter().copied().fold(0.0, f64::max);
    let measured = match run.memory_of {
        MemoryOf::Fullest => fullest,
        MemoryOf::First => stages[0],
        MemoryOf::Last => stages[stages.len() - 1],
    };
    Ok((measured, plan.cluster.device.planned_memory().map(|most| fullest <= most as f64)))
}

/// A single operation on the cluster of a row.
fn operation(run: &Run, constants: &Constants, over: &[String]) -> Result<ValidatedRun, PredictionError> {
    let number = |column: &'static str| run.row.number(column).ok_or(PredictionError::MissingColumn(column));
    let mut device = run.clone();
    device.settings =
        vec!["model.preset=demo".to_owned(), format!("cluster.preset={}", run.row.text("device"))];
    let mut plan = device.plan(constants, over)?;
    let (ranks, predicted, measured) = if run.kind == Kind::AllReduce {
        let ranks = number("ranks")? as usize;
        plan.mesh = Mesh::ONE.with(Axis::Tensor, ranks);
        let seconds = collective_seconds(&plan, Group::TENSOR, Collective::AllReduce, number("bytes")?);
        (ranks, seconds, number("time_s")?)
    } else {
        let [m, n, k] = [number("m")?, number("n")?, number("k")?];
        let reached = number("efficiency")? * number("peak_tflops")? * 1e12;
        (
            1,
            product_seconds(&plan, [m, n, k]).ok_or(PredictionError::UnknownSpeed)?,
            2.0 * m * n * k / reached,
        )
    };
    Ok(ValidatedRun { ranks, measured_s: Some(measured), predicted_s: predicted, ..named(run) })
}

/// Seconds of a 16-bit product of m × n sums of k terms.
fn product_seconds(plan: &Plan, [m, n, k]: [f64; 3]) -> Option<f64> {
    let device = DeviceModel::new(&plan.cluster.device, &plan.framework)?.in_bursts(&plan.cluster.device);
    let bytes = (2.0 * (m * k + n * k + m * n)) as u64;
    let kind = KernelKind::Product { m: m as usize, n: n as usize, k: k as usize, dtype: DType::BF16 };
    Some(device.seconds(&Kernel { name: "linear", flops: (2.0 * m * n * k) as u64, bytes, kind }))
}

fn named(run: &Run) -> ValidatedRun {
    ValidatedRun {
        set: run.set.clone(),
        source: run.source.clone(),
        group: run.group.clone(),
        worked: run.worked,
        is_outlier: run.is_outlier,
        measured_s: None,
        ..ValidatedRun::of(&run.name, 1, f64::NAN, f64::NAN, None)
    }
}

impl ValidatedRun {
    /// A run that worked, with its times.
    pub fn of(name: &str, ranks: usize, predicted: f64, measured: f64, timing: Option<Timing>) -> Self {
        ValidatedRun {
            set: String::new(),
            source: String::new(),
            name: name.to_owned(),
            group: String::new(),
            ranks,
            measured_s: Some(measured),
            predicted_s: predicted,
            unknowns: None,
            timing,
            measured_memory: None,
            predicted_memory: None,
            fits: None,
            worked: true,
            is_outlier: false,
        }
    }
}
