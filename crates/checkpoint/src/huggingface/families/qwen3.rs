//! Qwen3: Llama with a norm of every query and key head.

use kintsugi_spec::Family;
use serde_json::json;

use super::llama_like::{self, Reading};
use super::{FamilyFormat, HEADS, windows};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Qwen3,
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        fields.only("attention_bias", false)?;
        // Without it transformers assumes 128, whatever the width of the model.
        fields.size("head_dim", 1..=HEADS)?;
        windows::read_optional(fields, llama_like::read(fields, &Reading::of(Family::Qwen3))?)
    },
    describe: |model| {
        let mut description = llama_like::describe_whole_rotation(model)?;
        description.insert("attention_bias".to_owned(), json!(false));
        description.extend(windows::describe_optional(model));
        Ok(description)
    },
    location: |_, kind| llama_like::location(kind),
};
