//! The location of every parameter in Hugging Face's tensors: the name of the tensor, and the layout in it.
//!
//! GPT-2 stores matrices transposed (`[inputs, outputs]`), with query, key and value side by side in one tensor. GPT-NeoX
//! stores query, key and value in one tensor, head by head. Llama stores each in its own tensor.

use kintsugi_plan::Unit;
use kintsugi_plan::parameters::{Parameter, ParameterKind, parameters};
use kintsugi_spec::{Family, ModelSpec};

/// The location of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorLocation {
    /// The tensor's name.
    pub name: String,
    /// Which part of the tensor the parameter is.
    pub part: TensorPart,
    /// Whether the tensor stores the matrix by columns.
    pub transposed: bool,
}

/// Which part of a tensor a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorPart {
    /// The whole tensor.
    Whole,
    /// A third of the tensor's outputs.
    Third(usize),
    /// A third of the outputs of every head. Each third has `head_dim` rows.
    ThirdOfHeads { third: usize, head_dim: usize },
}

impl TensorLocation {
    /// The shape of the tensor that holds this parameter.
    pub fn tensor_shape(&self, parameter: &Parameter) -> Vec<usize> {
        let parts = if self.part == TensorPart::Whole { 1 } else { 3 };
        let [rows, columns] = [parts * parameter.valid_rows, parameter.shape[1]];
        match (parameter.decay, self.transposed) {
            // Norms and biases: vectors.
            (false, _) => vec![rows],
            (true, false) => vec![rows, columns],
            (true, true) => vec![columns, rows],
        }
    }
}

/// All parameters of a model in model order, without vocabulary padding.
pub(super) fn all_parameters(model: &ModelSpec) -> impl Iterator<Item = Parameter> {
    let positions = (model.family == Family::Gpt).then_some(Unit::Positions);
    let layers = (0..model.layers).map(Unit::Layer);
    let units = [Unit::Table].into_iter().chain(positions).chain(layers).chain([Unit::Head]);
    units.flat_map(|unit| parameters(model, unit, 1))
}

/// Number of parameters of a model, without padding.
pub fn parameter_count(model: &ModelSpec) -> u64 {
    all_parameters(model).map(|parameter| parameter.valid_elements() as u64).sum()
}

/// The prefix of all tensor names except the head's.
pub(super) fn base(family: Family) -> &'static str {
    match family {
        Family::Gpt => "transformer.",
        Family::Neox => "gpt_neox.",
        Family::Llama => "model.",
    }
}

/// The location of a parameter. All tensor names except the head's start with `base`.
pub(super) fn location(model: &ModelSpec, base: &str, unit: Unit, kind: ParameterKind) -> TensorLocation {
    let local = match model.family {
        Family::Gpt => gpt2(kind),
        Family::Neox => neox(kind, model.head_dim),
        Family::Llama => llama(kind),
    };
    let name = match unit {
        Unit::Layer(layer) => {
            let list = if model.family == Family::Gpt { "h" } else { "layers" };
            format!("{base}{list}.{layer}.{}", local.name)
        }
        Unit::Head if kind == ParameterKind::Output => local.name,
        Unit::Table | Unit::Positions | Unit::Head => format!("{base}{}", local.name),
    };
    TensorLocation { name, ..local }
}

/// Whether a tensor is a known buffer without parameters, or a copy of the token table.
pub(super) fn is_ignored(model: &ModelSpec, name: &str) -> bool {
    const BUFFERS: [&str; 5] = [
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
        ".rotary_emb.inv_freq",
    ];
    let copy = model.tied && name == location(model, "", Unit::Head, ParameterKind::Output).name;
    copy || BUFFERS.iter().any(|end| name.ends_with(end))
}

fn whole(name: &str) -> TensorLocation {
    TensorLocation { name: name.to_owned(), part: TensorPart::Whole, transposed: false }
}

