//! GPT-2. Matrices are stored transposed (`[inputs, outputs]`), with query, key and value side by side in one tensor.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{DEFAULT_INIT_STD, Family, ModelSpec};
use serde_json::{Map, Value, json};

use super::{
    FFN, FamilyFormat, HEADS, HIDDEN, LAYERS, UnsupportedModel, VOCAB, check_plain_heads, gelu, gelu_name,
    head_dim, object,
};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;
use crate::huggingface::names::{TensorLocation, TensorPart};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Gpt,
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    base: "transformer.",
    layers: "h",
    read,
    describe,
    location,
};

fn read(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
    fields.only("scale_attn_weights", true)?;
    fields.only("scale_attn_by_inverse_layer_idx", false)?;
    fields.only("add_cross_attention", false)?;
    let hidden = fields.size("n_embd", 1..=HIDDEN)?;
    let heads = fields.size("n_head", 1..=HEADS)?;
    Ok(ModelSpec {
        name: "custom".to_owned(),
        family: Family::Gpt,
        layers: fields.size("n_layer", 1..=LAYERS)?,
        hidden,
        heads,
        kv_heads: heads,
        head_dim: head_dim(fields, "n_head", hidden, heads)?,
        ffn: fields.optional_size("n_inner", 1..=FFN)?.unwrap_or(4 * hidden),
        vocab: fields.size("vocab_size", 1..=VOCAB)?,
        vocab_multiple: 1,
        positions: fields.size("n_positions", 1..=VOCAB)?,
        tied: fields.flag("tie_word_embeddings", true)?,
        parallel_residual: false,
        activation: gelu(fields, "activation_function", "gelu_new")?,
        norm_eps: fields.number("layer_norm_epsilon", 1e-5, 1e-30..=1.0)?,
        rotary_base: 10000.0,
        rotary_fraction: 0.0,
        rotary_scaling: None,
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

fn describe(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    check_plain_heads(model, "GPT-2")?;
    Ok(object(json!({
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.positions,
        "n_ctx": model.positions,
        "activation_function": gelu_name(model),
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    })))
}

fn location(model: &ModelSpec, kind: ParameterKind) -> TensorLocation {
    let transposed = |name: &str| TensorLocation { transposed: true, ..TensorLocation::whole(name) };
    let third = |location: TensorLocation, third| {
        let part =
            TensorPart::Rows { first: third * model.hidden, count: model.hidden, of: 3 * model.hidden };
        TensorLocation { part, ..location }
    };
    let weight = |n| third(transposed("attn.c_attn.weight"), n);
    let bias = |n| third(TensorLocation::whole("attn.c_attn.bias"), n);
    TensorLocation::whole(match kind {
        ParameterKind::QueryWeight => return weight(0),
        ParameterKind::KeyWeight => return weight(1),
        ParameterKind::ValueWeight => return weight(2),
        ParameterKind::QueryBias => return bias(0),
        ParameterKind::KeyBias => return bias(1),
        ParameterKind::ValueBias => return bias(2),
        ParameterKind::AttentionOutWeight => return transposed("attn.c_proj.weight"),
        ParameterKind::MlpInWeight => return transposed("mlp.c_fc.weight"),
        ParameterKind::MlpOutWeight => return transposed("mlp.c_proj.weight"),
        ParameterKind::Table => "wte.weight",
        ParameterKind::Positions => "wpe.weight",
        ParameterKind::AttentionNormWeight => "ln_1.weight",
        ParameterKind::AttentionNormBias => "ln_1.bias",
        ParameterKind::MlpNormWeight => "ln_2.weight",
        ParameterKind::MlpNormBias => "ln_2.bias",
        ParameterKind::AttentionOutBias => "attn.c_proj.bias",
        ParameterKind::MlpOutBias => "mlp.c_proj.bias",
        ParameterKind::MlpInBias => "mlp.c_fc.bias",
        ParameterKind::FinalNormWeight => "ln_f.weight",
        ParameterKind::FinalNormBias => "ln_f.bias",
        ParameterKind::Output => "lm_head.weight",
        ParameterKind::QueryNormWeight
        | ParameterKind::KeyNormWeight
        | ParameterKind::AttentionEndNormWeight
        | ParameterKind::MlpEndNormWeight
        | ParameterKind::MlpGateWeight => {
            unreachable!("GPT-2 has no {kind}")
        }
    })
}
