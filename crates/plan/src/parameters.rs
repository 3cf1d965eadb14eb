//! The parameters of a model, how each is split over tp, and its place in its unit's flat buffer.
//!
//! The split is data on the parameter, and initialisation, comparison and resharding all use it. A unit's replicated
//! parameters come first, so that one reduction over tp covers them. Matrices with the same input (query, key, value; gate,
//! up) are adjacent, so that one matrix product covers them.

use std::fmt;
use std::ops::Range;

use kintsugi_spec::{Biases, Features, ModelSpec, NormKind, QueryKeyNorm};

use crate::{Plan, Sharding, Unit};

/// The role of a parameter in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum ParameterKind {
    Table,
    Positions,
    QueryNormWeight,
    KeyNormWeight,
    AttentionNormWeight,
    AttentionNormBias,
    MlpNormWeight,
    MlpNormBias,
    AttentionEndNormWeight,
    MlpEndNormWeight,
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
pub enum TensorSplit {
    /// Not split: every rank holds all of it.
    Whole,
    /// By rows (dim 0): the outputs of a column-parallel layer, the tokens of a table.
    Rows,
    /// By columns (dim 1): the inputs of a row-parallel layer.
    Columns,
}

/// The initial values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InitialValues {
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
    /// Its role in the unit.
    pub kind: ParameterKind,
    /// Rows and columns; vectors have one column.
    pub shape: [usize; 2],
    /// Rows without vocabulary padding.
    pub valid_rows: usize,
    /// How it is split over tp.
    pub split: TensorSplit,
    /// Its initial values.
    pub initial: InitialValues,
    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub decay: bool,
}

/// A tp rank's part of a parameter, and its place in the unit's flat buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedParameter {
    /// The whole parameter.
    pub parameter: Parameter,
    /// Rows and columns of this rank's part.
    pub local_shape: [usize; 2],
    /// Its range in the flat buffer.
    pub range: Range<usize>,
}

/// The flat buffer of a unit on one tp rank.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitLayout {
    /// The unit.
    pub unit: Unit,
    /// Its parameters, in order.
    pub placed: Vec<PlacedParameter>,
    /// Number of elements at the start that are replicated over tp.
    pub replicated: usize,
    /// Number of elements among them, at the start, whose gradient a tp rank computes from its own heads only.
    pub by_heads: usize,
    /// Number of elements, padded to equal shards for all ranks with the same parameters.
    pub len: usize,
}

impl ParameterKind {
    /// Whether it is a matrix of a layer, which multiplies activations.
    pub fn is_layer_matrix(self) -> bool {
        match self {
            ParameterKind::QueryWeight
            | ParameterKind::KeyWeight
            | ParameterKind::ValueWeight
            | ParameterKind::AttentionOutWeight
            | ParameterKind::MlpGateWeight
            | ParameterKind::MlpInWeight
            | ParameterKind::MlpOutWeight => true,
            ParameterKind::Table
            | ParameterKind::Positions
            | ParameterKind::QueryNormWeight
            | ParameterKind::KeyNormWeight
            | ParameterKind::AttentionNormWeight
            | ParameterKind::AttentionNormBias
            | ParameterKind::MlpNormWeight
            | ParameterKind::MlpNormBias
            | ParameterKind::AttentionEndNormWeight
            | ParameterKind::MlpEndNormWeight
            | ParameterKind::AttentionOutBias
            | ParameterKind::MlpOutBias
            | ParameterKind::QueryBias
            | ParameterKind::KeyBias
            | ParameterKind::ValueBias
            | ParameterKind::MlpInBias
            | ParameterKind::FinalNormWeight
            | ParameterKind::FinalNormBias
            | ParameterKind::Output => false,
        }
    }
}

impl Parameter {
    /// Number of elements without vocabulary padding.
    pub fn valid_elements(&self) -> usize {
        self.valid_rows * self.shape[1]
    }

    /// This parameter's name: `layer.3.query_weight`.
    pub fn name(&self) -> String {
        format!("{}.{}", self.unit, self.kind)
    }

    /// Whether heads of several tp ranks share it.
    pub fn is_shared_by_heads(&self) -> bool {
        self.split == TensorSplit::Whole
            && matches!(self.kind, ParameterKind::QueryNormWeight | ParameterKind::KeyNormWeight)
    }

