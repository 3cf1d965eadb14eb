//! Reports of a run: one per step, and the outcome at the end.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use kintsugi_checkpoint::{RunProgress, SpikeRecord};
use kintsugi_comm::Traffic;
use kintsugi_plan::Plan;
use kintsugi_rank::{NonFinite, NonFiniteTensor, RankMemory, ReplicationMetrics, StepMetrics};
use kintsugi_run::StepReport;
use kintsugi_spec::Cause;
use kintsugi_tensor::ops::control;
use serde::{Deserialize, Serialize};

use crate::evaluate::Losses;
use crate::loop_state::EarlyEnd;
use crate::pending_step::FinishedStep;
use crate::replication::MeasuredCopies;
use crate::{MeasuredSpan, SaveStatistics, TrainError};

/// Adds the losses of an evaluation after the step.
pub(crate) fn set_validation(report: &mut StepReport, losses: Losses) {
    report.validation_loss = Some(losses.loss);
    if losses.sources.len() > 1 {
        let losses = losses.sources.into_iter().map(|source| (source.source, source.loss));
        report.validation_losses = losses.collect();
    }
}

/// The report of a finished step, without a checkpoint or an evaluation.
pub(crate) fn step_report(plan: &Plan, finished: &FinishedStep) -> StepReport {
    let (tokens, step_s, result) = (plan.tokens_per_step(), finished.seconds, &finished.result);
    StepReport {
        step: finished.step + 1,
        loss: result.control(control::LOSS),
        grad_norm: result.control(control::NORM),
        lr: result.control(control::RATE),
        tokens: (finished.batch + 1) * tokens as u64,
        tokens_per_s: tokens as f64 / step_s,
        step_s,
        mfu: plan.mfu(step_s),
        loss_scale: result.control(control::LOSS_SCALE),
        skipped: result.control(control::SKIP) > 0.0,
        host_waits: finished.host_waits,
        energy_j: finished.joules,
        joules_per_token: finished.joules.map(|joules| joules / tokens as f64),
        checkpoint_s: None,
        validation_loss: None,
        validation_losses: BTreeMap::new(),
        stragglers: Vec::new(),
        rollbacks: None,
    }
}

/// Totals over the steps of a run. Its size does not depend on their number.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    first: Option<StepReport>,
    last: Option<StepReport>,
    /// Steps of this run.
    count: u64,
    /// The loss of step 1, which an earlier run may have done.
    loss_first: Option<f64>,
    validation_loss: Option<f64>,
    skipped: u64,
    /// Seconds of all steps but the first, which also warms up caches and pages.
    seconds: f64,
    /// Joules of the same steps, if all of them were measured.
    joules: Option<f64>,
}

impl History {
    /// The history of a run that resumes from `before`.
    pub fn new(before: &RunProgress) -> Self {
        History {
            loss_first: before.loss_first.map(f64::from),
            skipped: before.skipped,
            ..History::default()
        }
    }

    /// Takes back the counts of steps that run again, since the run has gone back to `before`.
    pub fn go_back(&mut self, before: &RunProgress) {
        self.skipped = before.skipped;
        self.loss_first = before.loss_first.map(f64::from);
    }

    pub fn add(&mut self, report: &StepReport) {
        self.count += 1;
        self.loss_first = self.loss_first.or(Some(report.loss));
        if self.first.is_some() {
            self.seconds += report.step_s;
            self.joules = self.joules.zip(report.energy_j).map(|(sum, joules)| sum + joules);
        } else {
            self.joules = Some(0.0);
            self.first = Some(report.clone());
        }
        self.last = Some(report.clone());
        self.skipped += u64::from(report.skipped);
        self.validation_loss = report.validation_loss.or(self.validation_loss);
    }

    /// Skipped steps, including those of earlier runs.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The loss of step 1, if it is finite.
    pub fn loss_first(&self) -> Option<f32> {
        // The device stores it as `f32`, so the conversion is exact.
        self.loss_first.filter(|loss| loss.is_finite()).map(|loss| loss as f32)
    }

    /// The totals at the end of the run.
    pub fn totals(&self) -> RunTotals {
        let last = self.last.as_ref();
        RunTotals {
            loss_first: self.loss_first.unwrap_or(f64::NAN),
            loss_last: last.map_or(f64::NAN, |report| report.loss),
            validation_loss: self.validation_loss,
            steps: last.map_or(0, |report| report.step),
            skipped: self.skipped,
            step_s: self.step_seconds(),
            step_joules: self.step_joules(),
            host_waits: last.and_then(|report| report.host_waits),
        }
    }

    /// The validation loss after the last step, if that step was evaluated and the loss is finite.
    pub fn last_validation_loss(&self) -> Option<f64> {
        self.last.as_ref()?.validation_loss.filter(|loss| loss.is_finite())
    }

