//! The types of numbers.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::config::ConfigError;
use crate::config::error::{between, invalid};
use crate::config::keys::RawPrecision;

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Precision {
    /// Type of weights and activations.
    pub compute: Compute,
    /// Type of gradients.
    pub gradients: GradientType,
    /// Type of the optimizer's moments: fp32 or bf16.
    pub states: Compute,
    /// Loss scaling (fp16).
    pub loss_scale: LossScale,
}

impl Precision {
    /// What the keys of `[precision]` say.
    pub(crate) fn resolve(raw: &RawPrecision) -> Result<Self, ConfigError> {
        let states = raw.states();
        if states == Compute::Fp16 {
            let rule = "cannot hold squared gradients; use \"fp32\" or \"bf16\"";
            return Err(invalid("precision.states", "\"fp16\"", rule));
        }
        let loss_scale = raw.loss_scale();
        if let LossScale::Fixed(scale) = loss_scale {
            between("precision.loss_scale", scale, 1e-30..=1e30)?;
        }
        Ok(Precision { compute: raw.compute(), gradients: raw.gradients(), states, loss_scale })
    }
}

/// A floating-point type of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// 32 bits.
    Fp32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    Fp16,
}

impl Compute {
    /// Whether a number is finite after rounding to this type.
    pub fn holds(self, number: f32) -> bool {
        // The smallest magnitude that rounds to infinity. The comparison is false for NaN.
        let limit = match self {
            Compute::Fp32 => f32::INFINITY,
            Compute::Bf16 => f32::from_bits(0x7F7F_8000),
            Compute::Fp16 => 65520.0,
        };
        number.abs() < limit
    }
}

/// The type in which gradients are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientType {
    /// 32 bits.
    Fp32,
    /// The compute type.
    Compute,
}

/// The factor that keeps fp16 gradients from vanishing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// Halved on overflow, doubled after many steps without one.
    Dynamic,
    /// Constant.
    Fixed(f64),
}

impl<'de> Deserialize<'de> for LossScale {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match toml::Value::deserialize(deserializer)? {
            toml::Value::String(word) if word == "dynamic" => Ok(LossScale::Dynamic),
            toml::Value::Integer(n) => Ok(LossScale::Fixed(n as f64)),
            toml::Value::Float(x) => Ok(LossScale::Fixed(x)),
            _ => Err(de::Error::custom("a number or \"dynamic\"")),
        }
    }
}

impl Serialize for LossScale {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            LossScale::Dynamic => serializer.serialize_str("dynamic"),
            LossScale::Fixed(x) => serializer.serialize_f64(*x),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_holds_what_it_does_not_round_to_infinity() {
        let just_below = |number: f32| f32::from_bits(number.to_bits() - 1);
        // Half of a step beyond the largest number: 65504 + 16, and (2 - 2^-7 + 2^-8) * 2^127.
        let largest_bf16 = (2.0 - 2_f32.powi(-7)) * 2_f32.powi(127);
        let limit = largest_bf16 + 2_f32.powi(119);
        for (compute, limit) in [(Compute::Fp16, 65520.0), (Compute::Bf16, limit)] {
            assert!(compute.holds(-just_below(limit)) && !compute.holds(-limit));
        }
        assert!(Compute::Fp32.holds(f32::MAX));
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!Compute::Fp32.holds(number) && !Compute::Fp16.holds(number));
        }
    }
}