    /// Whether it follows the parameter before it without a gap, because layers use both as one matrix: query, key and value, or
    /// the gate and the first matrix of the MLP. Without a gate the first matrix of the MLP follows without a gap, too, and no
    /// layer uses it and the parameter before it as one.
    fn continues_span(&self) -> bool {
        matches!(
            self.kind,
            ParameterKind::KeyWeight
                | ParameterKind::ValueWeight
                | ParameterKind::MlpInWeight
                | ParameterKind::KeyBias
                | ParameterKind::ValueBias
        )
    }

    /// The shape of one of `tp` parts.
    pub fn local_shape(&self, tp: usize) -> [usize; 2] {
        let [rows, columns] = self.shape;
        match self.split {
            TensorSplit::Whole => [rows, columns],
            TensorSplit::Rows => [rows / tp, columns],
            TensorSplit::Columns => [rows, columns / tp],
        }
    }

    /// The index in the whole parameter of element `local` of part `part` of `tp`.
    pub fn global_index(&self, tp: usize, part: usize, local: usize) -> usize {
        let [_, columns] = self.shape;
        let [local_rows, local_columns] = self.local_shape(tp);
        let (row, column) = (local / local_columns, local % local_columns);
        match self.split {
            TensorSplit::Whole => local,
            TensorSplit::Rows => (part * local_rows + row) * columns + column,
            TensorSplit::Columns => row * columns + part * local_columns + column,
        }
    }
}

impl UnitLayout {
    /// The layout of `parameters` on a tp rank, padded to a multiple of `multiple` elements. What is one matrix or one bias
    /// begins at a multiple of `block` elements.
    fn new(unit: Unit, parameters: Vec<Parameter>, tp: usize, block: usize, multiple: usize) -> Self {
        let mut end: usize = 0;
        let placed: Vec<PlacedParameter> = parameters
            .into_iter()
            .map(|parameter| {
                let local_shape = parameter.local_shape(tp);
                let start = if parameter.continues_span() { end } else { end.next_multiple_of(block) };
                end = start + local_shape[0] * local_shape[1];
                PlacedParameter { parameter, local_shape, range: start..end }
            })
            .collect();
        let replicated = placed.iter().take_while(|p| p.parameter.split == TensorSplit::Whole);
        let replicated = replicated.last().map_or(0, |placed| placed.range.end);
        debug_assert!(
            placed.iter().all(|p| (p.range.start < replicated) == (p.parameter.split == TensorSplit::Whole))
        );
        let by_heads = placed.iter().take_while(|p| p.parameter.is_shared_by_heads());
        let by_heads = by_heads.last().map_or(0, |placed| placed.range.end);
        UnitLayout { unit, placed, replicated, by_heads, len: end.next_multiple_of(multiple) }
    }

    /// The number of elements at the start whose gradient is summed over tp: of replicated parameters if the ranks have different
    /// rows, otherwise of those that the ranks use with different heads.
    pub fn summed_over_tp(&self, sequence_parallel: bool) -> usize {
        if sequence_parallel { self.replicated } else { self.by_heads }
    }

    /// The ranges that belong to no parameter: between parameters, and at the end, which may be empty.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let last = self.placed.last().map_or(0, |placed| placed.range.end);
        let gap = |pair: &[PlacedParameter]| pair[0].range.end..pair[1].range.start;
        let between = self.placed.windows(2).map(gap).filter(|range| !range.is_empty());
        between.chain(std::iter::once(last..self.len))
    }

    /// The range of a parameter. Panics if the unit has no such parameter.
    pub fn range(&self, kind: ParameterKind) -> Range<usize> {
        self.find(kind).unwrap_or_else(|| panic!("{} has no {kind}", self.unit)).range.clone()
    }

    /// The range of the adjacent parameters `first` to `last`.
    pub fn span(&self, first: ParameterKind, last: ParameterKind) -> Range<usize> {
        self.range(first).start..self.range(last).end
    }

    /// A parameter, if the unit has it.
    pub fn find(&self, kind: ParameterKind) -> Option<&PlacedParameter> {
        self.placed.iter().find(|p| p.parameter.kind == kind)
    }
}

