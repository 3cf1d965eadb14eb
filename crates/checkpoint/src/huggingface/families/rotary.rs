//! The fields of rotary positions, in the spelling of older and of newer versions of transformers.

use kintsugi_spec::{Family, ModelSpec, RotaryScaling, RotaryScalingKind, amplitude};
use serde_json::{Value, json};

use super::either;
use crate::CheckpointError;
use crate::huggingface::fields::Fields;

/// The settings of rotary positions.
pub(super) struct RotaryFields {
    pub base: f64,
    pub fraction: f64,
    pub scaling: Option<RotaryScaling>,
}

impl RotaryFields {
    /// Newer files have `rope_parameters`, older ones fields of their own and `rope_scaling`.
    pub fn read(
        fields: &Fields,
        family: Family,
        base: f64,
        fraction: f64,
    ) -> Result<RotaryFields, CheckpointError> {
        let kinds: &[&str] = if family.features().rotary_scaling {
            &["default", "llama3", "yarn", "linear"]
        } else {
            &["default"]
        };
        let mut scaling = None;
        for field in ["rope_scaling", "rope_parameters"] {
            let inner = fields.object(field)?;
            let kind = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
            match inner.word(kind, "default")? {
                kind if !kinds.contains(&kind) => {
                    let rule = format!("is not supported; only the rope_type {} is", either(kinds));
                    return Err(fields.refused(field, &rule));
                }
                "llama3" => scaling = Some(llama3_scaling(&inner)?),
                "yarn" => scaling = Some(yarn_scaling(fields, &inner)?),
                "linear" => scaling = Some(linear_scaling(&inner)?),
                _ => {}
            }
        }
        let inner = fields.object("rope_parameters")?;
        Ok(RotaryFields {
            base: inner.number("rope_theta", base, 1.0..=1e12)?,
            fraction: inner.number("partial_rotary_factor", fraction, 0.0..=1.0)?,
            scaling,
        })
    }
}

/// Rotary positions as newer versions of transformers read them.
pub(super) fn rope_parameters(model: &ModelSpec) -> Value {
    let mut parameters = model.rotary_scaling.map_or(json!({ "rope_type": "default" }), rope_scaling);
    parameters["rope_theta"] = json!(model.rotary_base);
    parameters
}

/// The same scaling as older versions read it.
pub(super) fn rope_scaling(scaling: RotaryScaling) -> Value {
    let RotaryScaling { kind, factor, low, high, positions, attention_factor, truncate } = scaling;
    match kind {
        RotaryScalingKind::Llama3 => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": positions,
        }),
        RotaryScalingKind::Yarn => json!({
            "rope_type": "yarn",
            "factor": factor,
            "beta_slow": low,
            "beta_fast": high,
            "original_max_position_embeddings": positions,
            "attention_factor": attention_factor,
            "truncate": truncate,
        }),
        RotaryScalingKind::Linear => json!({ "rope_type": "linear", "factor": factor }),
    }
}

/// Llama 3.1's scaling, with the defaults of its first model.
fn llama3_scaling(fields: &Fields) -> Result<RotaryScaling, CheckpointError> {
    let usual = RotaryScaling::default();
    let positions = fields.optional_size("original_max_position_embeddings", 1..=1 << 30)?;
    let scaling = RotaryScaling {
        factor: fields.number("factor", usual.factor, 1.0..=1e6)?,
        low: fields.number("low_freq_factor", usual.low, 1e-6..=1e6)?,
        high: Some(fields.number("high_freq_factor", 4.0, 1e-6..=1e6)?),
        positions: positions.unwrap_or(usual.positions),
        ..usual
    };
    Ok(scaling.resolved())
}

/// `YaRN`'s, with the factor of queries and keys from `mscale` and `mscale_all_dim` if it is not given.
fn yarn_scaling(outer: &Fields, fields: &Fields) -> Result<RotaryScaling, CheckpointError> {
    let now = outer.size("max_position_embeddings", 1..=1 << 30)?;
    let positions = fields.optional_size("original_max_position_embeddings", 1..=1 << 30)?.unwrap_or(now);
    let factor = fields.number("factor", (now as f64 / positions as f64).max(1.0), 1.0..=1e6)?;
    let [mscale, mscale_all] = ["mscale", "mscale_all_dim"].map(|field| fields.number(field, 0.0, 0.0..=1e3));
    let usual = match (mscale?, mscale_all?) {
        (mscale, all) if mscale > 0.0 && all > 0.0 => amplitude(factor, mscale) / amplitude(factor, all),
        _ => amplitude(factor, 1.0),
    };
    let scaling = RotaryScaling {
        kind: RotaryScalingKind::Yarn,
        factor,
        low: fields.number("beta_slow", 1.0, 1e-6..=1e6)?,
        high: Some(fields.number("beta_fast", 32.0, 1e-6..=1e6)?),
        positions,
        attention_factor: Some(fields.number("attention_factor", usual, 1e-3..=1e3)?),
        truncate: fields.flag("truncate", true)?,
    };
    Ok(scaling.resolved())
}

fn linear_scaling(fields: &Fields) -> Result<RotaryScaling, CheckpointError> {
    let (kind, factor) = (RotaryScalingKind::Linear, fields.number("factor", 1.0, 1.0..=1e6)?);
    Ok(RotaryScaling { kind, factor, ..RotaryScaling::default() }.resolved())
}