fn gpt2(kind: ParameterKind) -> TensorLocation {
    let transposed = |name: &str| TensorLocation { transposed: true, ..whole(name) };
    let third = |third| TensorLocation { part: TensorPart::Third(third), ..transposed("attn.c_attn.weight") };
    let third_bias = |third| TensorLocation { part: TensorPart::Third(third), ..whole("attn.c_attn.bias") };
    match kind {
        ParameterKind::Table => whole("wte.weight"),
        ParameterKind::Positions => whole("wpe.weight"),
        ParameterKind::AttentionNormWeight => whole("ln_1.weight"),
        ParameterKind::AttentionNormBias => whole("ln_1.bias"),
        ParameterKind::MlpNormWeight => whole("ln_2.weight"),
        ParameterKind::MlpNormBias => whole("ln_2.bias"),
        ParameterKind::AttentionOutBias => whole("attn.c_proj.bias"),
        ParameterKind::MlpOutBias => whole("mlp.c_proj.bias"),
        ParameterKind::QueryWeight => third(0),
        ParameterKind::KeyWeight => third(1),
        ParameterKind::ValueWeight => third(2),
        ParameterKind::QueryBias => third_bias(0),
        ParameterKind::KeyBias => third_bias(1),
        ParameterKind::ValueBias => third_bias(2),
        ParameterKind::AttentionOutWeight => transposed("attn.c_proj.weight"),
        ParameterKind::MlpInWeight => transposed("mlp.c_fc.weight"),
        ParameterKind::MlpInBias => whole("mlp.c_fc.bias"),
        ParameterKind::MlpOutWeight => transposed("mlp.c_proj.weight"),
        ParameterKind::FinalNormWeight => whole("ln_f.weight"),
        ParameterKind::FinalNormBias => whole("ln_f.bias"),
        ParameterKind::Output => whole("lm_head.weight"),
        ParameterKind::MlpGateWeight => unreachable!("GPT-2 has no gate"),
    }
}

fn neox(kind: ParameterKind, head_dim: usize) -> TensorLocation {
    let third = |name: &str, third| TensorLocation {
        part: TensorPart::ThirdOfHeads { third, head_dim },
        ..whole(name)
    };
    let weight = |n| third("attention.query_key_value.weight", n);
    let bias = |n| third("attention.query_key_value.bias", n);
    match kind {
        ParameterKind::Table => whole("embed_in.weight"),
        ParameterKind::AttentionNormWeight => whole("input_layernorm.weight"),
        ParameterKind::AttentionNormBias => whole("input_layernorm.bias"),
        ParameterKind::MlpNormWeight => whole("post_attention_layernorm.weight"),
        ParameterKind::MlpNormBias => whole("post_attention_layernorm.bias"),
        ParameterKind::AttentionOutBias => whole("attention.dense.bias"),
        ParameterKind::MlpOutBias => whole("mlp.dense_4h_to_h.bias"),
        ParameterKind::QueryWeight => weight(0),
        ParameterKind::KeyWeight => weight(1),
        ParameterKind::ValueWeight => weight(2),
        ParameterKind::QueryBias => bias(0),
        ParameterKind::KeyBias => bias(1),
        ParameterKind::ValueBias => bias(2),
        ParameterKind::AttentionOutWeight => whole("attention.dense.weight"),
        ParameterKind::MlpInWeight => whole("mlp.dense_h_to_4h.weight"),
        ParameterKind::MlpInBias => whole("mlp.dense_h_to_4h.bias"),
        ParameterKind::MlpOutWeight => whole("mlp.dense_4h_to_h.weight"),
        ParameterKind::FinalNormWeight => whole("final_layer_norm.weight"),
        ParameterKind::FinalNormBias => whole("final_layer_norm.bias"),
        ParameterKind::Output => whole("embed_out.weight"),
        ParameterKind::Positions | ParameterKind::MlpGateWeight => unreachable!("GPT-NeoX has no {kind}"),
    }
}

fn llama(kind: ParameterKind) -> TensorLocation {
    whole(match kind {
        ParameterKind::Table => "embed_tokens.weight",
        ParameterKind::AttentionNormWeight => "input_layernorm.weight",
        ParameterKind::MlpNormWeight => "post_attention_layernorm.weight",
        ParameterKind::QueryWeight => "self_attn.q_proj.weight",
        ParameterKind::KeyWeight => "self_attn.k_proj.weight",
        ParameterKind::ValueWeight => "self_attn.v_proj.weight",
        ParameterKind::AttentionOutWeight => "self_attn.o_proj.weight",
        ParameterKind::MlpGateWeight => "mlp.gate_proj.weight",
        ParameterKind::MlpInWeight => "mlp.up_proj.weight",
        ParameterKind::MlpOutWeight => "mlp.down_proj.weight",
        ParameterKind::FinalNormWeight => "norm.weight",
        ParameterKind::Output => "lm_head.weight",
        _ => unreachable!("Llama has no {kind}"),
    })
}
