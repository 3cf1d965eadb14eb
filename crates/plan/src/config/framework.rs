//! The framework of a configuration: overheads beside the plan's own work.

use kintsugi_spec::FrameworkSpec;

use super::error::{ConfigError, between, seconds, within};
use super::raw::RawFramework;

/// No framework is this many times slower, or takes this many bytes for a number: times and sizes computed from more
/// would overflow.
const LARGEST_FACTOR: f64 = 1e3;

/// The framework: a preset's, scalar by scalar, or this engine itself.
pub(super) fn resolve(raw: &RawFramework) -> Result<FrameworkSpec, ConfigError> {
    let none = FrameworkSpec::default();
    let or = |field: &str, value: Option<f64>, default: f64| {
        between(&format!("framework.{field}"), value.unwrap_or(default), 0.0..=LARGEST_FACTOR)
    };
    let seconds = |field: &str, value: Option<f64>, default: f64| {
        seconds(&format!("framework.{field}"), value.unwrap_or(default))
    };
    let factor = |field: &str, value: Option<f64>, default: f64| {
        let range = 1.0 / LARGEST_FACTOR..=LARGEST_FACTOR;
        between(&format!("framework.{field}"), value.unwrap_or(default), range)
    };
    Ok(FrameworkSpec {
        step: seconds("step", raw.step, none.step)?,
        fills: within("framework.fills", raw.fills.unwrap_or(none.fills), 1..=1 << 10)?,
        host: seconds("host", raw.host, none.host)?,
        host_collective: seconds("host_collective", raw.host_collective, none.host_collective)?,
        host_staged: seconds("host_staged", raw.host_staged, none.host_staged)?,
        elementwise: factor("elementwise", raw.elementwise, none.elementwise)?,
        dropout: or("dropout", raw.dropout, none.dropout)?,
        attention: factor("attention", raw.attention, none.attention)?,
        attention_again: or("attention_again", raw.attention_again, none.attention_again)?,
        recompute_whole: raw.recompute_whole.unwrap_or(none.recompute_whole),
        scatter_messages: raw.scatter_messages.unwrap_or(none.scatter_messages),
        message: seconds("message", raw.message, none.message)?,
        between_nodes: factor("between_nodes", raw.between_nodes, none.between_nodes)?,
        replicas_between_nodes: factor(
            "replicas_between_nodes",
            raw.replicas_between_nodes.or(raw.between_nodes),
            none.replicas_between_nodes,
        )?,
        whole_sums: raw.whole_sums.unwrap_or(none.whole_sums),
        interference: or("interference", raw.interference, none.interference)?,
        reserve: between("framework.reserve", raw.reserve.unwrap_or(none.reserve), 0.0..=1e15)?,
        logit_bytes: or("logit_bytes", raw.logit_bytes, none.logit_bytes)?,
        parameter_bytes: or("parameter_bytes", raw.parameter_bytes, none.parameter_bytes)?,
        kept: factor("kept", raw.kept, none.kept)?,
        gathered: or("gathered", raw.gathered, none.gathered)?,
        temporary: or("temporary", raw.temporary, none.temporary)?,
        name: raw.preset.clone().unwrap_or(none.name),
    })
}