impl Plan {
    /// The layout of a unit's flat buffer.
    pub fn layout(&self, unit: Unit) -> UnitLayout {
        let (parameters, tp) = (parameters(&self.model, unit, self.mesh.tp()), self.mesh.tp());
        let Sharding { quantized, multiple, .. } = self.sharding;
        UnitLayout::new(unit, parameters, tp, quantized.block(), self.mesh.replicas() * multiple)
    }

    /// Every unit of the model, in model order.
    pub fn units(&self) -> Vec<Unit> {
        let mut units = vec![Unit::Table];
        units.extend(self.model.has_learned_positions().then_some(Unit::Positions));
        units.extend((0..self.model.layers).map(Unit::Layer));
        units.push(Unit::Head);
        units
    }

    /// Number of parameters of the model, without vocabulary padding.
    pub fn parameter_count(&self) -> u64 {
        let others = self.units().into_iter().filter(|unit| !matches!(unit, Unit::Layer(_)));
        let others: u64 = others.map(|unit| self.elements(unit)).sum();
        others + self.model.layers as u64 * self.elements(Unit::Layer(0))
    }

    /// Number of parameters of a unit, without vocabulary padding.
    pub(crate) fn elements(&self, unit: Unit) -> u64 {
        parameters(&self.model, unit, 1).iter().map(|parameter| parameter.valid_elements() as u64).sum()
    }
}