    fn step_seconds(&self) -> Option<f64> {
        match self.count {
            0 => None,
            1 => self.first.as_ref().map(|report| report.step_s),
            count => Some(self.seconds / (count - 1) as f64),
        }
    }

    fn step_joules(&self) -> Option<f64> {
        match self.count {
            0 => None,
            1 => self.first.as_ref().and_then(|report| report.energy_j),
            count => self.joules.map(|joules| joules / (count - 1) as f64),
        }
    }
}

/// The totals of a run, as one rank sees them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RunTotals {
    loss_first: f64,
    loss_last: f64,
    validation_loss: Option<f64>,
    steps: u64,
    skipped: u64,
    step_s: Option<f64>,
    step_joules: Option<f64>,
    /// How often the host waited for the device in the last step.
    host_waits: Option<u64>,
}

/// The result of one rank.
#[derive(Serialize, Deserialize)]
pub(crate) struct RankResult {
    pub totals: RunTotals,
    /// Steps that the device replayed from a captured graph.
    pub replayed: u64,
    pub memory: RankMemory,
    /// Bytes sent in the first step.
    pub traffic: Traffic,
    /// What copying states has cost, if they are copied.
    pub copies: Option<MeasuredCopies>,
    /// Why the run ended before its last step, if it did.
    pub early_end: Option<EarlyEnd>,
    /// If the run gave up: the values of this rank that are not finite.
    pub non_finite: Option<NonFinite>,
    /// What the run remembers about spikes at its end.
    pub spikes: SpikeRecord,
    /// Why this rank could not read the tokens of the next step, if it could not.
    pub data_error: Option<Cause>,
    pub spans: Vec<MeasuredSpan>,
}

/// The outcome of a run.
#[derive(Clone, Debug)]
pub struct TrainOutcome {
    /// Measured memory, traffic, time and energy.
    pub measured: StepMetrics,
    /// Loss of step 1. For a resumed run it comes from the checkpoint.
    pub loss_first: f64,
    /// Loss of the last step.
    pub loss_last: f64,
    /// Loss on the validation split at the last evaluation.
    pub validation_loss: Option<f64>,
    /// Finished steps, including those of earlier runs.
    pub steps: u64,
    /// Steps whose update was skipped.
    pub skipped: u64,
    /// Steps of this run that the device replayed from a captured graph.
    pub replayed: u64,
    /// How often the host of rank 0 waited for its device in the last step, if it runs on one.
    pub host_waits: Option<u64>,
    /// How often the run went back to a checkpoint after a spike, including earlier runs.
    pub rollbacks: u64,
    /// Samples that it skips.
    pub skipped_samples: u64,
    /// Whether the run stopped before its last step, because it was asked to or because of its data.
    pub stopped: bool,
    /// Why the run ended early, if something failed. The steps before that are finished, and saved if possible.
    pub failure: Option<TrainError>,
    /// Counts and times of the checkpoints.
    pub saves: SaveStatistics,
    /// The ops, kernels and transfers of the traced step.
    pub spans: Vec<MeasuredSpan>,
}

impl TrainOutcome {
    pub(crate) fn new(plan: &Plan, mut results: Vec<RankResult>, saves: SaveStatistics) -> Self {
        let failure = failure(plan, &mut results);
        let mut traffic = Traffic::default();
        for result in &results {
            traffic.merge(&result.traffic);
        }
        let totals = results[0].totals.clone();
        let stopped = results[0].early_end == Some(EarlyEnd::Stopped);
        let mut measured = StepMetrics::new(results.iter().map(|result| result.memory).collect(), &traffic);
        measured.step_s = totals.step_s;
        measured.energy_j = totals.step_joules;
        measured.replication = replication(plan, &results);
        measured.tokens_per_s = measured.step_s.map(|seconds| plan.tokens_per_step() as f64 / seconds);
        TrainOutcome {
            measured,
            loss_first: totals.loss_first,
            loss_last: totals.loss_last,
            validation_loss: totals.validation_loss,
            steps: totals.steps,
            skipped: totals.skipped,
            replayed: results[0].replayed,
            host_waits: totals.host_waits,
            rollbacks: results[0].spikes.rollbacks,
            skipped_samples: results[0].spikes.skipped.count(),
            stopped,
            failure,
            saves,
            spans: results.into_iter().flat_map(|result| result.spans).collect(),
        }
    }
}

/// The copying of states as all ranks have measured it, if they have copied any.
fn replication(plan: &Plan, results: &[RankResult]) -> Option<ReplicationMetrics> {
    let copies: Vec<&MeasuredCopies> = results.iter().filter_map(|result| result.copies.as_ref()).collect();
    let seconds = copies.first()?.seconds()?;
    let mut traffic = Traffic::default();
    for copies in &copies {
        traffic.merge(&copies.traffic);
    }
    let nodes = copies.chunks(plan.nodes().1).map(|node| node.iter().map(|copies| copies.bytes).sum());
    Some(ReplicationMetrics::new(&traffic, nodes.max().unwrap_or(0), Some(seconds)))
}

