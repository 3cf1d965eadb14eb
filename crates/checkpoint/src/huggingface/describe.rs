//! A model as a `config.json`, for older and newer versions of transformers alike.

use kintsugi_plan::Compute;
use kintsugi_spec::{Activation, Family, ModelSpec, RotaryScaling};
use serde_json::{Map, Value, json};

/// A model that cannot be a Hugging Face folder.
#[derive(Debug, thiserror::Error)]
#[error("Hugging Face cannot describe this model: {0}")]
pub(super) struct DescriptionError(#[from] UnsupportedModel);

/// What Hugging Face does not support of a model.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnsupportedModel {
    #[error("model.rotary_fraction = {0} rotates nothing")]
    NoRotation(f64),
    #[error("model.rotary_fraction = {0} is not 1")]
    PartialRotation(f64),
    #[error("model.activation is not \"swiglu\"")]
    Activation,
    #[error("model.kv_heads = {kv_heads} is not model.heads = {heads}, which {family} needs")]
    GroupedHeads { kv_heads: usize, heads: usize, family: &'static str },
    #[error(
        "model.heads · model.head_dim = {heads} · {head_dim} is not model.hidden = {hidden}, which {family} needs"
    )]
    HeadDim { heads: usize, head_dim: usize, hidden: usize, family: &'static str },
}

/// The `config.json` of a model whose weights have this type.
pub(super) fn describe(model: &ModelSpec, dtype: Compute) -> Result<Map<String, Value>, DescriptionError> {
    let mut description = match model.family {
        Family::Gpt => gpt2(model)?,
        Family::Neox => neox(model)?,
        Family::Llama => llama(model)?,
    };
    let dtype = match dtype {
        Compute::Fp32 => "float32",
        Compute::Bf16 => "bfloat16",
        Compute::Fp16 => "float16",
    };
    description.extend(object(json!({
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
        "bos_token_id": null,
        "eos_token_id": null,
    })));
    Ok(description)
}

fn gpt2(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    plain_heads(model, "GPT-2")?;
    Ok(object(json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.positions,
        "n_ctx": model.positions,
        "activation_function": gelu(model),
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    })))
}

fn neox(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    plain_heads(model, "GPT-NeoX")?;
    let dims = model.rotary_dims();
    if dims == 0 {
        return Err(UnsupportedModel::NoRotation(model.rotary_fraction));
    }
    // The transformers library rounds the number of rotary dims down.
    let exact = dims as f64 / model.head_dim as f64;
    let cut = (model.head_dim as f64 * exact) as usize;
    let fraction = if cut == dims { exact } else { (dims as f64 + 0.5) / model.head_dim as f64 };
    Ok(object(json!({
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.positions,
        "hidden_act": gelu(model),
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

fn llama(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    if model.activation != Activation::Swiglu {
        return Err(UnsupportedModel::Activation);
    }
    if model.rotary_dims() != model.head_dim {
        return Err(UnsupportedModel::PartialRotation(model.rotary_fraction));
    }
    Ok(object(json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "mlp_bias": false,
        "rope_theta": model.rotary_base,
        "rope_parameters": rope_parameters(model),
        "rope_scaling": model.rotary_scaling.map(rope_scaling),
    })))
}

/// Llama's rotary positions, as newer versions of transformers read them.
fn rope_parameters(model: &ModelSpec) -> Value {
    let mut parameters = model.rotary_scaling.map_or(json!({ "rope_type": "default" }), rope_scaling);
    parameters["rope_theta"] = json!(model.rotary_base);
    parameters
}

/// The same scaling as older versions read it.
fn rope_scaling(scaling: RotaryScaling) -> Value {
    json!({
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.positions,
    })
}

/// Hugging Face's GPT-2 and GPT-NeoX support neither grouped-query attention nor another head width.
fn plain_heads(model: &ModelSpec, family: &'static str) -> Result<(), UnsupportedModel> {
    let &ModelSpec { hidden, heads, kv_heads, head_dim, .. } = model;
    if kv_heads != heads {
        return Err(UnsupportedModel::GroupedHeads { kv_heads, heads, family });
    }
    if heads * head_dim != hidden {
        return Err(UnsupportedModel::HeadDim { heads, head_dim, hidden, family });
    }
    Ok(())
}

fn gelu(model: &ModelSpec) -> &'static str {
    if model.activation == Activation::ExactGelu { "gelu" } else { "gelu_new" }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => unreachable!("it is written as an object"),
    }
}
