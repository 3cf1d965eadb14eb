//! The framework of a configuration: overheads beside the plan's own work.

use kintsugi_spec::FrameworkSpec;

use super::error::{ConfigError, not_negative, positive};
use super::raw::RawFramework;

/// The framework: a preset's, scalar by scalar, or this engine itself.
pub(super) fn resolve(raw: &RawFramework) -> Result<FrameworkSpec, ConfigError> {
    let none = FrameworkSpec::default();
    let or = |field: &str, value: Option<f64>, default: f64| {
        not_negative(&format!("framework.{field}"), value.unwrap_or(default))
    };
    let factor = |field: &str, value: Option<f64>, default: f64| {
        positive(&format!("framework.{field}"), value.unwrap_or(default))
    };
    Ok(FrameworkSpec {
        step: or("step", raw.step, none.step)?,
        host: or("host", raw.host, none.host)?,
        elementwise: factor("elementwise", raw.elementwise, none.elementwise)?,
        dropout: or("dropout", raw.dropout, none.dropout)?,
        attention_again: or("attention_again", raw.attention_again, none.attention_again)?,
        recompute_whole: raw.recompute_whole.unwrap_or(none.recompute_whole),
        scatter_messages: raw.scatter_messages.unwrap_or(none.scatter_messages),
        interference: or("interference", raw.interference, none.interference)?,
        reserve: or("reserve", raw.reserve, none.reserve)?,
        logit_bytes: or("logit_bytes", raw.logit_bytes, none.logit_bytes)?,
        kept: factor("kept", raw.kept, none.kept)?,
        name: raw.preset.clone().unwrap_or(none.name),
    })
}
