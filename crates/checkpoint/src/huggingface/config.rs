//! Reads a `config.json` as a model. Reads every field that affects the computation, and fails if its value is not supported.

use std::path::Path;

use kintsugi_spec::{Activation, DEFAULT_INIT_STD, Family, ModelSpec, RotaryScaling};

use super::fields::Fields;
use crate::CheckpointError;

// Larger than any model. These limits prevent overflow in products of sizes.
const LAYERS: usize = 1 << 14;
const HIDDEN: usize = 1 << 20;
const HEADS: usize = 1 << 12;
const FFN: usize = 1 << 22;
const VOCAB: usize = 1 << 24;

/// The model that a `config.json` describes.
pub(super) fn read(path: &Path) -> Result<ModelSpec, CheckpointError> {
    let fields = Fields::read(path)?;
    if fields.get("quantization_config").is_some() {
        return Err(fields.refused("quantization_config", "is not supported; only plain weights are"));
    }
    match fields.word("model_type", "")? {
        "gpt2" => gpt2(&fields),
        "gpt_neox" => neox(&fields),
        "llama" => llama(&fields),
        _ => Err(fields.refused("model_type", "is not supported; use \"gpt2\", \"gpt_neox\" or \"llama\"")),
    }
}

fn gpt2(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
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
        init_std: DEFAULT_INIT_STD,
    })
}

fn neox(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
    fields.only("attention_bias", true)?;
    let hidden = fields.size("hidden_size", 1..=HIDDEN)?;
    let heads = fields.size("num_attention_heads", 1..=HEADS)?;
    let head_dim = head_dim(fields, "num_attention_heads", hidden, heads)?;
    let base = fields.number("rotary_emb_base", 10000.0, 1.0..=1e12)?;
    let fraction = fields.number("rotary_pct", 0.25, 0.0..=1.0)?;
    let rotary = rotary(fields, base, fraction, &["default"])?;
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

fn llama(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
    fields.only("attention_bias", false)?;
    fields.only("mlp_bias", false)?;
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
    let rotary = rotary(fields, base, 1.0, &["default", "llama3"])?;
    if rotary.fraction < 1.0 {
        let rule = "with a partial_rotary_factor below 1 is not supported for model_type = \"llama\"";
        return Err(fields.refused("rope_parameters", rule));
    }
    Ok(ModelSpec {
        name: "custom".to_owned(),
        family: Family::Llama,
        layers: fields.size("num_hidden_layers", 1..=LAYERS)?,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn: fields.size("intermediate_size", 1..=FFN)?,
        vocab: fields.size("vocab_size", 1..=VOCAB)?,
        vocab_multiple: 1,
        positions: fields.size("max_position_embeddings", 1..=VOCAB)?,
        tied: fields.flag("tie_word_embeddings", false)?,
        parallel_residual: false,
        activation: Activation::Swiglu,
        norm_eps: fields.number("rms_norm_eps", 1e-6, 1e-30..=1.0)?,
        rotary_base: rotary.base,
        rotary_fraction: 1.0,
        rotary_scaling: rotary.scaling,
        init_std: DEFAULT_INIT_STD,
    })
}

fn head_dim(fields: &Fields, field: &str, hidden: usize, heads: usize) -> Result<usize, CheckpointError> {
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    Err(fields.refused(field, &format!("does not divide the hidden width of {hidden}")))
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

/// The settings of rotary positions.
struct RotaryConfig {
    base: f64,
    fraction: f64,
    scaling: Option<RotaryScaling>,
}

/// Newer files have `rope_parameters`, older ones fields of their own and `rope_scaling`. `kinds` are the supported types of
/// scaling.
fn rotary(
    fields: &Fields,
    base: f64,
    fraction: f64,
    kinds: &[&str],
) -> Result<RotaryConfig, CheckpointError> {
    let mut scaling = None;
    for field in ["rope_scaling", "rope_parameters"] {
        let inner = fields.object(field)?;
        let kind = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
        match inner.word(kind, "default")? {
            kind if !kinds.contains(&kind) => {
                let kinds = kinds.iter().map(|kind| format!("\"{kind}\"")).collect::<Vec<_>>().join(" or ");
                return Err(
                    fields.refused(field, &format!("is not supported; only the rope_type {kinds} is"))
                );
            }
            "llama3" => scaling = Some(llama3_scaling(&inner)?),
            _ => {}
        }
    }
    let inner = fields.object("rope_parameters")?;
    Ok(RotaryConfig {
        base: inner.number("rope_theta", base, 1.0..=1e12)?,
        fraction: inner.number("partial_rotary_factor", fraction, 0.0..=1.0)?,
        scaling,
    })
}

/// Llama 3.1's scaling, with the defaults of its first model.
fn llama3_scaling(fields: &Fields) -> Result<RotaryScaling, CheckpointError> {
    let usual = RotaryScaling::default();
    let positions = fields.optional_size("original_max_position_embeddings", 1..=1 << 30)?;
    Ok(RotaryScaling {
        factor: fields.number("factor", usual.factor, 1.0..=1e6)?,
        low: fields.number("low_freq_factor", usual.low, 1e-6..=1e6)?,
        high: fields.number("high_freq_factor", usual.high, 1e-6..=1e6)?,
        positions: positions.unwrap_or(usual.positions),
    })
}
