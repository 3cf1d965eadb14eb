//! What a run says of itself: a line per step, and the outcome at the end.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use kintsugi_checkpoint::Progress;
use kintsugi_comm::Traffic;
use kintsugi_data::DataError;
use kintsugi_plan::Plan;
use kintsugi_rank::{Bad, Figures, RankMemory};
use kintsugi_tensor::ops::control;
use serde::Serialize;

use crate::evaluate::Losses;
use crate::flight::Landed;
use crate::steps::EarlyEnd;
use crate::{Saves, Span, TrainError};

/// One step, as a person or a script sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// 1-based.
    pub step: u64,
    /// Mean loss of the step's tokens, in nats.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens seen so far.
    pub tokens: u64,
    /// Tokens per second of this step.
    pub tokens_per_s: f64,
    /// Seconds of this step: from its beginning, or the end of the one before it if that is later, to its end.
    pub step_s: f64,
    /// Model FLOPs utilisation, where the device's peak is known.
    pub mfu: Option<f64>,
    /// Loss scale after the step (1 unless fp16).
    pub loss_scale: f64,
    /// Whether the update was skipped because something was not finite.
    pub skipped: bool,
    /// Joules that the device used in this step, where it has a meter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// The same for a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub joules_per_token: Option<f64>,
    /// Seconds that training stood still for a checkpoint, on the steps that have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_s: Option<f64>,
    /// Mean loss on the validation split, on the steps that evaluate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The same for every source of it, where there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_losses: BTreeMap<String, f64>,
}

impl StepReport {
    /// Adds the losses of an evaluation after the step.
    pub(crate) fn set_validation(&mut self, losses: Losses) {
        self.validation_loss = Some(losses.loss);
        if losses.sources.len() > 1 {
            let losses = losses.sources.into_iter().map(|source| (source.source, source.loss));
            self.validation_losses = losses.collect();
        }
    }

    /// What there is to say of a step that has run, before anything else is done after it.
    pub(crate) fn new(plan: &Plan, landed: &Landed) -> Self {
        let (tokens, step_s, decided) = (plan.tokens_per_step(), landed.seconds, &landed.decided);
        StepReport {
            step: landed.step + 1,
            loss: decided.control(control::LOSS),
            grad_norm: decided.control(control::NORM),
            lr: decided.control(control::RATE),
            tokens: (landed.batch + 1) * tokens as u64,
            tokens_per_s: tokens as f64 / step_s,
            step_s,
            mfu: plan.mfu(step_s),
            loss_scale: decided.control(control::LOSS_SCALE),
            skipped: decided.control(control::SKIP) > 0.0,
            energy_j: landed.joules,
            joules_per_token: landed.joules.map(|joules| joules / tokens as f64),
            checkpoint_s: None,
            validation_loss: None,
            validation_losses: BTreeMap::new(),
        }
    }
}

/// What is kept of the steps of a run, however many there are.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    first: Option<StepReport>,
    last: Option<StepReport>,
    /// Steps of this run.
    count: u64,
    /// The loss of the very first step, before this run too.
    loss_first: Option<f64>,
    validation_loss: Option<f64>,
    skipped: u64,
    /// Seconds of all steps but the first, which warms caches and pages.
    seconds: f64,
    /// Joules of the same steps, where all of them were metered.
    joules: Option<f64>,
}

impl History {
    /// The history of a run that goes on from `before`.
    pub fn new(before: &Progress) -> Self {
        History {
            loss_first: before.loss_first.map(f64::from),
            skipped: before.skipped,
            ..History::default()
        }
    }

    pub fn add(&mut self, report: &StepReport) {
        self.count += 1;
        self.loss_first = self.loss_first.or(Some(report.loss));
        if self.first.is_some() {
            self.seconds += report.step_s;
            self.joules = self.joules.zip(report.energy_j).map(|(sum, joules)| sum + joules);
        } else {
            self.joules = report.energy_j.map(|_| 0.0);
            self.first = Some(report.clone());
        }
        self.last = Some(report.clone());
        self.skipped += u64::from(report.skipped);
        self.validation_loss = report.validation_loss.or(self.validation_loss);
    }

    /// Steps skipped, before this run too.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The loss of the first step, if it is a number.
    pub fn loss_first(&self) -> Option<f32> {
        // A device keeps it as `f32`, so nothing is lost.
        self.loss_first.filter(|loss| loss.is_finite()).map(|loss| loss as f32)
    }

