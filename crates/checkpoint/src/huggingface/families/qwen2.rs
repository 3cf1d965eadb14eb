//! Qwen2 and Qwen2.5: Llama with biases of query, key and value.

use kintsugi_spec::Family;

use super::llama_like::{self, Reading};
use super::{FamilyFormat, windows};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Qwen2,
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        let model = llama_like::read(fields, &Reading::of(Family::Qwen2))?;
        windows::read_optional(fields, model)
    },
    describe: |model| {
        let mut description = llama_like::describe_whole_rotation(model)?;
        description.extend(windows::describe_optional(model));
        Ok(description)
    },
    location: |_, kind| llama_like::location(kind),
};
