//! Where every parameter lies in Hugging Face's tensors: name, and how it is arranged there.
//!
//! GPT-2 keeps matrices transposed (`[inputs, outputs]`) and query, key and value side by side in one; GPT-NeoX keeps them
//! in one matrix too, head by head (query, key and value of the first head, then of the second); Llama keeps each alone.

use kintsugi_plan::Unit;
use kintsugi_plan::parameters::{Parameter, Slot, parameters};
use kintsugi_spec::{Family, ModelSpec};

/// A parameter's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The tensor's name.
    pub name: String,
    /// Which part of the tensor it is.
    pub part: Part,
    /// Whether a matrix lies there by columns.
    pub transposed: bool,
}

/// Which part of a tensor a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// This third of its outputs.
    Third(usize),
    /// This third of the outputs of every head, of `head_dim` rows each.
    ThirdOfHeads { third: usize, head_dim: usize },
}

impl Place {
    /// The shape of the tensor that holds this parameter.
    pub fn tensor_shape(&self, parameter: &Parameter) -> Vec<usize> {
        let parts = if self.part == Part::Whole { 1 } else { 3 };
        let [rows, columns] = [parts * parameter.valid_rows, parameter.shape[1]];
        match (parameter.decay, self.transposed) {
            // Norms and biases: vectors.
            (false, _) => vec![rows],
            (true, false) => vec![rows, columns],
            (true, true) => vec![columns, rows],
        }
    }
}

/// All parameters of a model in model order, the vocabulary without padding.
pub(super) fn all_parameters(model: &ModelSpec) -> impl Iterator<Item = Parameter> {
    let positions = (model.family == Family::Gpt).then_some(Unit::Positions);
    let layers = (0..model.layers).map(Unit::Layer);
    let units = [Unit::Table].into_iter().chain(positions).chain(layers).chain([Unit::Head]);
    units.flat_map(|unit| parameters(model, unit, 1))
}

/// Parameters of a model, padding left out.
pub fn parameter_count(model: &ModelSpec) -> u64 {
    all_parameters(model).map(|parameter| parameter.valid_elements() as u64).sum()
}

/// What all tensors' names but the head's start with.
pub(super) fn base(family: Family) -> &'static str {
    match family {
        Family::Gpt => "transformer.",
        Family::Neox => "gpt_neox.",
        Family::Llama => "model.",
    }
}

/// Where a parameter lies; names of the base start with `base`.
pub(super) fn place(model: &ModelSpec, base: &str, unit: Unit, slot: Slot) -> Place {
    let local = match model.family {
        Family::Gpt => gpt2(slot),
        Family::Neox => neox(slot, model.head_dim),
        Family::Llama => llama(slot),
    };
    let name = match unit {
        Unit::Layer(layer) => {
            let list = if model.family == Family::Gpt { "h" } else { "layers" };
            format!("{base}{list}.{layer}.{}", local.name)
        }
        Unit::Head if slot == Slot::Output => local.name,
        Unit::Table | Unit::Positions | Unit::Head => format!("{base}{}", local.name),
    };
    Place { name, ..local }
}

/// Whether a tensor is known to hold nothing that is learned, or a copy of the token table.
pub(super) fn is_ignored(model: &ModelSpec, name: &str) -> bool {
    const BUFFERS: [&str; 5] = [
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
        ".rotary_emb.inv_freq",
    ];
    let copy = model.tied && name == place(model, "", Unit::Head, Slot::Output).name;
    copy || BUFFERS.iter().any(|end| name.ends_with(end))
}

fn whole(name: &str) -> Place {
    Place { name: name.to_owned(), part: Part::Whole, transposed: false }
}

