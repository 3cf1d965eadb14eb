//! The operations that end a step. The device decides from the global gradient norm whether the step is applied.

use super::LearningRate;
use crate::View;

/// A contiguous range of parameters with the same learning rate and weight decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// First element.
    pub start: usize,
    /// Elements.
    pub len: usize,
    /// The factor of the step's learning rate.
    pub rate_factor: f64,
    /// Decay λ.
    pub decay: f64,
}

/// How an update moves a weight `w` by its gradient `g`, which is clipped before, at the learning rate `r`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    /// `m = β₁·m + (1 − β₁)·g`, `v = β₂·v + (1 − β₂)·g²`, `w −= r·(λ·w + m̂ / (√v̂ + ε))` (arXiv 1711.05101).
    AdamW {
        /// β₁, β₂.
        betas: (f64, f64),
        /// ε.
        epsilon: f64,
    },
    /// `w −= r·(λ·w + sign(β₁·m + (1 − β₁)·g))`, then `m = β₂·m + (1 − β₂)·g` (arXiv 2302.06675).
    Lion {
        /// β₁, β₂.
        betas: (f64, f64),
    },
    /// `g += λ·w`, `b = μ·b + g`, `w −= r·b`; with Nesterov's momentum `w −= r·(g + μ·b)`. Without momentum there is no `b`.
    Sgd {
        /// μ.
        momentum: f64,
        /// Whether the momentum is Nesterov's.
        nesterov: bool,
    },
    /// `w −= r·(λ·w + g)`, where `g` is a direction, which is not clipped.
    Direction,
}

/// The most states of a rule.
pub const MAX_STATES: usize = 2;

impl UpdateRule {
    /// The number of states that the rule reads and writes, each with an element for every parameter.
    pub fn states(self) -> usize {
        match self {
            UpdateRule::AdamW { .. } => 2,
            UpdateRule::Lion { .. } => 1,
            UpdateRule::Sgd { momentum, .. } => usize::from(momentum > 0.0),
            UpdateRule::Direction => 0,
        }
    }

    /// Name of its kernel in profiles and traces.
    pub fn name(self) -> &'static str {
        match self {
            UpdateRule::AdamW { .. } => "adamw",
            UpdateRule::Lion { .. } => "lion",
            UpdateRule::Sgd { .. } => "sgd",
            UpdateRule::Direction => "direction",
        }
    }
}

/// One update of all parameters of a rank. It does nothing if the control's skip flag is set.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// The parameters to update, all of the same types.
    pub parameters: &'a [Parameters<'a>],
    /// Read: learning rate, gradient factor, bias corrections, skip flag ([`control`]).
    pub control: View<'a>,
    /// How weights move.
    pub rule: UpdateRule,
}

/// A flat range of parameters with their gradient and optimizer states.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<'a> {
    /// Read, `[len]`, gradients' type.
    pub gradient: View<'a>,
    /// Read and written, `[len]`, accumulator type: the master weights (the weights themselves in fp32).
    pub master: View<'a>,
    /// Read and written, `[len]` each, all of one type: as many as the rule has, in its order.
    pub states: [Option<View<'a>>; MAX_STATES],
    /// Written, `[len]`: the copy in the compute type, unless the master weights are the compute weights.
    pub weights: Option<View<'a>>,
    /// The ranges to update.
    pub segments: &'a [Segment],
}

/// Sums of squares of many gradients at once. Each part is added to its own sum, and the parts that count are added to
/// the total. A sum is not finite if any element is not.
#[derive(Clone, Copy, Debug)]
pub struct SumsOfSquares<'a> {
    /// The parts to read, all of the same type.
    pub parts: &'a [Squares<'a>],
    /// Read and written, `[1]`, accumulator type: added to.
    pub total: Option<View<'a>>,
}

/// One part of [`SumsOfSquares`].
#[derive(Clone, Copy, Debug)]
pub struct Squares<'a> {
    /// Read.
    pub from: View<'a>,
    /// Read and written, `[1]`, accumulator type: added to. Consecutive parts may share it.
    pub own: Option<View<'a>>,
    /// Whether it is added to the total.
    pub counts: bool,
}

/// Computes, on the device, the clip factor, the skip flag, the loss scale and the learning rate of a step.
#[derive(Clone, Copy, Debug)]
pub struct UpdateControl<'a> {
    /// Read and written, [`control::LEN`] elements, accumulator type.
    pub control: View<'a>,
    /// Read: the global sum of squares of the gradients (still multiplied by the squared loss scale).
    pub sum_of_squares: View<'a>,
    /// Read: the sum of the losses of all tokens.
    pub loss_sum: View<'a>,
    /// Tokens in the global batch.
    pub tokens: f64,
    /// Largest allowed gradient norm; 0 disables clipping.
    pub clip: f64,
    /// Learning-rate schedule.
    pub rate: LearningRate,
    /// β₁, β₂ of the bias corrections; 0 for a rule without them.
    pub betas: (f64, f64),
    /// How the loss scale changes; `None` keeps it constant.
    pub scaler: Option<LossScaler>,
}

/// Dynamic loss scaling: halve on overflow, double after `window` steps without overflow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    /// Steps without overflow before the scale doubles.
    pub window: u64,
    /// Largest scale.
    pub largest: f64,
}

/// The slots of the control buffer. The device updates them in every step, and the host reads them afterwards.
pub mod control {
    /// Steps done, skipped ones included.
    pub const STEP: usize = 0;
    /// Updates made (skipped steps do not count); the exponent of the bias corrections.
    pub const UPDATES: usize = 1;
    /// Loss scale of the running step. [`UpdateControl`](super::UpdateControl) replaces it by that of the next step.
    pub const LOSS_SCALE: usize = 2;
    /// Steps without overflow since the scale last changed.
    pub const GOOD_STEPS: usize = 3;
    /// 1 if this step is skipped.
    pub const SKIP: usize = 4;
    /// Steps skipped in a row.
    pub const SKIPPED_IN_A_ROW: usize = 5;
    /// Global gradient norm, unscaled, before clipping.
    pub const NORM: usize = 6;
    /// The factor of the gradients: 1/loss scale, times the clip factor.
    pub const FACTOR: usize = 7;
    /// Learning rate of this step.
    pub const RATE: usize = 8;
    /// 1 − β₁ᵗ.
    pub const CORRECTION_1: usize = 9;
    /// 1 − β₂ᵗ.
    pub const CORRECTION_2: usize = 10;
    /// Mean loss of this step.
    pub const LOSS: usize = 11;
    /// Number of slots.
    pub const LEN: usize = 12;
}
