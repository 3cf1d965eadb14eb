//! Mistral: Llama with a sliding window.

use kintsugi_spec::{Family, ModelSpec};
use serde_json::json;

use super::llama_like::{self, Reading};
use super::{FamilyFormat, sliding_window};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Mistral,
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        let model = llama_like::read(fields, &Reading::of(Family::Mistral))?;
        Ok(ModelSpec { sliding_window: sliding_window(fields, Some(4096))?, ..model })
    },
    describe: |model| {
        let mut description = llama_like::describe_whole_rotation(model)?;
        description.insert("sliding_window".to_owned(), json!(model.sliding_window));
        Ok(description)
    },
    location: |_, kind| llama_like::location(kind),
};
