//! The report of a step, which is the larger part of its line in `metrics.jsonl`.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Straggler;

/// The report of one step.
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
    /// Seconds of this step, from its beginning to its end, on the clock of rank 0's device. A step begins no earlier than the
    /// previous one ends. If there are several ranks, their steps take the same time in the long run, because every step
    /// contains a sum over all ranks (the norm of the gradient).
    pub step_s: f64,
    /// Model FLOPs utilisation, if the device's peak is known.
    pub mfu: Option<f64>,
    /// Loss scale after the step (1 unless fp16).
    pub loss_scale: f64,
    /// Whether the update was skipped because something was not finite.
    pub skipped: bool,
    /// How often the host waited for the device while it enqueued the step, on the rank that reports. Not on a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_waits: Option<u64>,
    /// Joules that the device used in this step, if it has a meter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// Joules per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub joules_per_token: Option<f64>,
    /// Seconds that training paused for a checkpoint, on steps that save one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_s: Option<f64>,
    /// Mean loss on the validation split, on steps that evaluate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// The validation loss of every source, if there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_losses: BTreeMap<String, f64>,
    /// Ranks that compute more slowly than the others of their stage.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stragglers: Vec<Straggler>,
    /// How often the run went back to a checkpoint after a spike, unless it never did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollbacks: Option<u64>,
}