/// The parameters of a unit, replicated ones first.
pub fn parameters(model: &ModelSpec, unit: Unit, tp: usize) -> Vec<Parameter> {
    let build = Builder { model, unit, tp };
    match unit {
        Unit::Table => vec![build.vocabulary(ParameterKind::Table)],
        Unit::Positions => {
            let shape = [model.positions, model.hidden];
            vec![build.matrix(ParameterKind::Positions, shape, TensorSplit::Whole, model.init_std)]
        }
        Unit::Layer(_) => build.layer(),
        Unit::Head => {
            let mut list = build.norm(ParameterKind::FinalNormWeight, ParameterKind::FinalNormBias);
            list.extend((!model.tied).then(|| build.vocabulary(ParameterKind::Output)));
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
        let Biases { qkv, attention_out, mlp } = self.model.features().biases;
        // GPT-2 scales down the 2·layers projections into the residual stream, so that its variance stays constant.
        let residual = self.model.init_std / (2.0 * self.model.layers as f64).sqrt();
        let mut list = Vec::new();
        let Features { norms, query_key_norm, .. } = self.model.features();
        if *query_key_norm == Some(QueryKeyNorm::Head) {
            let norm = |kind| self.vector(kind, head_dim, TensorSplit::Whole, InitialValues::Ones);
            list.extend([ParameterKind::QueryNormWeight, ParameterKind::KeyNormWeight].map(norm));
        }
        if norms.has_before() {
            list.extend(self.norm(ParameterKind::AttentionNormWeight, ParameterKind::AttentionNormBias));
            list.extend(self.norm(ParameterKind::MlpNormWeight, ParameterKind::MlpNormBias));
        }
        if norms.has_after() {
            let norm = |kind| self.vector(kind, hidden, TensorSplit::Whole, InitialValues::Ones);
            list.extend([ParameterKind::AttentionEndNormWeight, ParameterKind::MlpEndNormWeight].map(norm));
        }
        let mut bias = |kind, has: bool, len, split| list.extend(has.then(|| self.bias(kind, len, split)));
        bias(ParameterKind::AttentionOutBias, attention_out, hidden, TensorSplit::Whole);
        bias(ParameterKind::MlpOutBias, mlp, hidden, TensorSplit::Whole);
        let mut rows = |kind, outputs| {
            list.push(self.matrix(kind, [outputs, hidden], TensorSplit::Rows, self.model.init_std));
        };
        rows(ParameterKind::QueryWeight, heads * head_dim);
        rows(ParameterKind::KeyWeight, kv_heads * head_dim);
        rows(ParameterKind::ValueWeight, kv_heads * head_dim);
        if self.model.activation.is_gated() {
            rows(ParameterKind::MlpGateWeight, ffn);
        }
        rows(ParameterKind::MlpInWeight, ffn);
        let mut bias =
            |kind, has: bool, len| list.extend(has.then(|| self.bias(kind, len, TensorSplit::Rows)));
        bias(ParameterKind::QueryBias, qkv, heads * head_dim);
        bias(ParameterKind::KeyBias, qkv, kv_heads * head_dim);
        bias(ParameterKind::ValueBias, qkv, kv_heads * head_dim);
        bias(ParameterKind::MlpInBias, mlp, ffn);
        if *query_key_norm == Some(QueryKeyNorm::AllHeads) {
            let norm =
                |(kind, heads)| self.vector(kind, heads * head_dim, TensorSplit::Rows, InitialValues::Ones);
            let kinds = [(ParameterKind::QueryNormWeight, heads), (ParameterKind::KeyNormWeight, kv_heads)];
            list.extend(kinds.map(norm));
        }
        let mut columns = |kind, inputs| {
            list.push(self.matrix(kind, [hidden, inputs], TensorSplit::Columns, residual));
        };
        columns(ParameterKind::AttentionOutWeight, heads * head_dim);
        columns(ParameterKind::MlpOutWeight, ffn);
        list
    }

    fn matrix(
        &self,
        kind: ParameterKind,
        shape: [usize; 2],
        split: TensorSplit,
        deviation: f64,
    ) -> Parameter {
        let initial = InitialValues::Normal(deviation);
        Parameter { unit: self.unit, kind, shape, valid_rows: shape[0], split, initial, decay: true }
    }

    fn vocabulary(&self, kind: ParameterKind) -> Parameter {
        let shape = [self.model.padded_vocab(self.tp), self.model.hidden];
        Parameter {
            valid_rows: self.model.vocab,
            ..self.matrix(kind, shape, TensorSplit::Rows, self.model.init_std)
        }
    }

    fn vector(
        &self,
        kind: ParameterKind,
        len: usize,
        split: TensorSplit,
        initial: InitialValues,
    ) -> Parameter {
        Parameter { unit: self.unit, kind, shape: [len, 1], valid_rows: len, split, initial, decay: false }
    }

    fn bias(&self, kind: ParameterKind, len: usize, split: TensorSplit) -> Parameter {
        self.vector(kind, len, split, InitialValues::Zeros)
    }

    fn norm(&self, weight: ParameterKind, bias: ParameterKind) -> Vec<Parameter> {
        let mut list = vec![self.vector(weight, self.model.hidden, TensorSplit::Whole, InitialValues::Ones)];
        let has_bias = self.model.features().norm == NormKind::Layer;
        list.extend(has_bias.then(|| self.bias(bias, self.model.hidden, TensorSplit::Whole)));
        list
    }
}

impl fmt::Display for ParameterKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            ParameterKind::Table => "table",
            ParameterKind::Positions => "positions",
            ParameterKind::QueryNormWeight => "query_norm_weight",
            ParameterKind::KeyNormWeight => "key_norm_weight",
            ParameterKind::AttentionNormWeight => "attention_norm_weight",
            ParameterKind::AttentionNormBias => "attention_norm_bias",
            ParameterKind::MlpNormWeight => "mlp_norm_weight",
            ParameterKind::MlpNormBias => "mlp_norm_bias",
            ParameterKind::AttentionEndNormWeight => "attention_end_norm_weight",
            ParameterKind::MlpEndNormWeight => "mlp_end_norm_weight",
            ParameterKind::AttentionOutBias => "attention_out_bias",
            ParameterKind::MlpOutBias => "mlp_out_bias",
            ParameterKind::QueryWeight => "query_weight",
            ParameterKind::KeyWeight => "key_weight",
            ParameterKind::ValueWeight => "value_weight",
            ParameterKind::QueryBias => "query_bias",
            ParameterKind::KeyBias => "key_bias",
            ParameterKind::ValueBias => "value_bias",
            ParameterKind::AttentionOutWeight => "attention_out_weight",
            ParameterKind::MlpGateWeight => "mlp_gate_weight",
            ParameterKind::MlpInWeight => "mlp_in_weight",
            ParameterKind::MlpInBias => "mlp_in_bias",
            ParameterKind::MlpOutWeight => "mlp_out_weight",
            ParameterKind::FinalNormWeight => "final_norm_weight",
            ParameterKind::FinalNormBias => "final_norm_bias",
            ParameterKind::Output => "output",
        })
    }
}
