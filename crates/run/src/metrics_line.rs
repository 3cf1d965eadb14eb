//! A line of `metrics.jsonl`, as it is written and as it is read.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use kintsugi_plan::Plan;
use serde::{Deserialize, Deserializer, Serialize};

use crate::summary::{Numbers, or_default};
use crate::{StepReport, Straggler};

/// The version of the lines. It grows if a field changes its meaning or goes; a new field leaves it as it is.
const SCHEMA: u32 = 1;

/// A line of `metrics.jsonl` as it is written.
#[derive(Serialize)]
pub struct MetricsLine<'a> {
    schema: u32,
    /// When the step was reported, in seconds since 1970.
    pub time: f64,
    /// What the step reports.
    #[serde(flatten)]
    pub report: &'a StepReport,
    /// Training samples seen so far.
    samples: u64,
    /// How often every source of the data was gone through, if it has an end.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    epochs: BTreeMap<String, f64>,
}

impl<'a> MetricsLine<'a> {
    /// The line of a step that has just been reported. `epochs` gives the epochs of every source after a number of samples.
    pub fn new(
        plan: &Plan,
        report: &'a StepReport,
        epochs: impl FnOnce(u64) -> BTreeMap<String, f64>,
    ) -> Self {
        let samples = report.tokens / plan.batch.sequence as u64;
        MetricsLine { schema: SCHEMA, time: now(), report, samples, epochs: epochs(samples) }
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A line of `metrics.jsonl` as it is read. A number that is not finite is `null` there, so every number may be missing.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Line {
    pub(crate) step: Option<u64>,
    pub(crate) time: Option<f64>,
    pub(crate) loss: Option<f64>,
    pub(crate) grad_norm: Option<f64>,
    pub(crate) lr: Option<f64>,
    pub(crate) tokens: Option<f64>,
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) step_s: Option<f64>,
    pub(crate) mfu: Option<f64>,
    pub(crate) loss_scale: Option<f64>,
    pub(crate) energy_j: Option<f64>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) skipped: bool,
    pub(crate) checkpoint_s: Option<f64>,
    #[serde(deserialize_with = "present")]
    pub(crate) validation_loss: Option<f64>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) validation_losses: Numbers<f64>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) epochs: Numbers<f64>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) stragglers: Vec<Straggler>,
    pub(crate) rollbacks: Option<u64>,
}

/// A number that the file has: not a number if it is `null` there.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(Some(Option::deserialize(from)?.unwrap_or(f64::NAN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let report = StepReport {
            step: 3,
            loss: 2.5,
            grad_norm: f64::NAN,
            lr: 3e-4,
            tokens: 96,
            tokens_per_s: 10.0,
            step_s: 0.5,
            mfu: Some(0.4),
            loss_scale: 1.0,
            skipped: true,
            host_waits: None,
            energy_j: Some(7.0),
            joules_per_token: Some(0.2),
            checkpoint_s: Some(0.1),
            validation_loss: Some(2.25),
            validation_losses: BTreeMap::from([("a".to_owned(), 2.0)]),
            stragglers: vec![Straggler { rank: 3, host: None, compute_s: 0.3, median_s: 0.2 }],
            rollbacks: Some(2),
        };
        let epochs = BTreeMap::from([("a".to_owned(), 0.5)]);
        let line = MetricsLine { schema: SCHEMA, time: 9.0, report: &report, samples: 6, epochs };
        let text = serde_json::to_string(&line).expect("it has string keys");
        let read: Line = serde_json::from_str(&text).expect("a line");
        assert_eq!((read.step, read.time, read.loss, read.grad_norm), (Some(3), Some(9.0), Some(2.5), None));
        assert_eq!((read.lr, read.tokens, read.tokens_per_s), (Some(3e-4), Some(96.0), Some(10.0)));
        assert_eq!((read.step_s, read.mfu, read.loss_scale), (Some(0.5), Some(0.4), Some(1.0)));
        assert_eq!((read.energy_j, read.checkpoint_s, read.skipped), (Some(7.0), Some(0.1), true));
        assert_eq!((read.validation_loss, read.validation_losses["a"]), (Some(2.25), Some(2.0)));
        assert_eq!(read.epochs["a"], Some(0.5));
        assert_eq!((read.stragglers, read.rollbacks), (report.stragglers, Some(2)));
    }
}
