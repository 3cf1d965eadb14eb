//! The fields and tensor names that most families share with Llama.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{Activation, DEFAULT_INIT_STD, Family, ModelSpec};
use serde_json::{Map, Value, json};

use super::rotary::{RotaryFields, rope_parameters, rope_scaling};
use super::{FFN, HEADS, HIDDEN, LAYERS, UnsupportedModel, VOCAB, either, head_dim, object};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;
use crate::huggingface::names::TensorLocation;

/// A model with RMSNorm, SwiGLU and grouped-query attention. `rotary` are the supported types of scaling.
pub(super) fn read(fields: &Fields, family: Family, rotary: &[&str]) -> Result<ModelSpec, CheckpointError> {
    if fields.word("hidden_act", "silu")? != "silu" {
        return Err(fields.refused("hidden_act", "is not supported; only \"silu\" is"));
    }
    let hidden = fields.size("hidden_size", 1..=HIDDEN)?;
    let heads = fields.size("num_attention_heads", 1..=HEADS)?;
    let kv_heads = fields.optional_size("num_key_value_heads", 1..=HEADS)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let rule = format!("does not divide num_attention_heads = {heads}");
        return Err(fields.refused("num_key_value_heads", &rule));
    }
    let head_dim = match fields.optional_size("head_dim", 1..=HEADS)? {
        Some(given) => given,
        None => head_dim(fields, "num_attention_heads", hidden, heads)?,
    };
    let base = fields.number("rope_theta", 10000.0, 1.0..=1e12)?;
    let rotary = RotaryFields::read(fields, base, 1.0, rotary)?;
    if rotary.fraction < 1.0 {
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
        activation: Activation::Swiglu,
        norm_eps: fields.number("rms_norm_eps", 1e-6, 1e-30..=1.0)?,
        rotary_base: rotary.base,
        rotary_fraction: 1.0,
        rotary_scaling: rotary.scaling,
        init_std: DEFAULT_INIT_STD,
    })
}

/// The fields of such a model.
pub(super) fn describe(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    if model.activation != Activation::Swiglu {
        return Err(UnsupportedModel::Activation);
    }
    if model.rotary_dims() != model.head_dim {
        return Err(UnsupportedModel::PartialRotation(model.rotary_fraction));
    }
    Ok(object(json!({
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        "rope_theta": model.rotary_base,
        "rope_parameters": rope_parameters(model),
        "rope_scaling": model.rotary_scaling.map(rope_scaling),
    })))
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
        ParameterKind::AttentionOutWeight => "self_attn.o_proj.weight",
        ParameterKind::MlpGateWeight => "mlp.gate_proj.weight",
        ParameterKind::MlpInWeight => "mlp.up_proj.weight",
        ParameterKind::MlpOutWeight => "mlp.down_proj.weight",
        ParameterKind::FinalNormWeight => "norm.weight",
        ParameterKind::Output => "lm_head.weight",
        _ => unreachable!("no family like Llama has {kind}"),
    })
}
