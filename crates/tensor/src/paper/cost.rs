//! The cost of each operation: floating-point operations, and bytes that must be moved at least once.
//!
//! Exponentials and roots count as one operation. A view that is read and written counts twice.

use super::{Kernel, KernelKind};
use crate::ops::{
    Attention, AttentionBackward, AttentionSaved, AttentionShape, Bits, BlockFormat, CachedAttention,
    CastToFloat8, ColumnSum, CopyColumns, CrossEntropy, Dequantize, Embedding, EmbeddingBackward,
    Float8Source, GateFunction, Gated, GatedBackward, Gradient, Linear, LinearBackwardInput,
    LinearBackwardWeight, LossStatistics, Momentum, Norm, NormBackward, Normalize, Parameters, Positions,
    PositionsBackward, Quantize, Requantize, Residual, Rotary, RowDots, ScaledSum, SlicedAttention,
    SlicedAttentionBackward, Slices, SplitNorm, SplitNormBackward, SumsOfSquares, Update, UpdateControl,
    UpdateRule, visible_pairs,
};
use crate::{DType, View};

/// Operations of one GELU.
pub const GELU: usize = 8;
const GELU_DERIVATIVE: usize = 13;
/// Operations of one GELU by the error function. The error function counts as one, like an exponential.
pub const EXACT_GELU: usize = 5;
/// Operations of the derivative of that GELU, multiplied by a gradient.
pub const EXACT_GELU_DERIVATIVE: usize = 12;
/// Operations that quantise one number: magnitude and maximum, multiplication and rounding.
const QUANTIZED: usize = 4;
/// Operations that restore one number and add it.
const DEQUANTIZED: usize = 2;

/// A kernel that reads or writes all of these views, one pass each.
pub fn moved(name: &'static str, flops: usize, views: &[View]) -> Kernel {
    let kernel = Kernel { name, flops: flops as u64, bytes: 0, kind: KernelKind::Memory { fp32: true } };
    views.iter().fold(kernel, |kernel, &view| kernel.passes(1, view))
}

impl Kernel {
    /// A matrix product of `m × n` sums of `k` terms of `x`'s type.
    fn product(self, m: usize, n: usize, k: usize, x: View) -> Self {
        Kernel { kind: KernelKind::Product { m, n, k, dtype: x.dtype() }, ..self }
    }

    /// Attention.
    fn attention(self, shape: AttentionShape, qkv: View, saved: AttentionSaved, backward: bool) -> Self {
        let flash = matches!(saved, AttentionSaved::LogSumExp(_));
        Kernel { kind: KernelKind::Attention { shape, dtype: qkv.dtype(), flash, backward }, ..self }
    }

    /// Adds the bytes of another view.
    fn and(self, view: Option<View>) -> Self {
        view.map_or(self, |view| self.passes(1, view))
    }

    /// Adds the bytes of a gradient: written, or read and written.
    fn with_gradient(self, gradient: Option<Gradient>) -> Self {
        gradient.map_or(self, |gradient| self.passes(1 + u64::from(gradient.accumulate), gradient.view))
    }

    /// Adds the bytes of passes over a view.
    fn passes(mut self, count: u64, view: View) -> Self {
        self.bytes += count * view.bytes() as u64;
        if let KernelKind::Memory { fp32 } = &mut self.kind {
            *fp32 &= !matches!(view.dtype(), DType::BF16 | DType::F16);
        }
        self
    }
}

pub fn linear(op: &Linear) -> Kernel {
    let sums = op.rows * op.outputs;
    let added = usize::from(op.bias.is_some()) + usize::from(op.residual.is_some());
    let epilogue = added + if op.gelu.is_some() { GELU } else { 0 };
    let flops = 2 * sums * op.inputs + epilogue * sums;
    let name = match (op.gelu, op.residual) {
        (Some(_), _) => "linear gelu",
        (None, Some(_)) => "linear residual",
        (None, None) => "linear",
    };
    moved(name, flops, &[op.x, op.weight, op.out])
        .and(op.bias)
        .and(op.gelu)
        .and(op.residual)
        .product(op.rows, op.outputs, op.inputs, op.x)
}

