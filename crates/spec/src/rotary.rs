//! How models scale the frequencies of rotary positions (arXiv 2104.09864) to extend their context.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use crate::key::spec_table;

/// The kind of a scaling: `rope_type` of transformers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RotaryScalingKind {
    /// Low frequencies are divided, high ones stay, and those in between are blended by how often they turn (Llama 3.1).
    #[default]
    Llama3,
    /// The same, blended by their place among all frequencies, and queries and keys grow (arXiv 2309.00071).
    Yarn,
    /// All frequencies are divided (arXiv 2306.15595).
    Linear,
}

spec_table! {
    /// The scaling of rotary frequencies with which a model extends its context.
    ///
    /// A frequency turns once in `2π / frequency` positions. If it turns fewer than `low` times in `positions`, it is divided by
    /// `factor`. If it turns more than `high` times, it stays. In between, the two are blended.
    #[derive(Copy)]
    pub struct RotaryScaling {
        /// `"llama3"`, `"yarn"`, `"linear"`: how rotary frequencies are scaled, as `rope_type` of transformers, in
        /// [families](huggingface.md#families) like llama, except phi3
        kind: RotaryScalingKind, else "none; `\"llama3\"` if another of these keys is given";
        /// 1 to 1e6: low rotary frequencies are divided by this, and all of them if `kind = "linear"`
        factor: f64, default 8.0, else "none; 8 if another of these keys is given";
        /// 1e-6 to 1e6: frequencies that turn fewer times than this in `rotary_scaling.positions` are low
        /// (`low_freq_factor`, `beta_slow`); not for linear
        low: f64, default 1.0, else "none; 1 if another of these keys is given";
        /// above `rotary_scaling.low`: frequencies that turn more times than this stay, and those in between are blended
        /// (`high_freq_factor`, `beta_fast`); not for linear
        high: Option<f64>, else "none; 4 for llama3 and 32 for yarn if another of these keys is given";
        /// at least 1: length of the samples that the model was first trained on (`original_max_position_embeddings`); not for
        /// linear
        positions: usize, default 8192, else "none; 8192 if another of these keys is given";
        /// 1e-3 to 1e3: rotated queries and keys are multiplied by this; yarn only
        attention_factor: Option<f64>, else "0.1 · ln(factor) + 1 for yarn";
        /// whether the frequencies at which blending begins and ends are rounded outwards to one that the model has; yarn only
        truncate: bool, default true, else "true for yarn";
    }
}

impl RotaryScaling {
    /// The same with the defaults of its kind, and without what has no meaning for it.
    #[must_use]
    pub fn resolved(self) -> Self {
        let usual = RotaryScaling::default();
        match self.kind {
            RotaryScalingKind::Llama3 => RotaryScaling {
                high: Some(self.high.unwrap_or(4.0)),
                attention_factor: None,
                truncate: usual.truncate,
                ..self
            },
            RotaryScalingKind::Yarn => RotaryScaling {
                high: Some(self.high.unwrap_or(32.0)),
                attention_factor: Some(self.attention_factor.unwrap_or_else(|| amplitude(self.factor, 1.0))),
                ..self
            },
            RotaryScalingKind::Linear => {
                RotaryScaling { kind: RotaryScalingKind::Linear, factor: self.factor, ..usual }
            }
        }
    }

    /// The scaling of `dims / 2` frequencies with this base.
    fn of_frequencies(self, base: f64, dims: usize) -> FrequencyScaling {
        let RotaryScaling { kind, factor, low, high, positions, attention_factor, truncate } =
            self.resolved();
        let high = high.unwrap_or(low);
        match kind {
            RotaryScalingKind::Llama3 => FrequencyScaling {
                factor,
                divided: low,
                kept: high,
                positions: positions as f64,
                amplitude: 1.0,
            },
            RotaryScalingKind::Yarn => {
                // The index of the frequency that turns so many times.
                let index =
                    |turns: f64| dims as f64 * (positions as f64 / (turns * TAU)).ln() / (2.0 * base.ln());
                let (first, last) = (index(high), index(low));
                let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.0), last.min(dims as f64 - 1.0));
                // As in transformers, so that there is something to divide by.
                let last = if first.total_cmp(&last).is_eq() { last + 0.001 } else { last };
                let amplitude = attention_factor.unwrap_or(1.0);
                FrequencyScaling { factor, divided: last, kept: first, positions: 0.0, amplitude }
            }
            RotaryScalingKind::Linear => FrequencyScaling { factor, ..FrequencyScaling::ALL },
        }
    }
}

