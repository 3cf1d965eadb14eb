//! Reads a `config.json` as a model. Reads every field that affects the computation, and fails if its value is not supported.

use std::path::Path;

use kintsugi_spec::ModelSpec;

use super::families;
use super::fields::Fields;
use crate::CheckpointError;

/// The model that a `config.json` describes.
pub(super) fn read(path: &Path) -> Result<ModelSpec, CheckpointError> {
    let fields = Fields::read(path)?;
    if fields.get("quantization_config").is_some() {
        return Err(fields.refused("quantization_config", "is not supported; only plain weights are"));
    }
    (families::described_by(&fields)?.read)(&fields)
}
