//! A model as a `config.json`, for older and newer versions of transformers alike.

use kintsugi_plan::Compute;
use kintsugi_spec::ModelSpec;
use serde_json::{Map, Value, json};

use super::families::{self, UnsupportedModel, object};

/// A model that cannot be a Hugging Face folder.
#[derive(Debug, thiserror::Error)]
#[error("Hugging Face cannot describe this model: {0}")]
pub(super) struct DescriptionError(#[from] UnsupportedModel);

/// The `config.json` of a model whose weights have this type.
pub(super) fn describe(model: &ModelSpec, dtype: Compute) -> Result<Map<String, Value>, DescriptionError> {
    let format = families::of(model.family);
    let mut description =
        object(json!({ "architectures": [format.architecture], "model_type": format.model_type }));
    description.extend((format.describe)(model)?);
    let dtype = match dtype {
        Compute::Fp32 => "float32",
        Compute::Bf16 => "bfloat16",
        Compute::Fp16 => "float16",
    };
    description.extend(object(json!({
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
        "bos_token_id": null,
        "eos_token_id": null,
        "pad_token_id": null,
    })));
    Ok(description)
}
