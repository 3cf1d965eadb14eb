//! Gemma 1: norms whose weights are stored minus one, GeGLU and scaled embeddings.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{Activation, Family};
use serde_json::json;

use super::gemma2::one_plus;
use super::llama_like::{self, Reading};
use super::{FamilyFormat, HEADS};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Gemma,
    model_type: "gemma",
    architecture: "GemmaForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        fields.only("attention_bias", false)?;
        fields.only("use_bidirectional_attention", false)?;
        // Without it transformers assumes 256, whatever the width of the model.
        fields.size("head_dim", 1..=HEADS)?;
        let reading = Reading { activation: Activation::Geglu, ..Reading::of(Family::Gemma) };
        llama_like::read(fields, &reading)
    },
    describe: |model| {
        let mut description = llama_like::describe_whole_rotation(model)?;
        description.insert("attention_bias".to_owned(), json!(false));
        Ok(description)
    },
    location: |_, kind| match kind {
        ParameterKind::AttentionNormWeight => one_plus("input_layernorm.weight"),
        ParameterKind::MlpNormWeight => one_plus("post_attention_layernorm.weight"),
        ParameterKind::FinalNormWeight => one_plus("norm.weight"),
        other => llama_like::location(other),
    },
};
