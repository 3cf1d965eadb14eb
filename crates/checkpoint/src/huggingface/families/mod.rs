//! The Hugging Face format of each family: its `model_type`, the fields of its `config.json`, and the names of its tensors.

mod gemma;
mod gemma2;
mod gpt2;
mod llama;
mod llama_like;
mod mistral;
mod neox;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod rotary;
mod smollm3;
mod starcoder2;
mod windows;

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{Activation, Family, ModelSpec};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::names::TensorLocation;
use crate::CheckpointError;

/// The format of a family.
pub(super) struct FamilyFormat {
    pub family: Family,
    /// The `model_type` of its `config.json`.
    pub model_type: &'static str,
    /// The class of transformers.
    pub architecture: &'static str,
    /// The prefix of all tensor names except the head's.
    pub base: &'static str,
    /// The name of the list of layers.
    pub layers: &'static str,
    /// Reads the fields of a `config.json`. Fails if a value that changes the computation is not supported.
    pub read: fn(&Fields) -> Result<ModelSpec, CheckpointError>,
    /// The fields of a model that [`super::describe`] does not write for every family.
    pub describe: fn(&ModelSpec) -> Result<Map<String, Value>, UnsupportedModel>,
    /// The location of a parameter, with the name inside its layer or below the prefix.
    pub location: fn(&ModelSpec, ParameterKind) -> TensorLocation,
}

const FORMATS: [&FamilyFormat; 12] = [
    &gpt2::FORMAT,
    &neox::FORMAT,
    &llama::FORMAT,
    &mistral::FORMAT,
    &qwen2::FORMAT,
    &qwen3::FORMAT,
    &smollm3::FORMAT,
    &phi3::FORMAT,
    &starcoder2::FORMAT,
    &gemma::FORMAT,
    &gemma2::FORMAT,
    &olmo2::FORMAT,
];

/// The format of a family.
pub(super) fn of(family: Family) -> &'static FamilyFormat {
    FORMATS.into_iter().find(|format| format.family == family).expect("every family has a format")
}

/// The format with the `model_type` of a `config.json`.
pub(super) fn described_by(fields: &Fields) -> Result<&'static FamilyFormat, CheckpointError> {
    let model_type = fields.word("model_type", "")?;
    let format = FORMATS.into_iter().find(|format| format.model_type == model_type);
    format.ok_or_else(|| {
        let known = either(&FORMATS.map(|format| format.model_type));
        fields.refused("model_type", &format!("is not supported; use {known}"))
    })
}

/// What Hugging Face does not support of a model.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnsupportedModel {
    #[error("model.rotary_fraction = {0} rotates nothing")]
    NoRotation(f64),
    #[error("model.rotary_fraction = {0} is not 1")]
    PartialRotation(f64),
    #[error("some layers have a sliding window and others have none")]
    Windows,
    #[error("model.activation = \"{}\" has no gate", .0.name())]
    Activation(Activation),
    #[error("model.kv_heads = {kv_heads} is not model.heads = {heads}, which {family} needs")]
    GroupedHeads { kv_heads: usize, heads: usize, family: &'static str },
    #[error(
        "model.heads · model.head_dim = {heads} · {head_dim} is not model.hidden = {hidden}, which {family} needs"
    )]
    HeadDim { heads: usize, head_dim: usize, hidden: usize, family: &'static str },
}

// Larger than any model. These limits prevent overflow in products of sizes.
const LAYERS: usize = 1 << 14;
const HIDDEN: usize = 1 << 20;
const HEADS: usize = 1 << 12;
const FFN: usize = 1 << 22;
const VOCAB: usize = 1 << 24;

/// The width of heads that divide the residual stream.
fn head_dim(fields: &Fields, field: &str, hidden: usize, heads: usize) -> Result<usize, CheckpointError> {
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    Err(fields.refused(field, &format!("does not divide the hidden width of {hidden}")))
}

/// Refuses grouped heads and another head width, which some families of Hugging Face do not support.
fn check_plain_heads(model: &ModelSpec, family: &'static str) -> Result<(), UnsupportedModel> {
    check_head_dim(model, family)?;
    let &ModelSpec { heads, kv_heads, .. } = model;
    if kv_heads == heads { Ok(()) } else { Err(UnsupportedModel::GroupedHeads { kv_heads, heads, family }) }
}

/// Refuses heads that do not divide the residual stream.
fn check_head_dim(model: &ModelSpec, family: &'static str) -> Result<(), UnsupportedModel> {
    let &ModelSpec { hidden, heads, head_dim, .. } = model;
    let fits = heads * head_dim == hidden;
    if fits { Ok(()) } else { Err(UnsupportedModel::HeadDim { heads, head_dim, hidden, family }) }
}

/// The names that transformers has for GELU: three of its tanh form, one of the exact one.
fn gelu(fields: &Fields, field: &str, default: &str) -> Result<Activation, CheckpointError> {
    match fields.word(field, default)? {
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Activation::Gelu),
        "gelu" => Ok(Activation::ExactGelu),
        _ => {
            let rule = "is not supported; use \"gelu\", \"gelu_new\", \"gelu_fast\" or \"gelu_pytorch_tanh\"";
            Err(fields.refused(field, rule))
        }
    }
}

/// The share of a head's dims that are rotated, for transformers, which rounds the number of dims down.
fn rotated_share(model: &ModelSpec) -> f64 {
    let (dims, width) = (model.rotary_dims(), model.head_dim as f64);
    let exact = dims as f64 / width;
    if (width * exact) as usize == dims { exact } else { (dims as f64 + 0.5) / width }
}

/// One of these names.
fn gelu_name(model: &ModelSpec) -> &'static str {
    if model.activation == Activation::ExactGelu { "gelu" } else { "gelu_new" }
}

/// `"a", "b" or "c"`.
fn either(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// The fields of a JSON object.
pub(super) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => unreachable!("it is written as an object"),
    }
}

#[cfg(test)]
mod tests {
    use kintsugi_plan::config::ConfigSource;

    use super::*;

    #[test]
    fn transformers_rotates_as_many_dims_as_we_do() {
        let model = ConfigSource::text("").set("model.preset=phi-4").plan().expect("a preset").model;
        for (head_dim, rotary_fraction) in
            [(32, 0.6), (96, 1.0), (80, 0.4), (64, 0.3), (128, 0.75), (40, 0.45)]
        {
            let model = ModelSpec { head_dim, rotary_fraction, ..model.clone() };
            let theirs = (head_dim as f64 * rotated_share(&model)) as usize;
            assert_eq!(theirs, model.rotary_dims(), "{head_dim} {rotary_fraction}");
        }
    }
}