fn gpt2(slot: Slot) -> Place {
    let transposed = |name: &str| Place { transposed: true, ..whole(name) };
    let third = |third| Place { part: Part::Third(third), ..transposed("attn.c_attn.weight") };
    let third_bias = |third| Place { part: Part::Third(third), ..whole("attn.c_attn.bias") };
    match slot {
        Slot::Table => whole("wte.weight"),
        Slot::Positions => whole("wpe.weight"),
        Slot::AttentionNormWeight => whole("ln_1.weight"),
        Slot::AttentionNormBias => whole("ln_1.bias"),
        Slot::MlpNormWeight => whole("ln_2.weight"),
        Slot::MlpNormBias => whole("ln_2.bias"),
        Slot::AttentionOutBias => whole("attn.c_proj.bias"),
        Slot::MlpOutBias => whole("mlp.c_proj.bias"),
        Slot::QueryWeight => third(0),
        Slot::KeyWeight => third(1),
        Slot::ValueWeight => third(2),
        Slot::QueryBias => third_bias(0),
        Slot::KeyBias => third_bias(1),
        Slot::ValueBias => third_bias(2),
        Slot::AttentionOutWeight => transposed("attn.c_proj.weight"),
        Slot::MlpInWeight => transposed("mlp.c_fc.weight"),
        Slot::MlpInBias => whole("mlp.c_fc.bias"),
        Slot::MlpOutWeight => transposed("mlp.c_proj.weight"),
        Slot::FinalNormWeight => whole("ln_f.weight"),
        Slot::FinalNormBias => whole("ln_f.bias"),
        Slot::Output => whole("lm_head.weight"),
        Slot::MlpGateWeight => unreachable!("GPT-2 has no gate"),
    }
}

fn neox(slot: Slot, head_dim: usize) -> Place {
    let third = |name: &str, third| Place { part: Part::ThirdOfHeads { third, head_dim }, ..whole(name) };
    let weight = |n| third("attention.query_key_value.weight", n);
    let bias = |n| third("attention.query_key_value.bias", n);
    match slot {
        Slot::Table => whole("embed_in.weight"),
        Slot::AttentionNormWeight => whole("input_layernorm.weight"),
        Slot::AttentionNormBias => whole("input_layernorm.bias"),
        Slot::MlpNormWeight => whole("post_attention_layernorm.weight"),
        Slot::MlpNormBias => whole("post_attention_layernorm.bias"),
        Slot::AttentionOutBias => whole("attention.dense.bias"),
        Slot::MlpOutBias => whole("mlp.dense_4h_to_h.bias"),
        Slot::QueryWeight => weight(0),
        Slot::KeyWeight => weight(1),
        Slot::ValueWeight => weight(2),
        Slot::QueryBias => bias(0),
        Slot::KeyBias => bias(1),
        Slot::ValueBias => bias(2),
        Slot::AttentionOutWeight => whole("attention.dense.weight"),
        Slot::MlpInWeight => whole("mlp.dense_h_to_4h.weight"),
        Slot::MlpInBias => whole("mlp.dense_h_to_4h.bias"),
        Slot::MlpOutWeight => whole("mlp.dense_4h_to_h.weight"),
        Slot::FinalNormWeight => whole("final_layer_norm.weight"),
        Slot::FinalNormBias => whole("final_layer_norm.bias"),
        Slot::Output => whole("embed_out.weight"),
        Slot::Positions | Slot::MlpGateWeight => unreachable!("GPT-NeoX has no {slot}"),
    }
}

fn llama(slot: Slot) -> Place {
    whole(match slot {
        Slot::Table => "embed_tokens.weight",
        Slot::AttentionNormWeight => "input_layernorm.weight",
        Slot::MlpNormWeight => "post_attention_layernorm.weight",
        Slot::QueryWeight => "self_attn.q_proj.weight",
        Slot::KeyWeight => "self_attn.k_proj.weight",
        Slot::ValueWeight => "self_attn.v_proj.weight",
        Slot::AttentionOutWeight => "self_attn.o_proj.weight",
        Slot::MlpGateWeight => "mlp.gate_proj.weight",
        Slot::MlpInWeight => "mlp.up_proj.weight",
        Slot::MlpOutWeight => "mlp.down_proj.weight",
        Slot::FinalNormWeight => "norm.weight",
        Slot::Output => "lm_head.weight",
        _ => unreachable!("Llama has no {slot}"),
    })
}