/// Why a run ended early, if something failed.
fn failure(plan: &Plan, results: &mut [RankResult]) -> Option<TrainError> {
    if results[0].early_end == Some(EarlyEnd::GaveUp) {
        return Some(not_finite(plan, results));
    }
    let step = results[0].totals.steps;
    if let Some(EarlyEnd::Spike(spike)) = results[0].early_end {
        return Some(TrainError::Spike { step, spike, rollbacks: results[0].spikes.rollbacks });
    }
    let source = results.iter_mut().find_map(|result| result.data_error.take())?;
    Some(TrainError::NextBatch { step, source })
}

/// The error of a run with non-finite values, with their origin. Non-finite weights spread forwards, so the first unit that
/// has them is the origin. Non-finite gradients spread backwards, so the last unit is.
fn not_finite(plan: &Plan, results: &[RankResult]) -> TrainError {
    let bad = || results.iter().enumerate().filter_map(|(rank, result)| Some((rank, result.non_finite?)));
    let weights = bad()
        .filter(|(_, bad)| bad.what == NonFiniteTensor::Weights)
        .min_by_key(|&(rank, bad)| (bad.unit, rank));
    let first = weights.or_else(|| bad().max_by_key(|&(rank, bad)| (bad.unit, Reverse(rank))));
    TrainError::NotFinite { steps: plan.run.max_skipped, step: results[0].totals.steps, first }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::Unit;
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    fn result(bad: Option<NonFinite>) -> RankResult {
        RankResult {
            totals: RunTotals::default(),
            replayed: 0,
            memory: RankMemory::default(),
            traffic: Traffic::default(),
            copies: None,
            early_end: Some(EarlyEnd::GaveUp),
            non_finite: bad,
            spikes: SpikeRecord::default(),
            data_error: None,
            spans: Vec::new(),
        }
    }

    #[test]
    fn the_place_where_it_began_is_named() {
        // Ranks 0 to 3 are stage 0, ranks 4 to 7 stage 1.
        let plan = ConfigSource::demo().plan().expect("the demo");
        let named = |bad: &[(usize, NonFiniteTensor, Unit)]| {
            let find =
                |rank| bad.iter().find(|b| b.0 == rank).map(|&(_, what, unit)| NonFinite { what, unit });
            let results: Vec<RankResult> = (0..8).map(|rank| result(find(rank))).collect();
            match TrainOutcome::new(&plan, results, SaveStatistics::default()).failure {
                Some(TrainError::NotFinite { first: Some((rank, bad)), .. }) => (rank, bad.unit),
                other => panic!("{other:?}"),
            }
        };
        let (gradient, weights) = (NonFiniteTensor::Gradient, NonFiniteTensor::Weights);
        let gradients = [(1, gradient, Unit::Layer(1)), (6, gradient, Unit::Head), (7, gradient, Unit::Head)];
        assert_eq!(named(&gradients), (6, Unit::Head), "gradients go bad from the last stage down");
        let mixed = [(5, weights, Unit::Layer(3)), (2, weights, Unit::Layer(0)), gradients[1]];
        assert_eq!(named(&mixed), (2, Unit::Layer(0)), "bad weights come first");
        // As where schedules interleave: layers 0 and 2 are on stage 0, layers 1 and 3 on stage 1.
        let interleaved = |what| [(0, what, Unit::Layer(2)), (4, what, Unit::Layer(1))];
        assert_eq!(named(&interleaved(gradient)), (0, Unit::Layer(2)));
        assert_eq!(named(&interleaved(weights)), (4, Unit::Layer(1)));
    }

    #[test]
    fn the_first_step_is_not_timed() {
        let step = |step, step_s| StepReport { step, step_s, ..blank_report() };
        let mut history = History::default();
        history.add(&step(1, 9.0));
        assert_eq!(history.step_seconds(), Some(9.0), "unless it is the only one");
        history.add(&step(2, 1.0));
        history.add(&step(3, 2.0));
        assert_eq!(history.step_seconds(), Some(1.5));
    }

    fn blank_report() -> StepReport {
        StepReport {
            step: 0,
            loss: 0.0,
            grad_norm: 0.0,
            lr: 0.0,
            tokens: 0,
            tokens_per_s: 0.0,
            step_s: 0.0,
            mfu: None,
            loss_scale: 1.0,
            skipped: false,
            host_waits: None,
            energy_j: None,
            joules_per_token: None,
            checkpoint_s: None,
            validation_loss: None,
            validation_losses: BTreeMap::new(),
            stragglers: Vec::new(),
            rollbacks: None,
        }
    }
}
