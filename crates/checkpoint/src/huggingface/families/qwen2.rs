//! Qwen2 and Qwen2.5: Llama with biases of query, key and value.

use kintsugi_spec::Family;

use super::llama_like::{self, Reading};
use super::{FamilyFormat, no_sliding_window};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Qwen2,
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        no_sliding_window(fields)?;
        llama_like::read(fields, &Reading::of(Family::Qwen2))
    },
    describe: llama_like::describe_whole_rotation,
    location: |_, kind| llama_like::location(kind),
};
