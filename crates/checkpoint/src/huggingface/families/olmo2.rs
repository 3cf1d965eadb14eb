//! OLMo 2: norms after attention and MLP, and a norm over all queries and one over all keys.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::Family;
use serde_json::json;

use super::llama_like::{self, Reading};
use super::{FamilyFormat, check_head_dim};
use crate::huggingface::names::TensorLocation;

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Olmo2,
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    base: "model.",
    layers: "layers",
    read: |fields| {
        fields.only("attention_bias", false)?;
        llama_like::read(fields, &Reading { norm_eps: 1e-5, ..Reading::of(Family::Olmo2) })
    },
    describe: |model| {
        check_head_dim(model, "OLMo 2")?;
        let mut description = llama_like::describe_whole_rotation(model)?;
        description.insert("attention_bias".to_owned(), json!(false));
        Ok(description)
    },
    location: |_, kind| match kind {
        ParameterKind::AttentionEndNormWeight => TensorLocation::whole("post_attention_layernorm.weight"),
        ParameterKind::MlpEndNormWeight => TensorLocation::whole("post_feedforward_layernorm.weight"),
        other => llama_like::location(other),
    },
};
