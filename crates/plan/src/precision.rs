//! The types of numbers.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use kintsugi_spec::ModelSpec;

use crate::config::ConfigError;
use crate::config::error::{between, invalid};
use crate::config::keys::RawPrecision;
use crate::{Batch, DeviceKind, Mesh};

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Precision {
    /// Type of weights and activations.
    pub compute: Compute,
    /// Type of gradients.
    pub gradients: GradientType,
    /// Type of the optimizer's states: fp32 or bf16.
    pub states: Compute,
    /// How the products of layers are computed.
    pub products: Products,
    /// What shares a scale if products are in 8 bits.
    pub recipe: Recipe,
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
        let (compute, products) = (raw.compute(), raw.products());
        if products == Products::Fp8 && compute != Compute::Bf16 {
            return Err(invalid("precision.products", "\"fp8\"", "needs precision.compute = \"bf16\""));
        }
        let (gradients, recipe) = (raw.gradients(), raw.recipe());
        Ok(Precision { compute, gradients, states, products, recipe, loss_scale })
    }

    /// The size in which every dimension of products in 8 bits is counted: what libraries and kernels need.
    pub const FP8_MULTIPLE: usize = 16;

    /// Refuses products in 8 bits with sizes or a device for which there are none. With `overlapped` transfers, products are
    /// cut into at most four chunks of rows.
    pub(crate) fn check_products(
        &self,
        model: &ModelSpec,
        mesh: Mesh,
        batch: Batch,
        overlapped: bool,
        device: DeviceKind,
    ) -> Result<(), ConfigError> {
        let Products::Fp8 = self.products else { return Ok(()) };
        if device == DeviceKind::Hip {
            let rule = "has no kernels for AMD GPUs; use \"compute\"";
            return Err(invalid("precision.products", "\"fp8\"", rule));
        }
        if model.features().norms.has_after() {
            let family = model.family.name();
            let rule = format!(
                "is not supported for model.family = \"{family}\", which has norms after its products; use \"compute\""
            );
            return Err(invalid("precision.products", "\"fp8\"", rule));
        }
        let tp = mesh.tp();
        let heads = (model.heads + 2 * model.kv_heads) * model.head_dim / tp;
        let rows = batch.micro * batch.sequence / mesh.cp();
        let sizes = [
            ("model.hidden", model.hidden, 1),
            ("model.ffn / tp", model.ffn / tp, 1),
            ("model.heads · model.head_dim / tp", model.heads * model.head_dim / tp, 1),
            ("(model.heads + 2 · model.kv_heads) · model.head_dim / tp", heads, 1),
            ("batch.micro · batch.sequence / cp", rows, if overlapped { MAX_CHUNKS } else { 1 }),
        ];
        for (name, size, chunks) in sizes {
            let multiple = Precision::FP8_MULTIPLE * chunks;
            if !size.is_multiple_of(multiple) {
                let beside = if chunks > 1 { " with parallel.overlap_tp" } else { "" };
                let rule = format!("needs {name} = {size} to be a multiple of {multiple}{beside}");
                return Err(invalid("precision.products", "\"fp8\"", rule));
            }
        }
        Ok(())
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

/// How the products of layers are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Products {
    /// In the compute type.
    Compute,
    /// In 8 bits, with sums in fp32.
    Fp8,
}

/// What shares a scale if products are in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recipe {
    /// A matrix, by its own largest number.
    Tensor,
}

/// The most chunks of rows into which overlapped products are cut.
const MAX_CHUNKS: usize = 4;

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
