//! The optimizer, its learning rate, and its groups of parameters.

mod groups;
mod kind;
mod matrices;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::config::ConfigError;
use crate::config::error::{invalid, short};
use crate::config::keys::RawOptimizer;
use crate::parameters::{PlacedParameter, UnitLayout};
use crate::{Run, StoredTensor};

pub(crate) use groups::check_names;
pub use groups::{ParameterGroup, ParameterUpdate};
pub use kind::{OptimizerKind, RateAdjustment};

/// An optimizer and its learning rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Optimizer {
    /// Which optimizer, with its own numbers.
    #[serde(flatten)]
    pub kind: OptimizerKind,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the end.
    pub min_lr: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Schedule after the warm-up.
    pub schedule: RateSchedule,
    /// Steps of the decay, where they were given; see [`Optimizer::decay`].
    pub decay_steps: Option<u64>,
    /// Weight decay, not applied to norms and biases.
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 for none.
    pub clip: f64,
    /// The factor of the last step's value in the moving average of the weights; 0 for none.
    pub ema: f64,
    /// Coefficient of the z-loss (arXiv 2204.02311).
    pub z_loss: f64,
    /// What is different for some parameters.
    pub groups: Vec<ParameterGroup>,
}

/// The learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RateSchedule {
    /// Cosine from `lr` to `min_lr`.
    Cosine,
    /// `lr` throughout.
    Constant,
    /// A straight line from `lr` to `min_lr`.
    Linear,
    /// `lr` · √(`warmup` / step), at least `min_lr` (arXiv 1706.03762).
    InverseSqrt,
    /// `lr`, then a straight line to `min_lr` over the last steps (warmup, stable, decay: arXiv 2404.06395).
    Wsd,
    /// From `lr` to `min_lr` by the square root of the progress, fast at first (arXiv 2405.18392).
    Sqrt,
    /// `lr`, then the same over the last steps.
    WsdSqrt,
}

/// When the learning rate falls from `lr` to `min_lr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateDecay {
    /// The last step that has `lr`, from 0.
    pub start: u64,
    /// Steps from there to the first one that has `min_lr`; at least 1.
    pub steps: u64,
}

impl Optimizer {
    /// The ranges of a unit's flat buffer whose parameters have a state, in order. If all have it, that is all of it. Otherwise parameters
    /// that follow each other are one range, with the padding between them.
    pub fn covered(&self, layout: &UnitLayout, stored: StoredTensor) -> Vec<Range<usize>> {
        let has = |placed: &PlacedParameter| self.states_of(&placed.parameter).contains(&stored);
        if layout.placed.iter().all(has) {
            return std::iter::once(0..layout.len).collect();
        }
        let neighbours = layout.placed.chunk_by(|a, b| has(a) && has(b));
        let with_state = neighbours.filter(|chunk| has(&chunk[0]));
        with_state.map(|chunk| chunk[0].range.start..chunk[chunk.len() - 1].range.end).collect()
    }

    /// Elements of a state on a rank that owns `owned` elements of a unit: as many on every rank, whichever elements it owns.
    pub fn state_elements(&self, layout: &UnitLayout, stored: StoredTensor, owned: usize) -> usize {
        self.covered(layout, stored).iter().map(Range::len).sum::<usize>().min(owned)
    }

    /// The decay in a run of `steps` steps. Without `decay_steps` the last step of the run has `min_lr`, and the decay
    /// starts with the warm-up's end, or for [`RateSchedule::Wsd`] and [`RateSchedule::WsdSqrt`] a tenth of the run before its end.
    pub fn decay(&self, steps: u64) -> RateDecay {
        let first_at_peak = self.warmup.saturating_sub(1);
        let left = steps.saturating_sub(first_at_peak + 1).max(1);
        match self.schedule {
            RateSchedule::Wsd | RateSchedule::WsdSqrt => {
                let decay = self.decay_steps.unwrap_or(steps.div_ceil(10)).clamp(1, left);
                RateDecay { start: first_at_peak + left - decay, steps: decay }
            }
            RateSchedule::Cosine
            | RateSchedule::Constant
            | RateSchedule::Linear
            | RateSchedule::InverseSqrt
            | RateSchedule::Sqrt => {
                RateDecay { start: first_at_peak, steps: self.decay_steps.unwrap_or(left) }
            }
        }
    }

