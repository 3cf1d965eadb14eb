//! Sliding windows, whose size is one field, and whose layers are a list or follow from other fields.

use kintsugi_spec::ModelSpec;
use serde_json::{Map, Value, json};

use super::{LAYERS, UnsupportedModel, VOCAB, object};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;

/// The kinds of attention in `layer_types`.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Adds a window of `sliding_window` tokens, or of `missing` if the field is not there. Null is none. The layers with a window are
/// those of `layer_types`; if this is missing, those of `model`.
pub(super) fn read(
    fields: &Fields,
    model: ModelSpec,
    missing: Option<usize>,
) -> Result<ModelSpec, CheckpointError> {
    let given = fields.optional_size("sliding_window", 1..=VOCAB)?;
    let model =
        ModelSpec { sliding_window: if fields.has("sliding_window") { given } else { missing }, ..model };
    let Some(kinds) = kinds(fields, model.layers)? else { return Ok(model) };
    if model.sliding_window.is_none() || !kinds.contains(&SLIDING) {
        return Ok(ModelSpec {
            sliding_window: None,
            full_attention_every: model.features().full_attention_every,
            full_attention_first: None,
            ..model
        });
    }
    let is_full = |layer: usize| kinds[layer] == FULL;
    let first = (0..kinds.len()).take_while(|&layer| is_full(layer)).count();
    let every = (first..kinds.len()).find(|&layer| is_full(layer)).map(|layer| layer + 1);
    let found = ModelSpec {
        // A number beyond the last layer replaces a default.
        full_attention_every: every.or(model.features().full_attention_every.map(|_| model.layers + 1)),
        full_attention_first: Some(first).filter(|&first| first > 0),
        ..model
    };
    if (0..kinds.len()).all(|layer| found.window(layer).is_none() == is_full(layer)) {
        return Ok(found);
    }
    let rule = "is not supported; only windows from one layer on, or in all layers but every n-th, are";
    Err(fields.refused("layer_types", rule))
}

/// The same for families in which every layer has the window.
pub(super) fn read_every(
    fields: &Fields,
    model: ModelSpec,
    missing: Option<usize>,
) -> Result<ModelSpec, CheckpointError> {
    let model = read(fields, model, missing)?;
    if model.full_attention_every.or(model.full_attention_first).is_some() {
        let rule = "is not supported for this model_type; only the same attention in all layers is";
        return Err(fields.refused("layer_types", rule));
    }
    Ok(model)
}

/// The same for families whose window is used if `use_sliding_window` says so, from layer `max_window_layers` on.
pub(super) fn read_optional(fields: &Fields, model: ModelSpec) -> Result<ModelSpec, CheckpointError> {
    if !fields.flag("use_sliding_window", false)? {
        return Ok(model);
    }
    let first = fields.optional_size("max_window_layers", 0..=LAYERS)?.unwrap_or(28);
    let model = ModelSpec { full_attention_first: Some(first).filter(|&first| first > 0), ..model };
    let model = read(fields, model, Some(4096))?;
    // A window that no layer has is none.
    if (0..model.layers).any(|layer| model.window(layer).is_some()) {
        return Ok(model);
    }
    Ok(ModelSpec { sliding_window: None, full_attention_first: None, ..model })
}

/// The kind of attention of every layer, if they are listed.
fn kinds(fields: &Fields, layers: usize) -> Result<Option<Vec<&str>>, CheckpointError> {
    let Some(listed) = fields.get("layer_types") else { return Ok(None) };
    let known = |kind: &Value| [FULL, SLIDING].into_iter().find(|known| kind.as_str() == Some(*known));
    let kinds: Option<Vec<&str>> = listed.as_array().and_then(|listed| listed.iter().map(known).collect());
    kinds.filter(|kinds| kinds.len() == layers).map(Some).ok_or_else(|| {
        let rule = format!("must be \"{FULL}\" or \"{SLIDING}\" for each of {layers} layers");
        fields.refused("layer_types", &rule)
    })
}

/// The fields of the window of every layer.
pub(super) fn describe_every(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    if model.sliding_window.is_some() && (0..model.layers).any(|layer| model.window(layer).is_none()) {
        return Err(UnsupportedModel::Windows);
    }
    Ok(object(json!({ "sliding_window": model.sliding_window })))
}

/// The fields of windows in some layers.
pub(super) fn describe_layers(model: &ModelSpec) -> Map<String, Value> {
    let kind = |layer| if model.window(layer).is_some() { SLIDING } else { FULL };
    let kinds: Vec<&str> = (0..model.layers).map(kind).collect();
    object(json!({ "sliding_window": model.sliding_window, "layer_types": kinds }))
}

/// The same for a window that is used if `use_sliding_window` says so.
pub(super) fn describe_optional(model: &ModelSpec) -> Map<String, Value> {
    let mut description = describe_layers(model);
    description.extend(object(json!({
        "use_sliding_window": model.sliding_window.is_some(),
        "max_window_layers": model.full_attention_first.unwrap_or(0),
    })));
    description
}
