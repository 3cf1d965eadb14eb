//! The model of a configuration: the family supplies defaults, then the shape is checked.

use kintsugi_spec::{Activation, Family, Features, ModelSpec, Positions, RotaryScaling, presets};

use super::cluster::CUSTOM;
use super::error::{ConfigError, between, either, invalid, within};
use super::keys::RawModel;
use crate::divisors;

/// The model. It supports samples of `sequence` tokens, or longer ones if requested.
pub(super) fn resolve(raw: &RawModel, sequence: usize) -> Result<ModelSpec, ConfigError> {
    let family = raw.family();
    let features = family.features();
    let layers = required("model.layers", raw.layers()?)?;
    let hidden = required("model.hidden", raw.hidden()?)?;
    let heads = required("model.heads", raw.heads()?)?;
    let model = ModelSpec {
        name: name(raw)?,
        family,
        layers,
        hidden,
        heads,
        kv_heads: raw.kv_heads()?.unwrap_or(heads),
        head_dim: head_dim(raw.head_dim, hidden, heads)?,
        ffn: within("model.ffn", raw.ffn.unwrap_or_else(|| default_ffn(features, hidden)), 1..=1 << 22)?,
        vocab: required("model.vocab", raw.vocab()?)?,
        vocab_multiple: raw.vocab_multiple()?,
        positions: positions(raw.positions()?, features, sequence)?,
        tied: raw.tied.unwrap_or(features.tied),
        parallel_residual: parallel_residual(raw.parallel_residual, features)?,
        activation: activation(raw.activation, family)?,
        norm_eps: raw.norm_eps()?,
        rotary_base: raw.rotary_base()?,
        rotary_fraction: rotary_fraction(raw, features)?,
        rotary_scaling: raw.rotary_scaling.map(|scaling| rotary_scaling(scaling, features)).transpose()?,
        no_rotary_every: no_rotary_every(raw, features)?,
        sliding_window: window_key("model.sliding_window", raw.sliding_window()?, features)?,
        full_attention_every: window_key(
            "model.full_attention_every",
            raw.full_attention_every()?,
            features,
        )?
        .or(features.full_attention_every),
        full_attention_first: window_key(
            "model.full_attention_first",
            raw.full_attention_first()?,
            features,
        )?,
        score_width: cap_key("model.score_width", raw.score_width()?, features)?,
        score_soft_cap: cap_key("model.score_soft_cap", raw.score_soft_cap()?, features)?
            .or(features.soft_caps.map(|caps| caps.scores)),
        logit_soft_cap: cap_key("model.logit_soft_cap", raw.logit_soft_cap()?, features)?
            .or(features.soft_caps.map(|caps| caps.logits)),
        init_std: raw.init_std()?,
    };
    check_shape(&model)?;
    Ok(model)
}

/// Refuses a model whose matrices cannot be split into `tp` equal parts.
pub(super) fn check_split(model: &ModelSpec, tp: usize) -> Result<(), ConfigError> {
    let sizes = [("model.heads", model.heads), ("model.kv_heads", model.kv_heads), ("model.ffn", model.ffn)];
    for (field, size) in sizes {
        if !size.is_multiple_of(tp) {
            let allowed: Vec<usize> = divisors(model.heads)
                .filter(|&n| model.kv_heads.is_multiple_of(n) && model.ffn.is_multiple_of(n))
                .collect();
            let rule = format!("does not divide {field} = {size}; use {}", either(&allowed));
            return Err(invalid("parallel.tp", tp, rule));
        }
    }
    Ok(())
}

fn rotary_scaling(scaling: RotaryScaling, features: &Features) -> Result<RotaryScaling, ConfigError> {
    if !features.rotary_scaling {
        let rule = format!("needs model.family = {}", families(|features| features.rotary_scaling));
        return Err(invalid("model.rotary_scaling", "{…}", rule));
    }
    between("model.rotary_scaling.factor", scaling.factor, 1.0..=1e6)?;
    between("model.rotary_scaling.low", scaling.low, 1e-6..=1e6)?;
    within("model.rotary_scaling.positions", scaling.positions, 1..=1 << 30)?;
    if let Some(factor) = scaling.attention_factor {
        between("model.rotary_scaling.attention_factor", factor, 1e-3..=1e3)?;
    }
    let scaling = scaling.resolved();
    if let Some(high) = scaling.high {
        between("model.rotary_scaling.high", high, 1e-6..=1e6)?;
        if high <= scaling.low {
            let rule = format!("must be above model.rotary_scaling.low = {}", scaling.low);
            return Err(invalid("model.rotary_scaling.high", high, rule));
        }
    }
    Ok(scaling)
}

/// A preset keeps its name to itself, so that a written plan resolves to the same model.
fn name(raw: &RawModel) -> Result<String, ConfigError> {
    let Some(name) = &raw.name else {
        return Ok(raw.preset.clone().unwrap_or_else(|| CUSTOM.to_owned()));
    };
    let shown = format!("\"{name}\"");
    if name.is_empty() {
        return Err(invalid("model.name", shown, "must not be empty"));
    }
    if raw.preset.as_ref() != Some(name) && presets::model(name).is_ok() {
        return Err(invalid(
            "model.name",
            shown,
            "is the name of a preset; choose another, or give model.preset",
        ));
    }
    Ok(name.clone())
}