pub fn linear_backward_input(op: &LinearBackwardInput) -> Kernel {
    let sums = op.rows * op.inputs;
    let epilogue = usize::from(op.dbias.is_some()) + if op.gelu.is_some() { GELU_DERIVATIVE } else { 0 };
    let flops = 2 * sums * op.outputs + epilogue * sums;
    let name = if op.gelu.is_some() { "linear backward input gelu" } else { "linear backward input" };
    moved(name, flops, &[op.dy, op.weight, op.dx])
        .and(op.gelu)
        .with_gradient(op.dbias)
        .product(op.rows, op.inputs, op.outputs, op.dy)
}

pub fn linear_backward_weight(op: &LinearBackwardWeight) -> Kernel {
    let bias = if op.dbias.is_some() { op.rows * op.outputs } else { 0 };
    let flops = 2 * op.rows * op.inputs * op.outputs + bias;
    moved("linear backward weight", flops, &[op.dy, op.x])
        .with_gradient(Some(op.dweight))
        .with_gradient(op.dbias)
        .product(op.outputs, op.inputs, op.rows, op.dy)
}

pub fn residual(op: &Residual) -> Kernel {
    let flops = (op.addends.len() + op.biases.len()) * op.x.len();
    let kernel = moved("residual", flops, &[op.x, op.out]);
    op.addends.iter().chain(op.biases).fold(kernel, |kernel, &view| kernel.and(Some(view)))
}

pub fn column_sum(op: &ColumnSum) -> Kernel {
    moved("column sum", op.x.len(), &[op.x]).with_gradient(Some(op.out))
}

pub fn copy_columns(op: &CopyColumns) -> Kernel {
    let elements = op.rows * op.columns;
    moved("copy columns", 0, &[op.from.view.slice(0..elements), op.to.view.slice(0..elements)])
}

pub fn norm(op: &Norm) -> Kernel {
    let per_element = if op.bias.is_some() { 8 } else { 5 };
    moved("norm", per_element * op.x.len(), &[op.x, op.weight, op.out, op.statistics]).and(op.bias)
}

pub fn norm_backward(op: &NormBackward) -> Kernel {
    let added = usize::from(op.residual.is_some()) + usize::from(op.residual_sum.is_some());
    let per_element = if op.centred { 15 } else { 12 } + added;
    moved("norm backward", per_element * op.x.len(), &[op.dy, op.x, op.statistics, op.weight, op.dx])
        .and(op.residual)
        .with_gradient(op.dweight)
        .with_gradient(op.dbias)
        .with_gradient(op.residual_sum)
}

pub fn row_dots(op: &RowDots) -> Kernel {
    let per_element = if op.weight.is_some() { 3 } else { 2 };
    moved("row dots", per_element * op.x.len(), &[op.x, op.y, op.out]).and(op.weight)
}

pub fn split_norm(op: &SplitNorm) -> Kernel {
    moved("norm", 2 * op.x.len(), &[op.x, op.weight, op.squares, op.out, op.statistics])
}

pub fn split_norm_backward(op: &SplitNormBackward) -> Kernel {
    moved("norm backward", 8 * op.x.len(), &[op.dy, op.x, op.statistics, op.weight, op.dots, op.dx])
        .with_gradient(op.dweight)
}

/// Pairs of a query and a key that it attends to.
fn pairs(shape: AttentionShape) -> usize {
    shape.batch * shape.heads * visible_pairs(shape.sequence, Slices::WHOLE, 0..1, shape.scores.window)
}

fn saved_view(saved: AttentionSaved) -> View {
    match saved {
        AttentionSaved::LogSumExp(view) | AttentionSaved::Probabilities(view) => view,
    }
}

pub fn attention(op: &Attention) -> Kernel {
    let products = 2;
    let flops = products * 2 * op.shape.head_dim * pairs(op.shape);
    moved("attention", flops, &[op.qkv, op.out, saved_view(op.saved)])
        .attention(op.shape, op.qkv, op.saved, false)
}

