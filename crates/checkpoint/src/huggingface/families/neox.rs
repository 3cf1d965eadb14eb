//! GPT-NeoX and Pythia. Query, key and value are in one tensor, head by head.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{DEFAULT_INIT_STD, Family, ModelSpec};
use serde_json::{Map, Value, json};

use super::rotary::RotaryFields;
use super::{
    FFN, FamilyFormat, HEADS, HIDDEN, LAYERS, UnsupportedModel, VOCAB, check_plain_heads, gelu, gelu_name,
    head_dim, object, rotated_share,
};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;
use crate::huggingface::names::{TensorLocation, TensorPart};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Neox,
    model_type: "gpt_neox",
    architecture: "GPTNeoXForCausalLM",
    base: "gpt_neox.",
    layers: "layers",
    read,
    describe,
    location,
};

fn read(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
    fields.only("attention_bias", true)?;
    let hidden = fields.size("hidden_size", 1..=HIDDEN)?;
    let heads = fields.size("num_attention_heads", 1..=HEADS)?;
    let head_dim = head_dim(fields, "num_attention_heads", hidden, heads)?;
    let base = fields.number("rotary_emb_base", 10000.0, 1.0..=1e12)?;
    let fraction = fields.number("rotary_pct", 0.25, 0.0..=1.0)?;
    let rotary = RotaryFields::read(fields, Family::Neox, base, fraction)?;
    let model = ModelSpec {
        name: "custom".to_owned(),
        family: Family::Neox,
        layers: fields.size("num_hidden_layers", 1..=LAYERS)?,
        hidden,
        heads,
        kv_heads: heads,
        head_dim,
        ffn: fields.size("intermediate_size", 1..=FFN)?,
        vocab: fields.size("vocab_size", 1..=VOCAB)?,
        vocab_multiple: 1,
        positions: fields.size("max_position_embeddings", 1..=VOCAB)?,
        tied: fields.flag("tie_word_embeddings", false)?,
        parallel_residual: fields.flag("use_parallel_residual", true)?,
        activation: gelu(fields, "hidden_act", "gelu")?,
        norm_eps: fields.number("layer_norm_eps", 1e-5, 1e-30..=1.0)?,
        rotary_base: rotary.base,
        rotary_fraction: rotary.fraction,
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
    // The transformers library rounds the number of rotary dims down. We round it to an even number.
    if model.rotary_dims() != (head_dim as f64 * rotary.fraction) as usize {
        let rule = format!(
            "of heads of width {head_dim} is not an even number of dims, which rotary positions need"
        );
        return Err(fields.refused("rotary_pct", &rule));
    }
    Ok(model)
}

fn describe(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    check_plain_heads(model, "GPT-NeoX")?;
    let dims = model.rotary_dims();
    if dims == 0 {
        return Err(UnsupportedModel::NoRotation(model.rotary_fraction));
    }
    let fraction = rotated_share(model);
    Ok(object(json!({
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.positions,
        "hidden_act": gelu_name(model),
        "layer_norm_eps": model.norm_eps,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": true,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "rotary_pct": fraction,
        "rotary_emb_base": model.rotary_base,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": model.rotary_base,
            "partial_rotary_factor": fraction,
        },
    })))
}

fn location(model: &ModelSpec, kind: ParameterKind) -> TensorLocation {
    let third = |name: &str, third| TensorLocation {
        part: TensorPart::ThirdOfHeads { third, head_dim: model.head_dim },
        ..TensorLocation::whole(name)
    };
    let weight = |n| third("attention.query_key_value.weight", n);
    let bias = |n| third("attention.query_key_value.bias", n);
    TensorLocation::whole(match kind {
        ParameterKind::QueryWeight => return weight(0),
        ParameterKind::KeyWeight => return weight(1),
        ParameterKind::ValueWeight => return weight(2),
        ParameterKind::QueryBias => return bias(0),
        ParameterKind::KeyBias => return bias(1),
        ParameterKind::ValueBias => return bias(2),
        ParameterKind::Table => "embed_in.weight",
        ParameterKind::AttentionNormWeight => "input_layernorm.weight",
        ParameterKind::AttentionNormBias => "input_layernorm.bias",
        ParameterKind::MlpNormWeight => "post_attention_layernorm.weight",
        ParameterKind::MlpNormBias => "post_attention_layernorm.bias",
        ParameterKind::AttentionOutBias => "attention.dense.bias",
        ParameterKind::MlpOutBias => "mlp.dense_4h_to_h.bias",
        ParameterKind::AttentionOutWeight => "attention.dense.weight",
        ParameterKind::MlpInWeight => "mlp.dense_h_to_4h.weight",
        ParameterKind::MlpInBias => "mlp.dense_h_to_4h.bias",
        ParameterKind::MlpOutWeight => "mlp.dense_4h_to_h.weight",
        ParameterKind::FinalNormWeight => "final_layer_norm.weight",
        ParameterKind::FinalNormBias => "final_layer_norm.bias",
        ParameterKind::Output => "embed_out.weight",
        _ => unreachable!("GPT-NeoX has no {kind}"),
    })
}
