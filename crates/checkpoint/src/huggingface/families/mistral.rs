//! Mistral: Llama with a sliding window.

use kintsugi_spec::Family;

use super::llama_like::{self, Reading};
use super::{FamilyFormat, windows};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Mistral,
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        let model = llama_like::read(fields, &Reading::of(Family::Mistral))?;
        windows::read_every(fields, model, Some(4096))
    },
    describe: |model| {
        let mut description = llama_like::describe_whole_rotation(model)?;
        description.extend(windows::describe_every(model)?);
        Ok(description)
    },
    location: |_, kind| llama_like::location(kind),
};