pub fn attention_backward(op: &AttentionBackward) -> Kernel {
    let products = match op.saved {
        AttentionSaved::LogSumExp(_) => 5,
        AttentionSaved::Probabilities(_) => 4,
    };
    let bias = if op.dbias.is_some() { op.dqkv.len() } else { 0 };
    let flops = products * 2 * op.shape.head_dim * pairs(op.shape) + bias;
    moved("attention backward", flops, &[op.qkv, op.out, op.dout, saved_view(op.saved), op.dqkv])
        .with_gradient(op.dbias)
        .attention(op.shape, op.qkv, op.saved, true)
}

pub fn sliced_attention(op: &SlicedAttention) -> Kernel {
    let SlicedAttention { shape, slices, first_owner, owners, .. } = *op;
    let owners = first_owner..first_owner + owners;
    let pairs = visible_pairs(shape.sequence, slices, owners, shape.scores.window);
    let flops = 2 * 2 * shape.head_dim * shape.batch * shape.heads * pairs;
    moved("sliced attention", flops, &[op.qkv, op.keys, op.out, op.log_sums]).and(op.before).attention(
        shape,
        op.qkv,
        AttentionSaved::LogSumExp(op.log_sums),
        false,
    )
}

pub fn sliced_attention_backward(op: &SlicedAttentionBackward) -> Kernel {
    let SlicedAttentionBackward { shape, slices, first_owner, owners, .. } = *op;
    let owners = first_owner..first_owner + owners;
    let pairs = visible_pairs(shape.sequence, slices, owners, shape.scores.window);
    let flops = 5 * 2 * shape.head_dim * shape.batch * shape.heads * pairs;
    let dqueries = op.dqueries.view.slice(0..op.out.len());
    moved("sliced attention backward", flops, &[op.qkv, op.keys, op.out, op.dout, op.log_sums])
        .with_gradient(Some(Gradient { view: dqueries, accumulate: op.add_queries }))
        .with_gradient(Some(Gradient { view: op.dkeys, accumulate: op.add_keys }))
        .attention(shape, op.qkv, AttentionSaved::LogSumExp(op.log_sums), true)
}

/// The cost for a full cache: the positions of the new tokens are data, which the paper backend does not have.
pub fn cached_attention(op: &CachedAttention) -> Kernel {
    let products = 2;
    let seen = op.shape.scores.window.map_or(op.capacity, |window| window.min(op.capacity));
    let pairs = op.shape.rows() * op.shape.heads * seen;
    moved("cached attention", products * 2 * op.shape.head_dim * pairs, &[op.qkv, op.keys, op.values, op.out])
}

pub fn rotary(op: &Rotary) -> Kernel {
    let rotated = op.shape.rows() * (op.shape.heads + op.shape.kv_heads) * op.dims;
    let bytes = 2 * rotated * op.qkv.dtype().bytes();
    Kernel { bytes: bytes as u64, ..moved("rotary", 3 * rotated, &[op.qkv]) }
}

pub fn gated(op: &Gated) -> Kernel {
    moved(op.gate.unit(), 6 * op.out.len(), &[op.x, op.out])
}

pub fn gated_backward(op: &GatedBackward) -> Kernel {
    let name = match op.gate {
        GateFunction::Silu => "swiglu backward",
        GateFunction::Gelu => "geglu backward",
    };
    moved(name, 13 * op.dout.len(), &[op.dout, op.x, op.dx])
}

pub fn embedding(op: &Embedding) -> Kernel {
    moved("embedding", 0, &[op.tokens, op.out, op.out])
}

pub fn embedding_backward(op: &EmbeddingBackward) -> Kernel {
    // Rows are read, added and written; without accumulation the table is cleared first.
    let rows = 2 * op.dout.len() * op.dtable.view.dtype().bytes();
    let cleared = if op.dtable.accumulate { 0 } else { op.dtable.view.bytes() };
    let mut kernel = moved("embedding backward", op.dout.len(), &[op.tokens, op.dout]);
    kernel.bytes += (rows + cleared) as u64;
    kernel
}

pub fn positions(op: &Positions) -> Kernel {
    let table = op.table.slice(0..op.sequence.min(op.rows) * op.width);
    moved("positions", op.x.len(), &[op.x, op.x, table])
}

pub fn positions_backward(op: &PositionsBackward) -> Kernel {
    moved("positions backward", op.dx.len(), &[op.dx]).with_gradient(Some(op.dtable))
}

