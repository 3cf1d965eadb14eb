//! What the parameters of a model are, how each is split over tp, and where each lies in its unit's flat buffer.
//!
//! How a parameter is split is data on the parameter: initialisation, comparison and resharding all follow it.
//! A unit's replicated parameters come first, so that one reduction over tp covers them, and parameters that are
//! multiplied together (query, key, value; gate, up) are neighbours, so that one matrix product covers them.

use std::fmt;
use std::ops::Range;

use kintsugi_spec::{Activation, Family, ModelSpec};

use crate::{Plan, Unit};

/// Which parameter of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Slot {
    Table,
    Positions,
    AttentionNormWeight,
    AttentionNormBias,
    MlpNormWeight,
    MlpNormBias,
    AttentionOutBias,
    MlpOutBias,
    QueryWeight,
    KeyWeight,
    ValueWeight,
    QueryBias,
    KeyBias,
    ValueBias,
    AttentionOutWeight,
    MlpGateWeight,
    MlpInWeight,
    MlpInBias,
    MlpOutWeight,
    FinalNormWeight,
    FinalNormBias,
    Output,
}

/// How a parameter is split over tp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Every rank holds all of it.
    Whole,
    /// By rows (dim 0): the outputs of a column-parallel layer, the tokens of a table.
    Rows,
    /// By columns (dim 1): the inputs of a row-parallel layer.
    Columns,
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initial {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
}

/// A parameter, before any splitting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameter {
    /// Unit it belongs to.
    pub unit: Unit,
    /// Which of the unit's.
    pub slot: Slot,
    /// Rows and columns; vectors have one column.
    pub shape: [usize; 2],
    /// Rows that are real; the rest pads the vocabulary.
    pub valid_rows: usize,
    /// How it is split over tp.
    pub split: Split,
    /// How it starts.
    pub initial: Initial,
    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub decay: bool,
}

/// A parameter of one tp rank, at its place in the flat buffer of its unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// The whole parameter.
    pub parameter: Parameter,
    /// Rows and columns of this rank's part.
    pub local_shape: [usize; 2],
    /// Where it lies.
    pub range: Range<usize>,
}

/// The flat buffer of a unit on one tp rank.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitLayout {
    /// The unit.
    pub unit: Unit,
    /// Its parameters, in order.
    pub placed: Vec<Placed>,
    /// Elements at the start that every tp rank holds alike.
    pub replicated: usize,
    /// Elements in all, padded to dp equal shards.
    pub len: usize,
}

impl Parameter {
    /// Elements, padding of the vocabulary left out.
    pub fn valid_elements(&self) -> usize {
        self.valid_rows * self.shape[1]
    }

    /// This parameter's name: `layer.3.query_weight`.
    pub fn name(&self) -> String {
        format!("{}.{}", self.unit, self.slot)
    }

    /// The shape of one of `tp` parts.
    pub fn local_shape(&self, tp: usize) -> [usize; 2] {
        let [rows, columns] = self.shape;
        match self.split {
            Split::Whole => [rows, columns],
            Split::Rows => [rows / tp, columns],
            Split::Columns => [rows, columns / tp],
        }
    }

    /// The index in the whole parameter of element `local` of part `part` of `tp`.
    pub fn global_index(&self, tp: usize, part: usize, local: usize) -> usize {
        let [_, columns] = self.shape;
        let [local_rows, local_columns] = self.local_shape(tp);
        let (row, column) = (local / local_columns, local % local_columns);
        match self.split {
            Split::Whole => local,
            Split::Rows => (part * local_rows + row) * columns + column,
            Split::Columns => row * columns + part * local_columns + column,
        }
    }
}

impl UnitLayout {
    /// A shard's length is a multiple of this, so that shards stay aligned in every type.
    pub const SHARD_MULTIPLE: usize = 64;