    /// What the keys of `[optimizer]` say.
    pub(crate) fn resolve(raw: &RawOptimizer) -> Result<Self, ConfigError> {
        let lr = raw.lr()?;
        let min_lr = raw.min_lr()?.unwrap_or(lr / 10.0);
        if min_lr > lr {
            return Err(invalid("optimizer.min_lr", min_lr, format!("is above optimizer.lr = {lr}")));
        }
        let schedule = raw.schedule();
        Ok(Optimizer {
            kind: OptimizerKind::resolve(raw)?,
            lr,
            min_lr,
            warmup: raw.warmup()?,
            schedule,
            decay_steps: decay_steps(raw, schedule)?,
            weight_decay: raw.weight_decay()?,
            clip: clip(raw.clip())?,
            ema: raw.ema()?,
            z_loss: raw.z_loss()?,
            groups: groups::check(raw.groups.clone().unwrap_or_default())?,
        })
    }

    /// A note about what the optimizer does not reach in such a short run.
    pub(crate) fn note(&self, run: &Run) -> Option<String> {
        let (warmup, steps, lr) = (self.warmup, run.steps, self.lr);
        (run.epochs.is_none() && 0 < steps && steps < warmup).then(|| {
            let last = short(lr * steps as f64 / warmup as f64);
            format!(
                "optimizer.warmup = {warmup} is longer than run.steps = {steps}: the learning rate ends at {last} and does \
                 not reach optimizer.lr = {}",
                short(lr)
            )
        })
    }
}

/// The steps of a decay, for schedules with a decay that ends.
fn decay_steps(raw: &RawOptimizer, schedule: RateSchedule) -> Result<Option<u64>, ConfigError> {
    let rule = |name| format!("has no meaning for optimizer.schedule = \"{name}\"; leave it out");
    match (raw.decay_steps, schedule) {
        (Some(steps), RateSchedule::Constant) => {
            Err(invalid("optimizer.decay_steps", steps, rule("constant")))
        }
        (Some(steps), RateSchedule::InverseSqrt) => {
            Err(invalid("optimizer.decay_steps", steps, rule("inverse-sqrt")))
        }
        (None, _)
        | (
            _,
            RateSchedule::Cosine
            | RateSchedule::Linear
            | RateSchedule::Wsd
            | RateSchedule::Sqrt
            | RateSchedule::WsdSqrt,
        ) => raw.decay_steps(),
    }
}

/// 0 disables clipping, so no other value may become 0 on the device.
fn clip(norm: f64) -> Result<f64, ConfigError> {
    if norm == 0.0 || (1e-30..=1e30).contains(&norm) {
        return Ok(norm);
    }
    Err(invalid("optimizer.clip", short(norm), "must be 0, for no clipping, or from 1e-30 to 1e30"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decay_ends_with_the_run_unless_its_steps_are_given() {
        use RateSchedule::{Cosine, Linear, Sqrt, Wsd, WsdSqrt};
        let optimizer = crate::config::ConfigSource::demo().plan().expect("the demo").optimizer;
        let decay = |schedule, warmup, decay_steps, steps| {
            let decay = Optimizer { warmup, schedule, decay_steps, ..optimizer.clone() }.decay(steps);
            (decay.start, decay.steps)
        };
        for schedule in [Cosine, Linear, Sqrt] {
            assert_eq!(decay(schedule, 30, None, 500), (29, 470));
            assert_eq!(decay(schedule, 0, None, 500), (0, 499));
            assert_eq!(decay(schedule, 30, Some(1000), 500), (29, 1000));
            assert_eq!(decay(schedule, 30, None, 10), (29, 1));
        }
        for schedule in [Wsd, WsdSqrt] {
            assert_eq!(decay(schedule, 30, None, 500), (449, 50));
            assert_eq!(decay(schedule, 30, Some(100), 500), (399, 100));
            assert_eq!(decay(schedule, 30, Some(1000), 500), (29, 470));
            assert_eq!(decay(schedule, 0, None, 1), (0, 1));
        }
    }
}