pub fn loss_statistics(op: &LossStatistics) -> Kernel {
    moved("loss statistics", 4 * op.rows * op.valid, &[op.logits, op.targets, op.statistics])
}

pub fn cross_entropy(op: &CrossEntropy) -> Kernel {
    let (of_statistics, of_gradient) = (4 * usize::from(op.parts == 1), 3 * usize::from(op.scale.is_some()));
    let flops = (of_statistics + of_gradient) * op.rows * op.valid;
    let reads = op.parts == 1 || op.scale.is_some();
    moved("cross entropy", flops, &[op.statistics, op.targets, op.loss, op.loss])
        .and(reads.then_some(op.logits))
        .and(op.scale.map(|_| op.logits))
}

pub fn update_control(op: &UpdateControl) -> Kernel {
    moved("update control", 0, &[op.control, op.control, op.sum_of_squares, op.loss_sum])
}

/// Packing codes of 4 bits takes more time for each byte, so kernels of codes have a name for each width.
fn by_bits(format: BlockFormat, [eight, four]: [&'static str; 2]) -> &'static str {
    match format.bits {
        Bits::Eight => eight,
        Bits::Four => four,
    }
}

pub fn quantize(op: &Quantize) -> Kernel {
    moved(by_bits(op.format, ["quantize int8", "quantize int4"]), QUANTIZED * op.x.len(), &[op.x, op.out])
}

pub fn dequantize(op: &Dequantize) -> Kernel {
    let name = by_bits(op.format, ["dequantize int8", "dequantize int4"]);
    moved(name, DEQUANTIZED * op.parts * op.out.view.len(), &[op.codes]).with_gradient(Some(op.out))
}

pub fn requantize(op: &Requantize) -> Kernel {
    let per_sum = DEQUANTIZED * op.parts + QUANTIZED;
    let name = by_bits(op.format, ["requantize int8", "requantize int4"]);
    moved(name, per_sum * op.slices * op.elements, &[op.codes, op.out])
}

/// The numbers are read twice: for the largest, and to be converted.
pub fn cast_to_float8(op: &CastToFloat8) -> Kernel {
    let (x, function) = match op.x {
        Float8Source::Numbers(x) => (x, 0),
        Float8Source::Gelu(x) => (x, 2 * GELU),
    };
    moved("cast to fp8", (QUANTIZED + function) * x.len(), &[x, x]).and(op.codes).and(op.transposed)
}

pub fn sums_of_squares(op: &SumsOfSquares) -> Kernel {
    let kernel = moved("sums of squares", 0, &[]).and(op.total).and(op.total);
    op.parts.iter().fold(kernel, |kernel, part| {
        let flops = kernel.flops + 2 * part.from.len() as u64;
        Kernel { flops, ..kernel }.and(Some(part.from)).and(part.own).and(part.own)
    })
}

/// Weights and states are read and written.
pub fn update(op: &Update) -> Kernel {
    let per_element = match op.rule {
        UpdateRule::AdamW { .. } => 15,
        UpdateRule::Lion { .. } => 11,
        UpdateRule::Sgd { .. } => 7,
        UpdateRule::Direction => 4,
    };
    let name = op.rule.name();
    op.parameters.iter().fold(moved(name, 0, &[op.control]), |kernel, parameters| {
        let Parameters { gradient, master, states, weights, segments: _ } = *parameters;
        let more = moved(name, per_element * gradient.len(), &[gradient, master, master]).and(weights);
        let more = states.into_iter().fold(more, |more, state| more.and(state).and(state));
        Kernel { flops: kernel.flops + more.flops, bytes: kernel.bytes + more.bytes, ..more }
    })
}

/// Momenta are read and written.
pub fn momentum(op: &Momentum) -> Kernel {
    moved("momentum", 6 * op.out.len(), &[op.gradient, op.momentum, op.momentum, op.out, op.control])
}

pub fn normalize(op: &Normalize) -> Kernel {
    moved("normalize", op.x.len(), &[op.x, op.x, op.sum_of_squares])
}

pub fn scaled_sum(op: &ScaledSum) -> Kernel {
    moved("scaled sum", 3 * op.x.len(), &[op.x, op.x, op.y])
}