    fn new(unit: Unit, parameters: Vec<Parameter>, tp: usize, dp: usize) -> Self {
        let mut end = 0;
        let placed: Vec<Placed> = parameters
            .into_iter()
            .map(|parameter| {
                let local_shape = parameter.local_shape(tp);
                let start = end;
                end += local_shape[0] * local_shape[1];
                Placed { parameter, local_shape, range: start..end }
            })
            .collect();
        let replicated =
            placed.iter().take_while(|p| p.parameter.split == Split::Whole).map(|p| p.range.len());
        let replicated = replicated.sum();
        debug_assert!(
            placed.iter().all(|p| (p.range.start < replicated) == (p.parameter.split == Split::Whole))
        );
        UnitLayout { unit, placed, replicated, len: end.next_multiple_of(dp * Self::SHARD_MULTIPLE) }
    }

    /// Where a parameter lies; panics if the unit has no such parameter.
    pub fn range(&self, slot: Slot) -> Range<usize> {
        self.find(slot).unwrap_or_else(|| panic!("{} has no {slot}", self.unit)).range.clone()
    }

    /// Where the neighbours `first` to `last` lie together.
    pub fn span(&self, first: Slot, last: Slot) -> Range<usize> {
        self.range(first).start..self.range(last).end
    }

    /// A parameter, if the unit has it.
    pub fn find(&self, slot: Slot) -> Option<&Placed> {
        self.placed.iter().find(|p| p.parameter.slot == slot)
    }

    /// The part of the flat buffer that shard `index` of `shards` holds.
    pub fn shard(&self, shards: usize, index: usize) -> Range<usize> {
        let len = self.len / shards;
        index * len..(index + 1) * len
    }
}

impl Plan {
    /// The layout of a unit's flat buffer.
    pub fn layout(&self, unit: Unit) -> UnitLayout {
        UnitLayout::new(unit, parameters(&self.model, unit, self.mesh.tp), self.mesh.tp, self.mesh.dp)
    }

    /// Every unit of the model, in model order.
    pub fn units(&self) -> Vec<Unit> {
        let mut units = vec![Unit::Table];
        units.extend((self.model.family == Family::Gpt).then_some(Unit::Positions));
        units.extend((0..self.model.layers).map(Unit::Layer));
        units.push(Unit::Head);
        units
    }

    /// Number of parameters of the model, vocabulary padding left out.
    pub fn parameter_count(&self) -> u64 {
        let elements =
            |unit| parameters(&self.model, unit, 1).iter().map(|p| p.valid_elements() as u64).sum::<u64>();
        let layers = self.model.layers as u64;
        let rest: u64 = self.units().into_iter().filter(|u| !matches!(u, Unit::Layer(_))).map(elements).sum();
        rest + layers * elements(Unit::Layer(0))
    }
}

/// The parameters of a unit, replicated ones first.
pub fn parameters(model: &ModelSpec, unit: Unit, tp: usize) -> Vec<Parameter> {
    let build = Builder { model, unit, tp };
    match unit {
        Unit::Table => vec![build.vocabulary(Slot::Table)],
        Unit::Positions => {
            let shape = [model.positions, model.hidden];
            vec![build.matrix(Slot::Positions, shape, Split::Whole, model.init_std)]
        }
        Unit::Layer(_) => build.layer(),
        Unit::Head => {
            let mut list = build.norm(Slot::FinalNormWeight, Slot::FinalNormBias);
            list.extend((!model.tied).then(|| build.vocabulary(Slot::Output)));
            list
        }
    }
}

struct Builder<'a> {
    model: &'a ModelSpec,
    unit: Unit,
    tp: usize,
}

