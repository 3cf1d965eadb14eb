//! `summary.json`, as it is written and as it is read.

use std::collections::BTreeMap;
use std::path::Path;

use kintsugi_rank::StepMetrics;
use kintsugi_spec::output::write_target;
use serde::{Deserialize, Deserializer, Serialize};

use crate::files::SUMMARY;
use crate::{RestartSummary, RunFolderError};

/// The contents of `summary.json` as they are written.
#[derive(Serialize)]
#[allow(missing_docs, reason = "the names of summary.json")]
pub struct Summary<'a> {
    pub params: u64,
    pub ranks: usize,
    pub steps: u64,
    pub skipped: u64,
    pub stopped: bool,
    /// The signal that asked it to stop, if this process got one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<&'static str>,
    pub failure: Option<String>,
    pub loss_first: f64,
    pub loss_last: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_floor: Option<f64>,
    pub validation_loss: Option<f64>,
    pub resumed_after: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts: Option<RestartSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollbacks: Option<RollbackSummary>,
    pub checkpoints: SavingSummary<'a>,
    pub predicted: &'a StepMetrics,
    pub measured: &'a StepMetrics,
}

impl Summary<'_> {
    /// Writes it into the run's folder.
    pub fn write(&self, out: &Path) -> Result<(), RunFolderError> {
        let path = out.join(SUMMARY);
        let text = serde_json::to_string_pretty(self).expect("a summary has string keys") + "\n";
        write_target(&path, text.as_bytes()).map_err(|error| RunFolderError::file("write", &path, error))
    }
}

/// What followed loss spikes.
#[derive(Serialize)]
#[allow(missing_docs, reason = "the names of summary.json")]
pub struct RollbackSummary {
    pub rollbacks: u64,
    pub skipped_samples: u64,
}

/// The results of saving.
#[derive(Serialize)]
#[allow(missing_docs, reason = "the names of summary.json")]
pub struct SavingSummary<'a> {
    pub last: Option<&'a Path>,
    pub saved: u64,
    pub failed: u64,
    pub blocked_s: f64,
    pub write_s: f64,
}

/// What is read of `summary.json`. A number that is not finite is `null` there, so every `null` is a missing value.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "the names of summary.json")]
pub struct RunSummary {
    #[serde(deserialize_with = "or_default")]
    pub stopped: bool,
    pub stopped_by: Option<String>,
    pub failure: Option<String>,
    pub loss_floor: Option<f64>,
    #[serde(deserialize_with = "or_default")]
    pub predicted: Figures,
    #[serde(deserialize_with = "or_default")]
    pub measured: Figures,
}

/// Memory, traffic, time and energy of a step.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "the names of summary.json")]
pub struct Figures {
    #[serde(deserialize_with = "ranks")]
    pub peak_bytes: Vec<BTreeMap<String, u64>>,
    #[serde(deserialize_with = "levels")]
    pub comm_bytes: BTreeMap<String, BTreeMap<String, u64>>,
    pub step_s: Option<f64>,
    pub tokens_per_s: Option<f64>,
    pub energy_j: Option<f64>,
}

/// A value, or its default if the file has `null` in its place.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Names and numbers as a file has them.
pub(crate) type Numbers<T> = BTreeMap<String, Option<T>>;

/// Bytes by name, without those that are `null`.
fn bytes(numbers: Option<Numbers<u64>>) -> BTreeMap<String, u64> {
    numbers.into_iter().flatten().filter_map(|(name, bytes)| Some((name, bytes?))).collect()
}

fn ranks<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<BTreeMap<String, u64>>, D::Error> {
    let ranks: Vec<Option<Numbers<u64>>> = or_default(from)?;
    Ok(ranks.into_iter().map(bytes).collect())
}

fn levels<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, BTreeMap<String, u64>>, D::Error> {
    let levels: BTreeMap<String, Option<Numbers<u64>>> = or_default(from)?;
    Ok(levels.into_iter().map(|(level, operations)| (level, bytes(operations))).collect())
}
