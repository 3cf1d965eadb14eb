//! The fields of rotary positions, in the spelling of older and of newer versions of transformers.

use kintsugi_spec::{ModelSpec, RotaryScaling};
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
    /// Newer files have `rope_parameters`, older ones fields of their own and `rope_scaling`. `kinds` are the supported types of
    /// scaling.
    pub fn read(
        fields: &Fields,
        base: f64,
        fraction: f64,
        kinds: &[&str],
    ) -> Result<RotaryFields, CheckpointError> {
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
    json!({
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.positions,
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