fn required(field: &'static str, value: Option<usize>) -> Result<usize, ConfigError> {
    let hint = || "give it, or a model.preset such as \"gpt2-124m\"".to_owned();
    value.ok_or_else(|| ConfigError::Missing { field, hint: hint() })
}

fn head_dim(raw: Option<usize>, hidden: usize, heads: usize) -> Result<usize, ConfigError> {
    if raw.is_none() && !hidden.is_multiple_of(heads) {
        let rule = format!("is not a multiple of model.heads = {heads}; change one, or give model.head_dim");
        return Err(invalid("model.hidden", hidden, rule));
    }
    within("model.head_dim", raw.unwrap_or(hidden / heads), 1..=1 << 12)
}

/// Four times the hidden width. A gated MLP of 8/3 of it has the same number of parameters with three matrices; Llama rounds up to a
/// multiple of 256.
fn default_ffn(features: &Features, hidden: usize) -> usize {
    let gated = features.activations[0].is_gated();
    if gated { (8 * hidden).div_ceil(3).next_multiple_of(256) } else { 4 * hidden }
}

/// Learned positions cannot be exceeded. For other models the number is only information.
fn positions(raw: Option<usize>, features: &Features, sequence: usize) -> Result<usize, ConfigError> {
    let positions = raw.unwrap_or(sequence.max(1));
    if features.positions == Positions::Learned && sequence > positions {
        let rule =
            format!("is less than batch.sequence = {sequence}, and learned positions cannot be exceeded");
        return Err(invalid("model.positions", positions, rule));
    }
    Ok(positions.max(sequence))
}

fn parallel_residual(raw: Option<bool>, features: &Features) -> Result<bool, ConfigError> {
    if raw == Some(true) && !features.parallel_residual {
        let families = families(|features| features.parallel_residual);
        let rule = format!("needs model.family = {families}; the others add attention before the MLP");
        return Err(invalid("model.parallel_residual", true, rule));
    }
    Ok(raw.unwrap_or(features.parallel_residual))
}

fn activation(raw: Option<Activation>, family: Family) -> Result<Activation, ConfigError> {
    let allowed = family.features().activations;
    match raw {
        Some(given) if !allowed.contains(&given) => {
            let words: Vec<String> = allowed.iter().map(|word| format!("\"{}\"", word.name())).collect();
            let rule =
                format!("is not one of model.family = \"{}\", which has {}", family.name(), either(&words));
            Err(invalid("model.activation", format!("\"{}\"", given.name()), rule))
        }
        other => Ok(other.unwrap_or(allowed[0])),
    }
}

fn rotary_fraction(raw: &RawModel, features: &Features) -> Result<f64, ConfigError> {
    let given = raw.rotary_fraction.filter(|&given| given != 0.0);
    if let (Positions::Learned, Some(fraction)) = (features.positions, given) {
        let rule = "has no meaning for learned positions; leave it out";
        return Err(invalid("model.rotary_fraction", fraction, rule));
    }
    Ok(raw.rotary_fraction()?.unwrap_or(features.rotary_fraction))
}

fn no_rotary_every(raw: &RawModel, features: &Features) -> Result<Option<usize>, ConfigError> {
    match (raw.no_rotary_every()?, features.no_rotary_every) {
        (Some(given), None) => {
            let rule =
                format!("needs model.family = {}", families(|features| features.no_rotary_every.is_some()));
            Err(invalid("model.no_rotary_every", given, rule))
        }
        (given, usual) => Ok(given.or(usual)),
    }
}

/// A key that only families with sliding windows have.
fn window_key(
    field: &'static str,
    given: Option<usize>,
    features: &Features,
) -> Result<Option<usize>, ConfigError> {
    only_with(field, given, features, |features| features.sliding_window)
}

/// A key that only families with soft caps have.
fn cap_key<T: std::fmt::Display>(
    field: &'static str,
    given: Option<T>,
    features: &Features,
) -> Result<Option<T>, ConfigError> {
    only_with(field, given, features, |features| features.soft_caps.is_some())
}

fn only_with<T: std::fmt::Display>(
    field: &'static str,
    given: Option<T>,
    features: &Features,
    has: impl Fn(&Features) -> bool,
) -> Result<Option<T>, ConfigError> {
    match given {
        Some(value) if !has(features) => {
            let rule = format!("needs model.family = {}", families(has));
            Err(invalid(field, value, rule))
        }
        given => Ok(given),
    }
}

/// The families with a feature, as words of an error.
fn families(has: impl Fn(&Features) -> bool) -> String {
    let having = Family::ALL.iter().filter(|family| has(family.features()));
    either(&having.map(|family| format!("\"{}\"", family.name())).collect::<Vec<_>>())
}

fn check_shape(model: &ModelSpec) -> Result<(), ConfigError> {
    let &ModelSpec { heads, kv_heads, head_dim, .. } = model;
    if !heads.is_multiple_of(kv_heads) {
        let allowed: Vec<usize> = divisors(heads).collect();
        let rule = format!("does not divide model.heads = {heads}; use {}", either(&allowed));
        return Err(invalid("model.kv_heads", kv_heads, rule));
    }
    if !model.has_learned_positions() && head_dim % 2 == 1 {
        return Err(invalid("model.head_dim", head_dim, "must be even: rotary positions turn pairs"));
    }
    Ok(())
}
