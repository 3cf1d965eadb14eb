//! Gemma 2: norms around attention and MLP, whose weights are stored minus one; GeGLU; soft caps; windows in every other layer.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{Activation, Family, ModelSpec};
use serde_json::{Map, Value, json};

use super::llama_like::{self, Reading};
use super::{FamilyFormat, HEADS, UnsupportedModel, object, windows};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;
use crate::huggingface::names::TensorLocation;

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Gemma2,
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    base: "model.",
    layers: "layers",
    read,
    describe,
    location: |_, kind| location(kind),
};

fn read(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
    fields.only("attention_bias", false)?;
    fields.only("use_bidirectional_attention", false)?;
    // Without it transformers assumes 256, whatever the width of the model.
    fields.size("head_dim", 1..=HEADS)?;
    let model =
        llama_like::read(fields, &Reading { activation: Activation::Geglu, ..Reading::of(Family::Gemma2) })?;
    let usual = model.features().soft_caps;
    let cap = |field: &str, usual: Option<f64>| {
        if fields.has(field) && fields.get(field).is_none() {
            return Err(fields.refused(field, "is not supported; only a number is"));
        }
        fields.number(field, usual.unwrap_or_default(), 1e-3..=1e6).map(Some)
    };
    let width = fields.optional_size("query_pre_attn_scalar", 1..=1 << 16)?.unwrap_or(256);
    let model = ModelSpec {
        score_width: Some(width).filter(|&width| width != model.head_dim),
        score_soft_cap: cap("attn_logit_softcapping", usual.map(|caps| caps.scores))?,
        logit_soft_cap: cap("final_logit_softcapping", usual.map(|caps| caps.logits))?,
        full_attention_every: model.features().full_attention_every,
        ..model
    };
    windows::read(fields, model, Some(4096))
}

fn describe(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    let mut description = llama_like::describe_whole_rotation(model)?;
    description.extend(windows::describe_layers(model));
    description.extend(object(json!({
        "query_pre_attn_scalar": model.score_width.unwrap_or(model.head_dim),
        "attn_logit_softcapping": model.score_soft_cap,
        "final_logit_softcapping": model.logit_soft_cap,
        "attention_bias": false,
    })));
    // The library has no models without a window, and one of the longest sample is none.
    if model.sliding_window.is_none() {
        description.insert("sliding_window".to_owned(), json!(model.positions));
    }
    Ok(description)
}

/// The weight of a norm of Gemma, which multiplies by `1 + w`; ours multiply by the weight itself.
pub(super) fn one_plus(name: &str) -> TensorLocation {
    TensorLocation { offset: 1.0, ..TensorLocation::whole(name) }
}

fn location(kind: ParameterKind) -> TensorLocation {
    match kind {
        ParameterKind::AttentionNormWeight => one_plus("input_layernorm.weight"),
        ParameterKind::AttentionEndNormWeight => one_plus("post_attention_layernorm.weight"),
        ParameterKind::MlpNormWeight => one_plus("pre_feedforward_layernorm.weight"),
        ParameterKind::MlpEndNormWeight => one_plus("post_feedforward_layernorm.weight"),
        ParameterKind::FinalNormWeight => one_plus("norm.weight"),
        other => llama_like::location(other),
    }
}
