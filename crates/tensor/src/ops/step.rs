//! The operations that end a step: what it does is decided on the device, from the global norm.

use crate::View;

/// One parameter group for [`AdamW`]: a contiguous run with one decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// First element.
    pub start: usize,
    /// Elements.
    pub len: usize,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// One `AdamW` update (arXiv 1711.05101) of all parameters of a rank, skipped where the control says so.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<'a> {
    /// What is updated; all of the same types.
    pub parameters: &'a [Parameters<'a>],
    /// Read: learning rate, gradient factor, bias corrections, skip flag ([`control`]).
    pub control: View<'a>,
    /// β₁, β₂.
    pub betas: (f64, f64),
    /// ε.
    pub epsilon: f64,
    /// Decay λ.
    pub weight_decay: f64,
}

/// A flat run of parameters with their gradient and states.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<'a> {
    /// Read, `[len]`, gradients' type.
    pub gradient: View<'a>,
    /// Read and written, `[len]`, accumulator type: the master weights (the weights themselves in fp32).
    pub master: View<'a>,
    /// Read and written, `[len]`.
    pub first_moment: View<'a>,
    /// Read and written, `[len]`.
    pub second_moment: View<'a>,
    /// Written, `[len]`: the copy in the compute type, where it is not the master itself.
    pub weights: Option<View<'a>>,
    /// Runs with and without decay.
    pub segments: &'a [Segment],
}

/// Sums of squares of many gradients at once: of each into its own place, and of those that count into the total.
/// Not finite if any element is not.
#[derive(Clone, Copy, Debug)]
pub struct SumsOfSquares<'a> {
    /// What is read; all of the same type.
    pub parts: &'a [Squares<'a>],
    /// Read and written, `[1]`, accumulator type: added to.
    pub total: Option<View<'a>>,
}

/// One part of [`SumsOfSquares`].
#[derive(Clone, Copy, Debug)]
pub struct Squares<'a> {
    /// Read.
    pub from: View<'a>,
    /// Read and written, `[1]`, accumulator type: added to. Parts that follow each other may share it.
    pub own: Option<View<'a>>,
    /// Whether the total counts it.
    pub counts: bool,
}

/// Decides, on the device, what the step does: clip factor, skip, loss scale, learning rate.
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
    /// Largest allowed norm; 0 for none.
    pub clip: f64,
    /// Learning rate schedule.
    pub rate: LearningRate,
    /// β₁, β₂, for the bias corrections.
    pub betas: (f64, f64),
    /// How the loss scale moves; `None` keeps it.
    pub scaler: Option<LossScaler>,
}

/// Warm-up from zero to `peak`, which its last step has, then half a cosine to `floor`, which the last step has (or
/// constant). Without a warm-up the first step has `peak`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// Highest rate.
    pub peak: f64,
    /// Rate of the last step.
    pub floor: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Steps in all.
    pub steps: u64,
    /// Cosine decay; otherwise constant after the warm-up.
    pub cosine: bool,
}

impl LearningRate {
    /// The rate of 0-based step `step`.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        if !self.cosine {
            return self.peak;
        }
        let first_at_peak = self.warmup.saturating_sub(1);
        let span = self.steps.saturating_sub(first_at_peak + 1).max(1) as f64;
        let progress = ((step - first_at_peak) as f64 / span).min(1.0);
        self.floor + (self.peak - self.floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
    }
}

/// Dynamic loss scaling: halve on overflow, double after `window` good steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    /// Good steps before the scale doubles.
    pub window: u64,
    /// Largest scale.
    pub largest: f64,
}

/// The slots of the control buffer: what a step needs to know and the host reads afterwards.
pub mod control {
    /// Steps done, skipped ones included.
    pub const STEP: usize = 0;
    /// Updates made (for the bias corrections).
    pub const UPDATES: usize = 1;
    /// Loss scale of the running step, and once it is decided what the step does, of the next.
    pub const LOSS_SCALE: usize = 2;
    /// Good steps since the scale last moved.
    pub const GOOD_STEPS: usize = 3;
    /// 1 if this step is skipped.
    pub const SKIP: usize = 4;
    /// Steps skipped in a row.
    pub const SKIPPED_IN_A_ROW: usize = 5;
    /// Global gradient norm, unscaled, before clipping.
    pub const NORM: usize = 6;
    /// What gradients are multiplied with: 1/loss scale and clipping.
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
