//! SmolLM3: Llama with layers that do not rotate.

use kintsugi_spec::{Family, ModelSpec};
use serde_json::{Map, Value, json};

use super::llama_like::{self, Reading};
use super::{FamilyFormat, LAYERS, UnsupportedModel, object};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Smollm3,
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    base: "model.",
    layers: "layers",
    read,
    describe,
    location: |_, kind| llama_like::location(kind),
};

fn read(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
    fields.only("use_sliding_window", false)?;
    fields.only("attention_bias", false)?;
    fields.only("mlp_bias", false)?;
    let model = llama_like::read(fields, &Reading { rotary_base: 2e6, ..Reading::of(Family::Smollm3) })?;
    let every = fields.optional_size("no_rope_layer_interval", 1..=LAYERS)?.unwrap_or(4);
    // The list decides; it is made from the interval if it is missing.
    if fields.get("no_rope_layers").is_some_and(|given| *given != rotated(&model, every)) {
        let rule = format!("is not supported; only layers without rotation at every multiple of {every} are");
        return Err(fields.refused("no_rope_layers", &rule));
    }
    Ok(ModelSpec { no_rotary_every: Some(every), ..model })
}

fn describe(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    let mut description = llama_like::describe_whole_rotation(model)?;
    let every = model.no_rotary_every.unwrap_or(model.layers + 1);
    description.extend(object(json!({
        "no_rope_layer_interval": every,
        "no_rope_layers": rotated(model, every),
        "use_sliding_window": false,
        "attention_bias": false,
        "mlp_bias": false,
    })));
    Ok(description)
}

/// For every layer 1 if it rotates, else 0.
fn rotated(model: &ModelSpec, every: usize) -> Value {
    (1..=model.layers).map(|layer| u8::from(!layer.is_multiple_of(every))).collect()
}
