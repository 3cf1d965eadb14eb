//! Qwen3: Llama with a norm of every query and key head.

use kintsugi_spec::Family;
use serde_json::json;

use super::llama_like::{self, Reading};
use super::{FamilyFormat, HEADS, no_sliding_window, object};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Qwen3,
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        no_sliding_window(fields)?;
        fields.only("attention_bias", false)?;
        // Without it transformers assumes 128, whatever the width of the model.
        fields.size("head_dim", 1..=HEADS)?;
        llama_like::read(fields, &Reading::of(Family::Qwen3))
    },
    describe: |model| {
        let mut description = llama_like::describe_whole_rotation(model)?;
        description.extend(object(json!({ "attention_bias": false, "use_sliding_window": false })));
        Ok(description)
    },
    location: |_, kind| llama_like::location(kind),
};