impl Builder<'_> {
    fn layer(&self) -> Vec<Parameter> {
        let ModelSpec { hidden, heads, kv_heads, head_dim, ffn, .. } = *self.model;
        let biases = self.model.biases();
        // GPT-2: the 2·layers projections that end in the residual stream start smaller, so its variance stays put.
        let residual = self.model.init_std / (2.0 * self.model.layers as f64).sqrt();
        let mut list = self.norm(Slot::AttentionNormWeight, Slot::AttentionNormBias);
        list.extend(self.norm(Slot::MlpNormWeight, Slot::MlpNormBias));
        if biases {
            list.push(self.bias(Slot::AttentionOutBias, hidden, Split::Whole));
            list.push(self.bias(Slot::MlpOutBias, hidden, Split::Whole));
        }
        let mut rows = |slot, outputs| {
            list.push(self.matrix(slot, [outputs, hidden], Split::Rows, self.model.init_std));
        };
        rows(Slot::QueryWeight, heads * head_dim);
        rows(Slot::KeyWeight, kv_heads * head_dim);
        rows(Slot::ValueWeight, kv_heads * head_dim);
        if self.model.activation == Activation::Swiglu {
            rows(Slot::MlpGateWeight, ffn);
        }
        rows(Slot::MlpInWeight, ffn);
        if biases {
            list.push(self.bias(Slot::QueryBias, heads * head_dim, Split::Rows));
            list.push(self.bias(Slot::KeyBias, kv_heads * head_dim, Split::Rows));
            list.push(self.bias(Slot::ValueBias, kv_heads * head_dim, Split::Rows));
            list.push(self.bias(Slot::MlpInBias, ffn, Split::Rows));
        }
        let mut columns = |slot, inputs| {
            list.push(self.matrix(slot, [hidden, inputs], Split::Columns, residual));
        };
        columns(Slot::AttentionOutWeight, heads * head_dim);
        columns(Slot::MlpOutWeight, ffn);
        list
    }

    fn matrix(&self, slot: Slot, shape: [usize; 2], split: Split, deviation: f64) -> Parameter {
        let initial = Initial::Normal(deviation);
        Parameter { unit: self.unit, slot, shape, valid_rows: shape[0], split, initial, decay: true }
    }

    fn vocabulary(&self, slot: Slot) -> Parameter {
        let shape = [self.model.padded_vocab(self.tp), self.model.hidden];
        Parameter {
            valid_rows: self.model.vocab,
            ..self.matrix(slot, shape, Split::Rows, self.model.init_std)
        }
    }

    fn vector(&self, slot: Slot, len: usize, split: Split, initial: Initial) -> Parameter {
        Parameter { unit: self.unit, slot, shape: [len, 1], valid_rows: len, split, initial, decay: false }
    }

    fn bias(&self, slot: Slot, len: usize, split: Split) -> Parameter {
        self.vector(slot, len, split, Initial::Zeros)
    }

    fn norm(&self, weight: Slot, bias: Slot) -> Vec<Parameter> {
        let mut list = vec![self.vector(weight, self.model.hidden, Split::Whole, Initial::Ones)];
        list.extend(self.model.biases().then(|| self.bias(bias, self.model.hidden, Split::Whole)));
        list
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Slot::Table => "table",
            Slot::Positions => "positions",
            Slot::AttentionNormWeight => "attention_norm_weight",
            Slot::AttentionNormBias => "attention_norm_bias",
            Slot::MlpNormWeight => "mlp_norm_weight",
            Slot::MlpNormBias => "mlp_norm_bias",
            Slot::AttentionOutBias => "attention_out_bias",
            Slot::MlpOutBias => "mlp_out_bias",
            Slot::QueryWeight => "query_weight",
            Slot::KeyWeight => "key_weight",
            Slot::ValueWeight => "value_weight",
            Slot::QueryBias => "query_bias",
            Slot::KeyBias => "key_bias",
            Slot::ValueBias => "value_bias",
            Slot::AttentionOutWeight => "attention_out_weight",
            Slot::MlpGateWeight => "mlp_gate_weight",
            Slot::MlpInWeight => "mlp_in_weight",
            Slot::MlpInBias => "mlp_in_bias",
            Slot::MlpOutWeight => "mlp_out_weight",
            Slot::FinalNormWeight => "final_norm_weight",
            Slot::FinalNormBias => "final_norm_bias",
            Slot::Output => "output",
        })
    }
}
