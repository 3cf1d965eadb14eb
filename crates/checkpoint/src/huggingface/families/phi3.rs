//! Phi-3 and Phi-4. Query, key and value are in one tensor, and so are gate and up.

use kintsugi_plan::parameters::ParameterKind;
use kintsugi_spec::{Family, ModelSpec};
use serde_json::{Map, Value, json};

use super::llama_like::{self, Reading};
use super::{FamilyFormat, UnsupportedModel, check_head_dim, object, rotated_share, windows};
use crate::CheckpointError;
use crate::huggingface::fields::Fields;
use crate::huggingface::names::{TensorLocation, TensorPart};

pub(super) const FORMAT: FamilyFormat = FamilyFormat {
    family: Family::Phi3,
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    base: "model.",
    layers: "layers",
    read,
    describe,
    location,
};

fn read(fields: &Fields) -> Result<ModelSpec, CheckpointError> {
    let reading = Reading { partial_rotation: true, norm_eps: 1e-5, ..Reading::of(Family::Phi3) };
    let model = llama_like::read(fields, &reading)?;
    // The transformers library rounds the number of rotary dims down. We round it to an even number.
    if model.rotary_dims() != (model.head_dim as f64 * model.rotary_fraction) as usize {
        let rule = format!("of heads of width {} is not an even number of dims", model.head_dim);
        return Err(fields.refused("partial_rotary_factor", &rule));
    }
    windows::read_every(fields, model, None)
}

fn describe(model: &ModelSpec) -> Result<Map<String, Value>, UnsupportedModel> {
    check_head_dim(model, "Phi-3")?;
    if model.rotary_dims() == 0 {
        return Err(UnsupportedModel::NoRotation(model.rotary_fraction));
    }
    let mut description = llama_like::describe(model)?;
    description.extend(windows::describe_every(model)?);
    description["rope_parameters"]["partial_rotary_factor"] = json!(rotated_share(model));
    description.extend(object(json!({
        "partial_rotary_factor": rotated_share(model),
        "original_max_position_embeddings": model.positions,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    })));
    Ok(description)
}

fn location(model: &ModelSpec, kind: ParameterKind) -> TensorLocation {
    let [queries, keys] = [model.heads, model.kv_heads].map(|heads| heads * model.head_dim);
    let qkv = |first, count| part("self_attn.qkv_proj.weight", first, count, queries + 2 * keys);
    let gate_up = |first| part("mlp.gate_up_proj.weight", first, model.ffn, 2 * model.ffn);
    match kind {
        ParameterKind::QueryWeight => qkv(0, queries),
        ParameterKind::KeyWeight => qkv(queries, keys),
        ParameterKind::ValueWeight => qkv(queries + keys, keys),
        ParameterKind::MlpGateWeight => gate_up(0),
        ParameterKind::MlpInWeight => gate_up(model.ffn),
        other => llama_like::location(other),
    }
}

fn part(name: &str, first: usize, count: usize, of: usize) -> TensorLocation {
    TensorLocation { part: TensorPart::Rows { first, count, of }, ..TensorLocation::whole(name) }
}
