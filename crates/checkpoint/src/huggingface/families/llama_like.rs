//! The fields and tensor names that most families share with Llama.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{Activation, DEFAULT_INIT_STD, Family, ModelSpec};
use serde_json::{Map, Value, json};

use super::rotary::{RotaryFields, rope_parameters, rope_scaling};
use super::{FFN, HEADS, HIDDEN, LAYERS, UnsupportedModel, VOCAB, either, head_dim, object};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;
use crate::huggingface::names::TensorLocation;

/// What the families differ in when they are read.
pub(super) struct Reading {
    pub family: Family,
    /// Whether a part of a head may be rotated.
    pub partial_rotation: bool,
    /// The base of the frequencies if it is missing.
    pub rotary_base: f64,
    /// The epsilon of the norms if it is missing.
    pub norm_eps: f64,
    /// The gated unit of the MLP.
    pub activation: Activation,
}

impl Reading {
    /// A family with the defaults of Llama, and without partial rotation.
    pub const fn of(family: Family) -> Self {
        Reading {
            family,
            partial_rotation: false,
            rotary_base: 10000.0,
            norm_eps: 1e-6,
            activation: Activation::Swiglu,
        }
    }
}

/// A model with RMSNorm, a gated MLP and grouped-query attention. Window and layers without rotation are left to the family.
pub(super) fn read(fields: &Fields, reading: &Reading) -> Result<ModelSpec, CheckpointError> {
    let family = reading.family;
    let supported = gate(reading.activation);
    let field = if fields.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    if fields.word(field, supported)? != supported {
        return Err(fields.refused(field, &format!("is not supported; only \"{supported}\" is")));
    }
    let hidden = fields.size("hidden_size", 1..=HIDDEN)?;
    let heads = fields.size("num_attention_heads", 1..=HEADS)?;
    let kv_heads = fields.divisor("num_key_value_heads", "num_attention_heads", heads)?;
    let head_dim = match fields.optional_size("head_dim", 1..=HEADS)? {
        Some(given) => given,
        None => head_dim(fields, "num_attention_heads", hidden, heads)?,
    };
    if !family.features().sliding_window {
        check_layers(fields)?;
    }
    let base = fields.number("rope_theta", reading.rotary_base, 1.0..=1e12)?;
    let fraction = fields.number("partial_rotary_factor", 1.0, 0.0..=1.0)?;
    let rotary = RotaryFields::read(fields, family, base, fraction)?;
    if rotary.fraction < 1.0 && !reading.partial_rotation {
        let model_type = either(&[fields.word("model_type", "")?]);
        let rule =
            format!("with a partial_rotary_factor below 1 is not supported for model_type = {model_type}");
        return Err(fields.refused("rope_parameters", &rule));
    }
    Ok(ModelSpec {
        name: "custom".to_owned(),
        family,
        layers: fields.size("num_hidden_layers", 1..=LAYERS)?,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn: fields.size("intermediate_size", 1..=FFN)?,
        vocab: fields.size("vocab_size", 1..=VOCAB)?,
        vocab_multiple: 1,
        positions: fields.size("max_position_embeddings", 1..=VOCAB)?,
        tied: fields.flag("tie_word_embeddings", family.features().tied)?,
        parallel_residual: false,
        activation: reading.activation,
        norm_eps: fields.number("rms_norm_eps", reading.norm_eps, 1e-30..=1.0)?,
        rotary_base: rotary.base,
        rotary_fraction: rotary.fraction,
        rotary_scaling: rotary.scaling,
        no_rotary_every: None,
        sliding_window: None,
        full_attention_every: None,
        full_attention_first: None,
        score_width: None,
        score_soft_cap: None,
        logit_soft_cap: None,
        init_std: DEFAULT_INIT_STD,
    })
}

/// The name of the function of a gate. Files of Gemma have it in `hidden_activation`, or in `hidden_act` if this is missing.
fn gate(activation: Activation) -> &'static str {
    if activation == Activation::Geglu { "gelu_pytorch_tanh" } else { "silu" }
}

/// Refuses layers with attention of another kind than the family has.
fn check_layers(fields: &Fields) -> Result<(), CheckpointError> {
    let kinds = fields.get("layer_types").and_then(serde_json::Value::as_array);
    let is_full = |kind: &Value| kind.as_str() == Some("full_attention");
    if kinds.is_none_or(|kinds| kinds.iter().all(is_full)) {
        return Ok(());
    }
    Err(fields.refused("layer_types", "is not supported; only \"full_attention\" in all layers is"))
}

/// The fields of such a model.
pub(super) fn describe(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    if !model.activation.is_gated() {
        return Err(UnsupportedModel::Activation(model.activation));
    }
    Ok(object(json!({
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.positions,
        "hidden_act": gate(model.activation),
        "hidden_activation": gate(model.activation),
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        "rope_theta": model.rotary_base,
        "rope_parameters": rope_parameters(model),
        "rope_scaling": model.rotary_scaling.map(rope_scaling),
    })))
}

/// The same with whole heads rotated.
pub(super) fn describe_whole_rotation(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    if model.rotary_dims() != model.head_dim {
        return Err(UnsupportedModel::PartialRotation(model.rotary_fraction));
    }
    describe(model)
}

/// The location of a parameter, each in a tensor of its own.
pub(super) fn location(kind: ParameterKind) -> TensorLocation {
    TensorLocation::whole(match kind {
        ParameterKind::Table => "embed_tokens.weight",
        ParameterKind::AttentionNormWeight => "input_layernorm.weight",
        ParameterKind::MlpNormWeight => "post_attention_layernorm.weight",
        ParameterKind::QueryWeight => "self_attn.q_proj.weight",
        ParameterKind::KeyWeight => "self_attn.k_proj.weight",
        ParameterKind::ValueWeight => "self_attn.v_proj.weight",
        ParameterKind::QueryBias => "self_attn.q_proj.bias",
        ParameterKind::KeyBias => "self_attn.k_proj.bias",
        ParameterKind::ValueBias => "self_attn.v_proj.bias",
        ParameterKind::QueryNormWeight => "self_attn.q_norm.weight",
        ParameterKind::KeyNormWeight => "self_attn.k_norm.weight",
        ParameterKind::AttentionOutWeight => "self_attn.o_proj.weight",
        ParameterKind::MlpGateWeight => "mlp.gate_proj.weight",
        ParameterKind::MlpInWeight => "mlp.up_proj.weight",
        ParameterKind::MlpOutWeight => "mlp.down_proj.weight",
        ParameterKind::FinalNormWeight => "norm.weight",
        ParameterKind::Output => "lm_head.weight",
        _ => unreachable!("no family like Llama has {kind}"),
    })
}
