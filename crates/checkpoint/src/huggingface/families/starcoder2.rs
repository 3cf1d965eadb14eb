//! StarCoder2: LayerNorm, GELU and biases, with rotary positions and grouped-query attention.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{DEFAULT_INIT_STD, Family, ModelSpec};
use serde_json::{Map, Value, json};

use super::rotary::{RotaryFields, rope_parameters};
use super::{
    FFN, FamilyFormat, HEADS, HIDDEN, LAYERS, UnsupportedModel, VOCAB, check_head_dim, gelu, gelu_name,
    head_dim, llama_like, object, windows,
};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;
use crate::huggingface::names::TensorLocation;

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Starcoder2,
    model_type: "starcoder2",
    architecture: "Starcoder2ForCausalLM",
    base: "model.",
    layers: "layers",
    read,
    describe,
    location,
};

fn read(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
    fields.only("use_bias", true)?;
    let hidden = fields.size("hidden_size", 1..=HIDDEN)?;
    let heads = fields.size("num_attention_heads", 1..=HEADS)?;
    let base = fields.number("rope_theta", 10000.0, 1.0..=1e12)?;
    let model = ModelSpec {
        name: "custom".to_owned(),
        family: Family::Starcoder2,
        layers: fields.size("num_hidden_layers", 1..=LAYERS)?,
        hidden,
        heads,
        kv_heads: fields.divisor("num_key_value_heads", "num_attention_heads", heads)?,
        head_dim: head_dim(fields, "num_attention_heads", hidden, heads)?,
        ffn: fields.size("intermediate_size", 1..=FFN)?,
        vocab: fields.size("vocab_size", 1..=VOCAB)?,
        vocab_multiple: 1,
        positions: fields.size("max_position_embeddings", 1..=VOCAB)?,
        tied: fields.flag("tie_word_embeddings", true)?,
        parallel_residual: false,
        activation: gelu(fields, "hidden_act", "gelu_pytorch_tanh")?,
        norm_eps: fields.number("norm_epsilon", 1e-5, 1e-30..=1.0)?,
        rotary_base: RotaryFields::read(fields, Family::Starcoder2, base, 1.0)?.base,
        rotary_fraction: 1.0,
        rotary_scaling: None,
        no_rotary_every: None,
        sliding_window: None,
        full_attention_every: None,
        full_attention_first: None,
        score_width: None,
        score_soft_cap: None,
        logit_soft_cap: None,
        init_std: DEFAULT_INIT_STD,
    };
    windows::read_every(fields, model, None)
}

fn describe(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    check_head_dim(model, "StarCoder2")?;
    if model.rotary_dims() != model.head_dim {
        return Err(UnsupportedModel::PartialRotation(model.rotary_fraction));
    }
    let mut description = object(json!({
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.positions,
        "hidden_act": gelu_name(model),
        "norm_epsilon": model.norm_eps,
        "use_bias": true,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "rope_theta": model.rotary_base,
        "rope_parameters": rope_parameters(model),
    }));
    description.extend(windows::describe_every(model)?);
    Ok(description)
}

fn location(_: &ModelSpec, kind: ParameterKind) -> TensorLocation {
    TensorLocation::whole(match kind {
        ParameterKind::AttentionNormBias => "input_layernorm.bias",
        ParameterKind::MlpNormBias => "post_attention_layernorm.bias",
        ParameterKind::AttentionOutBias => "self_attn.o_proj.bias",
        ParameterKind::MlpInWeight => "mlp.c_fc.weight",
        ParameterKind::MlpInBias => "mlp.c_fc.bias",
        ParameterKind::MlpOutWeight => "mlp.c_proj.weight",
        ParameterKind::MlpOutBias => "mlp.c_proj.bias",
        ParameterKind::FinalNormBias => "norm.bias",
        other => return llama_like::location(other),
    })
}
