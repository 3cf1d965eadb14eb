//! Llama 2 and 3.

use kintsugi_spec::Family;
use serde_json::json;

use super::llama_like::{self, Reading};
use super::{FamilyFormat, object};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Llama,
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        fields.only("attention_bias", false)?;
        fields.only("mlp_bias", false)?;
        llama_like::read(fields, &Reading::of(Family::Llama))
    },
    describe: |model| {
        let mut description = llama_like::describe_whole_rotation(model)?;
        description.extend(object(json!({ "attention_bias": false, "mlp_bias": false })));
        Ok(description)
    },
    location: |_, kind| llama_like::location(kind),
};
