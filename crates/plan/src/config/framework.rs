//! The framework of a configuration: its overheads beside the plan's own work.

use kintsugi_spec::FrameworkSpec;

use super::error::{ConfigError, between, seconds, within};

/// Upper bound of factors and of bytes per number. Times and sizes computed from larger values would overflow.
const MAX_FACTOR: f64 = 1e3;

/// The framework. Fails if an overhead is out of range.
pub(super) fn resolve(spec: &FrameworkSpec) -> Result<FrameworkSpec, ConfigError> {
    let path = |key: &str| format!("framework.{key}");
    within(&path("fills"), spec.fills, 1..=1 << 10)?;
    within(&path("gather_pieces"), spec.gather_pieces, 1..=1 << 10)?;
    between(&path("reserve"), spec.reserve, 0.0..=1e15)?;
    spec.bucket.map(|bytes| between(&path("bucket"), bytes, 1e3..=1e15)).transpose()?;
    let times = [
        ("step", spec.step),
        ("host", spec.host),
        ("host_collective", spec.host_collective),
        ("host_staged", spec.host_staged),
    ];
    for (key, value) in times {
        seconds(&path(key), value)?;
    }
    let factors = [
        ("products", spec.products),
        ("attention", spec.attention),
        ("between_nodes", spec.between_nodes),
        ("replicas_between_nodes", spec.replicas_between_nodes.unwrap_or(spec.between_nodes)),
        ("kept", spec.kept),
        ("kept_tp", spec.kept_tp.unwrap_or(spec.kept)),
    ];
    for (key, value) in factors {
        between(&path(key), value, 1.0 / MAX_FACTOR..=MAX_FACTOR)?;
    }
    let additions = [
        ("dropout", spec.dropout),
        ("attention_again", spec.attention_again),
        ("products_again", spec.products_again),
        ("interference", spec.interference),
        ("logit_bytes", spec.logit_bytes),
        ("parameter_bytes", spec.parameter_bytes),
        ("bucket_bytes", spec.bucket_bytes),
        ("allocator", spec.allocator),
        ("keeps.stream", spec.keeps.stream),
        ("keeps.norms", spec.keeps.norms),
        ("keeps.heads", spec.keeps.heads),
        ("keeps.ffn", spec.keeps.ffn),
        ("keeps.scores", spec.keeps.scores),
        ("layer_gradients", spec.layer_gradients),
        ("kernels.copies", spec.kernels.copies),
    ];
    for (key, value) in additions {
        between(&path(key), value, 0.0..=MAX_FACTOR)?;
    }
    Ok(spec.clone())
}