    fn steps(&self) -> u64 {
        self.last.as_ref().map_or(0, |report| report.step)
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

/// What one rank brings home.
pub(crate) struct RankResult {
    pub history: History,
    /// Steps that the device repeated by heart.
    pub replayed: u64,
    pub memory: RankMemory,
    /// Sent in the first step.
    pub traffic: Traffic,
    /// Why the run ended before its last step, if it did.
    pub early_end: Option<EarlyEnd>,
    /// If it gave up, what on this rank is not finite.
    pub bad: Option<Bad>,
    /// Why this rank could not read the tokens of the next step, if so.
    pub data_error: Option<DataError>,
    pub spans: Vec<Span>,
}

/// A finished run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was measured.
    pub measured: Figures,
    /// Loss of the first step, that of the run before where this one goes on.
    pub loss_first: f64,
    /// Loss of the last step.
    pub loss_last: f64,
    /// Loss on the validation split at the last evaluation.
    pub validation_loss: Option<f64>,
    /// Steps done, those before this run included.
    pub steps: u64,
    /// Steps whose update was skipped.
    pub skipped: u64,
    /// Steps of this run that the device repeated by heart instead of having their operations enqueued.
    pub replayed: u64,
    /// Whether it stopped before the end, because it was asked to or because of its data.
    pub stopped: bool,
    /// Why it ended early, if something went wrong. Its steps up to there are done, and saved if they can be.
    pub failure: Option<TrainError>,
    /// How saving went.
    pub saves: Saves,
    /// The traced step: its ops, and kernels where the device has them.
    pub spans: Vec<Span>,
}

impl Outcome {
    pub(crate) fn new(plan: &Plan, mut results: Vec<RankResult>, saves: Saves) -> Self {
        let failure = failure(plan, &mut results);
        let mut traffic = Traffic::default();
        for result in &results {
            traffic.merge(&result.traffic);
        }
        let history = results[0].history.clone();
        let stopped = results[0].early_end == Some(EarlyEnd::Stopped);
        let mut measured = Figures::new(results.iter().map(|result| result.memory).collect(), &traffic);
        measured.step_s = history.step_seconds();
        measured.energy_j = history.step_joules();
        measured.tokens_per_s = measured.step_s.map(|seconds| plan.tokens_per_step() as f64 / seconds);
        Outcome {
            measured,
            loss_first: history.loss_first.unwrap_or(f64::NAN),
            loss_last: history.last.as_ref().map_or(f64::NAN, |report| report.loss),
            validation_loss: history.validation_loss,
            steps: history.steps(),
            skipped: history.skipped,
            replayed: results[0].replayed,
            stopped,
            failure,
            saves,
            spans: results.into_iter().flat_map(|result| result.spans).collect(),
        }
    }
}

/// Why a run ended early, if something went wrong.
fn failure(plan: &Plan, results: &mut [RankResult]) -> Option<TrainError> {
    if results[0].early_end == Some(EarlyEnd::GaveUp) {
        return Some(not_finite(plan, results));
    }
    let step = results[0].history.steps();
    let source = results.iter_mut().find_map(|result| result.data_error.take())?;
    Some(TrainError::NextBatch { step, source })
}

/// Where it began: bad weights spread forwards, so the first unit of the model that has them is named; bad gradients spread
/// backwards, so the last one is.
fn not_finite(plan: &Plan, results: &[RankResult]) -> TrainError {
    let bad = || results.iter().enumerate().filter_map(|(rank, result)| Some((rank, result.bad?)));
    let weights = bad().filter(|(_, bad)| bad.what == "weights").min_by_key(|&(rank, bad)| (bad.unit, rank));
    let first = weights.or_else(|| bad().max_by_key(|&(rank, bad)| (bad.unit, Reverse(rank))));
    TrainError::NotFinite { steps: plan.run.max_skipped, step: results[0].history.steps(), first }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::Unit;
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    fn result(bad: Option<Bad>) -> RankResult {
        RankResult {
            history: History::default(),
            replayed: 0,
            memory: RankMemory::default(),
            traffic: Traffic::default(),
            early_end: Some(EarlyEnd::GaveUp),
            bad,
            data_error: None,
            spans: Vec::new(),
        }
    }

    #[test]
    fn the_place_where_it_began_is_named() {
        // Ranks 0 to 3 are stage 0, ranks 4 to 7 stage 1.
        let plan = ConfigSource::demo().plan().expect("the demo");
        let named = |bad: &[(usize, &'static str, Unit)]| {
            let find = |rank| bad.iter().find(|b| b.0 == rank).map(|&(_, what, unit)| Bad { what, unit });
            let results: Vec<RankResult> = (0..8).map(|rank| result(find(rank))).collect();
            match Outcome::new(&plan, results, Saves::default()).failure {
                Some(TrainError::NotFinite { first: Some((rank, bad)), .. }) => (rank, bad.unit),
                other => panic!("{other:?}"),
            }
        };
        let gradients =
            [(1, "gradient", Unit::Layer(1)), (6, "gradient", Unit::Head), (7, "gradient", Unit::Head)];
        assert_eq!(named(&gradients), (6, Unit::Head), "gradients go bad from the last stage down");
        let weights = [(5, "weights", Unit::Layer(3)), (2, "weights", Unit::Layer(0)), gradients[1]];
        assert_eq!(named(&weights), (2, Unit::Layer(0)), "bad weights come first");
        // As where schedules interleave: layers 0 and 2 are on stage 0, layers 1 and 3 on stage 1.
        let interleaved = |what| [(0, what, Unit::Layer(2)), (4, what, Unit::Layer(1))];
        assert_eq!(named(&interleaved("gradient")), (0, Unit::Layer(2)));
        assert_eq!(named(&interleaved("weights")), (4, Unit::Layer(1)));
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
            energy_j: None,
            joules_per_token: None,
            checkpoint_s: None,
            validation_loss: None,
            validation_losses: BTreeMap::new(),
        }
    }
}