/// The factor of rotated queries and keys under `YaRN`, with `mscale` of transformers.
pub fn amplitude(factor: f64, mscale: f64) -> f64 {
    if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 }
}

/// The scaling of frequencies in the numbers that a kernel needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FrequencyScaling {
    /// What frequencies are divided by. If it is 1, all stay.
    pub factor: f64,
    /// The measure up to which a frequency is divided.
    pub divided: f64,
    /// The measure from which it stays. In between, the two are blended. May be below `divided`: then larger measures are divided.
    pub kept: f64,
    /// The measure of a frequency is how often it turns in so many positions or, if this is 0, its index.
    pub positions: f64,
    /// Cosines and sines are multiplied by this.
    pub amplitude: f64,
}

impl FrequencyScaling {
    /// All frequencies stay.
    pub const NONE: FrequencyScaling = FrequencyScaling { factor: 1.0, ..FrequencyScaling::ALL };

    /// All frequencies are divided: none has so large an index.
    const ALL: FrequencyScaling =
        FrequencyScaling { factor: 1.0, divided: 1e9, kept: 2e9, positions: 0.0, amplitude: 1.0 };

    /// The scaling of a model with this base, or of one that has none.
    pub fn new(scaling: Option<RotaryScaling>, base: f64, dims: usize) -> Self {
        scaling.map_or(FrequencyScaling::NONE, |scaling| scaling.of_frequencies(base, dims))
    }

    /// The scaled frequency with this index.
    pub fn scale(self, index: usize, frequency: f64) -> f64 {
        let FrequencyScaling { factor, divided, kept, positions, .. } = self;
        let measure = if positions > 0.0 { positions * frequency / TAU } else { index as f64 };
        let share = ((measure - divided) / (kept - divided)).clamp(0.0, 1.0);
        (1.0 - share) * frequency / factor + share * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `_compute_yarn_parameters` of transformers 5.10 with a base of 10000, heads of 16, a factor of 4 and 64 positions before.
    #[test]
    fn yarn_has_the_frequencies_of_transformers() {
        let scaling = RotaryScaling {
            kind: RotaryScalingKind::Yarn,
            factor: 4.0,
            positions: 64,
            ..RotaryScaling::default()
        };
        let of = FrequencyScaling::new(Some(scaling), 10000.0, 16);
        let frequencies = (0..8).map(|i| of.scale(i, f64::powf(10000.0, -(i as f64) / 8.0)));
        let share = |i: f64| 1.0 - i / 3.0;
        for (i, frequency) in frequencies.enumerate() {
            let plain = f64::powf(10000.0, -(i as f64) / 8.0);
            let share = share(i as f64).clamp(0.0, 1.0);
            assert!((frequency - (share * plain + (1.0 - share) * plain / 4.0)).abs() < 1e-15, "{i}");
        }
        assert!((of.amplitude - (0.1 * 4.0_f64.ln() + 1.0)).abs() < 1e-15);
    }

    #[test]
    fn linear_divides_all_frequencies() {
        let kind = RotaryScalingKind::Linear;
        let scaling = RotaryScaling { kind, factor: 4.0, ..RotaryScaling::default() };
        let of = FrequencyScaling::new(Some(scaling), 100.0, 8);
        assert!([0, 3].iter().all(|&i| (of.scale(i, 0.5) - 0.125).abs() < 1e-15));
        assert!((FrequencyScaling::new(None, 100.0, 8).scale(3, 0.3) - 0.3).abs() < 1e-15);
    }
}
