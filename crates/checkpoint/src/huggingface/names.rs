//! The location of every parameter in Hugging Face's tensors: the name of the tensor, and the layout in it.

use kintsugi_plan::Unit;
use kintsugi_plan::parameters::{Parameter, ParameterKind, parameters};
use kintsugi_spec::ModelSpec;

use super::families;

/// The location of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorLocation {
    /// The tensor's name.
    pub name: String,
    /// Which part of the tensor the parameter is.
    pub part: TensorPart,
    /// Whether the tensor stores the matrix by columns.
    pub transposed: bool,
    /// What the parameter is more than the tensor: 1 for the weights of norms that multiply by 1 + w.
    pub offset: f32,
}

/// Which part of a tensor a parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorPart {
    /// The whole tensor.
    Whole,
    /// Some of the tensor's outputs: `count` of them after the `first`, `of` all.
    Rows { first: usize, count: usize, of: usize },
    /// A third of the outputs of every head. Each third has `head_dim` rows.
    ThirdOfHeads { third: usize, head_dim: usize },
}

impl TensorPart {
    /// The number of output rows of the whole tensor; `rows` are those of this part.
    fn tensor_rows(self, rows: usize) -> usize {
        match self {
            TensorPart::Whole => rows,
            TensorPart::Rows { of, .. } => of,
            TensorPart::ThirdOfHeads { .. } => 3 * rows,
        }
    }

    /// The outputs that this part has of a tensor with `rows` outputs.
    pub fn rows_of(self, rows: usize) -> usize {
        match self {
            TensorPart::Whole => rows,
            TensorPart::Rows { count, of, .. } => rows * count / of,
            TensorPart::ThirdOfHeads { .. } => rows / 3,
        }
    }
}

impl TensorLocation {
    /// A tensor that is one parameter.
    pub fn whole(name: &str) -> Self {
        TensorLocation { name: name.to_owned(), part: TensorPart::Whole, transposed: false, offset: 0.0 }
    }

    /// The shape of the tensor that holds this parameter.
    pub fn tensor_shape(&self, parameter: &Parameter) -> Vec<usize> {
        let [rows, columns] = [self.part.tensor_rows(parameter.valid_rows), parameter.shape[1]];
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
    let positions = model.has_learned_positions().then_some(Unit::Positions);
    let layers = (0..model.layers).map(Unit::Layer);
    let units = [Unit::Table].into_iter().chain(positions).chain(layers).chain([Unit::Head]);
    units.flat_map(|unit| parameters(model, unit, 1))
}

/// Number of parameters of a model, without padding.
pub fn parameter_count(model: &ModelSpec) -> u64 {
    all_parameters(model).map(|parameter| parameter.valid_elements() as u64).sum()
}

/// The location of a parameter. All tensor names except the head's start with `base`.
pub(super) fn location(model: &ModelSpec, base: &str, unit: Unit, kind: ParameterKind) -> TensorLocation {
    let format = families::of(model.family);
    let local = (format.location)(model, kind);
    let name = match unit {
        Unit::Layer(layer) => format!("{base}{}.{layer}.{}", format.layers, local.name),
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
