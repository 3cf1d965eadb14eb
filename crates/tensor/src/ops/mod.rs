//! The training operations as values: which views each reads and writes, and their shapes.
//!
//! All matrices are row-major. `rows` are tokens. A backend may assume that [`Check::check`] has passed.

mod cached;
mod check;
mod float8;
mod learning_rate;
mod muon;
mod quantize;
mod sliced;
mod split_norm;
mod step;

pub use cached::CachedAttention;
pub use check::Check;
pub use float8::{CastToFloat8, FLOAT8_MULTIPLE, Float8Factors, Float8Scale, Float8Source};
pub use learning_rate::{LearningRate, RateCurve};
pub use muon::{Momentum, Normalize, ScaledSum};
pub(crate) use quantize::ROUND;
pub use quantize::{Bits, BlockFormat, Dequantize, MIN_BLOCK_MAXIMUM, Quantize, Requantize, round_to_codes};
pub use sliced::{SlicedAttention, SlicedAttentionBackward, Slices, visible_pairs};
pub use split_norm::{RowDots, SplitNorm, SplitNormBackward};
pub use step::{
    LossScaler, MAX_STATES, Parameters, Segment, Squares, SumsOfSquares, Update, UpdateControl, UpdateRule,
    control,
};

use kintsugi_spec::FrequencyScaling;

use crate::View;

/// The output of a gradient: it overwrites what is there, or is added to it (for later micro-batches).
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// The gradient's elements.
    pub view: View<'a>,
    /// Add to it instead of overwriting it.
    pub accumulate: bool,
}

/// `out = x · weightᵀ + bias + residual`. With `gelu`: `gelu = x · weightᵀ + bias` (the pre-activation) and
/// `out = GELU(gelu)`. A product cannot have both `gelu` and `residual`. The sum is rounded once, after the last
/// addition.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// Read, `[rows, inputs]`.
    pub x: View<'a>,
    /// Read, `[outputs, inputs]`.
    pub weight: View<'a>,
    /// Read, `[outputs]`.
    pub bias: Option<View<'a>>,
    /// Written, `[rows, outputs]`: the pre-activation, saved for the backward.
    pub gelu: Option<View<'a>>,
    /// Read, `[rows, outputs]`: the residual stream to which the product is added.
    pub residual: Option<View<'a>>,
    /// Written, `[rows, outputs]`.
    pub out: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
    /// With it, `x` and `weight` are in 8 bits.
    pub float8: Option<Float8Factors<'a>>,
}

/// `dx = dy · weight`. With `gelu`: `dx = dx ∘ GELU'(gelu)`. `dbias (+)= Σ_rows dx` is the gradient of the bias that
/// was added before that GELU.
#[derive(Clone, Copy, Debug)]
pub struct LinearBackwardInput<'a> {
    /// Read, `[rows, outputs]`.
    pub dy: View<'a>,
    /// Read, `[outputs, inputs]`.
    pub weight: View<'a>,
    /// Read, `[rows, inputs]`: the pre-activation whose GELU was this layer's input.
    pub gelu: Option<View<'a>>,
    /// Written, `[rows, inputs]`.
    pub dx: View<'a>,
    /// Written, `[inputs]`, in the gradients' type.
    pub dbias: Option<Gradient<'a>>,
    /// Tokens.
    pub rows: usize,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
    /// With it, `dy` and `weight` are in 8 bits.
    pub float8: Option<Float8Factors<'a>>,
}

/// `dweight (+)= dyᵀ · x`, `dbias (+)= Σ_rows dy`.
#[derive(Clone, Copy, Debug)]
pub struct LinearBackwardWeight<'a> {
    /// Read, `[rows, outputs]`.
    pub dy: View<'a>,
    /// Read, `[rows, inputs]`.
    pub x: View<'a>,
    /// Written, `[outputs, inputs]`, in the gradients' type.
    pub dweight: Gradient<'a>,
    /// Written, `[outputs]`, in the gradients' type.
    pub dbias: Option<Gradient<'a>>,
    /// Tokens.
    pub rows: usize,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
    /// With it, `dy` and `x` are in 8 bits, and there is no `dbias`.
    pub float8: Option<Float8Factors<'a>>,
}

/// `out = x + Σ addends + Σ biases`: the end of a residual branch. `out` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a> {
    /// Read, `[rows, width]`.
    pub x: View<'a>,
    /// Read, each `[rows, width]`.
    pub addends: &'a [View<'a>],
    /// Read, each `[width]`.
    pub biases: &'a [View<'a>],
    /// Written, `[rows, width]`.
    pub out: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Width of the residual stream.
    pub width: usize,
}

/// `out (+)= Σ_rows x`: the gradient of a bias that was added to every row.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSum<'a> {
    /// Read, `[rows, width]`.
    pub x: View<'a>,
    /// Written, `[width]`, in the gradients' type.
    pub out: Gradient<'a>,
    /// Tokens.
    pub rows: usize,
    /// Columns.
    pub width: usize,
}

/// Some columns of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// `[rows, width]`.
    pub view: View<'a>,
    /// Columns of the matrix.
    pub width: usize,
    /// The first of the columns that are meant.
    pub first: usize,
}

/// Copies `columns` columns of one matrix to columns of another one of the same type.
#[derive(Clone, Copy, Debug)]
pub struct CopyColumns<'a> {
    /// Read.
    pub from: Columns<'a>,
    /// Written. The other columns stay as they are.
    pub to: Columns<'a>,
    /// Rows of both matrices.
    pub rows: usize,
    /// Columns that are copied.
    pub columns: usize,
}

/// LayerNorm (with a bias) or RMSNorm (without): `out = (x − mean) · rstd · weight + bias`.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Read, `[rows, width]`.
    pub x: View<'a>,
    /// Read, `[width]`.
    pub weight: View<'a>,
    /// Read, `[width]`. With it this is LayerNorm; without it RMSNorm, which subtracts no mean.
    pub bias: Option<View<'a>>,
    /// Written, `[rows, width]`.
    pub out: View<'a>,
    /// Written, `[rows, 2]` in the accumulator type: mean (0 for RMSNorm) and 1/σ.
    pub statistics: View<'a>,
    /// Added to the variance.
    pub epsilon: f64,
    /// Tokens.
    pub rows: usize,
    /// Width.
    pub width: usize,
}

/// Backward of [`Norm`]: `dx = residual + d(norm)`, and the gradients of weight and bias. `dx` may be `dy`.
#[derive(Clone, Copy, Debug)]
pub struct NormBackward<'a> {
    /// Read, `[rows, width]`.
    pub dy: View<'a>,
    /// Read, `[rows, width]`: the norm's input.
    pub x: View<'a>,
    /// Read, `[rows, 2]`.
    pub statistics: View<'a>,
    /// Read, `[width]`.
    pub weight: View<'a>,
    /// Read, `[rows, width]`: the gradient that reaches `x` through the residual connection.
    pub residual: Option<View<'a>>,
    /// Written, `[width]`: `Σ_rows residual`, the gradient of a bias that was added to the residual stream.
    pub residual_sum: Option<Gradient<'a>>,
    /// Written, `[rows, width]`.
    pub dx: View<'a>,
    /// Whether it is LayerNorm.
    pub centred: bool,
    /// Written, `[width]`, unless the weights are frozen.
    pub dweight: Option<Gradient<'a>>,
    /// Written, `[width]`, as the gradient of the weight is, and only for LayerNorm.
    pub dbias: Option<Gradient<'a>>,
    /// Tokens.
    pub rows: usize,
    /// Width.
    pub width: usize,
}

/// The shape of causal self-attention over interleaved `qkv` projections.
///
/// `qkv` is `[batch, sequence, heads + 2·kv_heads, head_dim]`: query heads, then key heads, then value heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Samples.
    pub batch: usize,
    /// Tokens per sample.
    pub sequence: usize,
    /// Query heads on this rank.
    pub heads: usize,
    /// Key and value heads on this rank; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// How products of queries and keys become scores.
    pub scores: Scores,
}

/// How the product of a query and a key becomes a score, and how far a query sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// Products are divided by the root of this, or else by that of the width of a head.
    pub width: Option<usize>,
    /// A score is bounded by `soft_cap · tanh(score / soft_cap)`.
    pub soft_cap: Option<f64>,
    /// The number of tokens, itself included, that a query attends to at most. Operations with `starts` are masked by these alone,
    /// which then respect the window; the number decides what they cost.
    pub window: Option<usize>,
}

impl Scores {
    /// Products divided by the root of the width of a head.
    pub const PLAIN: Scores = Scores { width: None, soft_cap: None, window: None };
}

impl AttentionShape {
    /// The factor of the products of queries and keys.
    pub fn scale(&self) -> f64 {
        1.0 / (self.scores.width.unwrap_or(self.head_dim) as f64).sqrt()
    }

    /// Elements of one row of `qkv`.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Tokens.
    pub fn rows(&self) -> usize {
        self.batch * self.sequence
    }

    /// Elements of the full score matrices of all heads and samples: `batch · heads · sequence²`.
    pub fn score_elements(&self) -> usize {
        self.batch * self.heads * self.sequence * self.sequence
    }
}

/// `out = softmax(scores(q·kᵀ), causal) · v`, with the scores of [`Scores`].
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Read, in the layout of [`AttentionShape`].
    pub qkv: View<'a>,
    /// Read, `[batch, sequence]`, u32: the first token that each token attends to. Used when a sample packs several
    /// documents, and for a sliding window. Values never exceed the token's own index and never decrease within a sample.
    pub starts: Option<View<'a>>,
    /// Written, `[batch, sequence, heads, head_dim]`.
    pub out: View<'a>,
    /// What is saved for the backward. It decides which algorithm runs.
    pub saved: AttentionSaved<'a>,
    /// Shape.
    pub shape: AttentionShape,
}

/// What attention saves for its backward.
#[derive(Clone, Copy, Debug)]
pub enum AttentionSaved<'a> {
    /// Flash: the natural log of each row's sum of exponentials, `[batch, heads, sequence]`, accumulator type.
    /// No `sequence × sequence` tensor exists.
    LogSumExp(View<'a>),
    /// Plain: the probabilities, `[batch, heads, sequence, sequence]`, compute type.
    Probabilities(View<'a>),
}

/// Backward of [`Attention`]. `dbias (+)= Σ_rows dqkv` is the gradient of a bias that was added to `qkv`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward<'a> {
    /// Read: the forward's input.
    pub qkv: View<'a>,
    /// Read: the forward's `starts`.
    pub starts: Option<View<'a>>,
    /// Read: the forward's output.
    pub out: View<'a>,
    /// Read: the gradient of the output.
    pub dout: View<'a>,
    /// Read.
    pub saved: AttentionSaved<'a>,
    /// Written, in the layout of `qkv`.
    pub dqkv: View<'a>,
    /// Written or added to: `[width of qkv]`.
    pub dbias: Option<Gradient<'a>>,
    /// Shape.
    pub shape: AttentionShape,
}

/// Rotates the first `dims` dims of every query and key head in place, by position (arXiv 2104.09864).
///
/// Dim `i` is paired with dim `i + dims/2`, as in Hugging Face checkpoints. The angle of pair `i` at position `t` is
/// `t · base^(−2i/dims)`. A row's position is given by its index in its sample and by `slices`, unless `positions` is given.
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'a> {
    /// Read and written, in the layout of [`AttentionShape`].
    pub qkv: View<'a>,
    /// Shape.
    pub shape: AttentionShape,
    /// Dims of each head that are rotated; even.
    pub dims: usize,
    /// Base of the frequencies.
    pub base: f64,
    /// How frequencies are scaled.
    pub scaling: FrequencyScaling,
    /// Rotate by the negative angle: the backward of the rotation.
    pub inverse: bool,
    /// Read, `[rows]`, u32: the position of each row in its sample, for rows that are not the start of it.
    pub positions: Option<View<'a>>,
    /// The part of every sample that the rows are.
    pub slices: Slices,
}

/// `out = f(gate) ∘ up` where `x` is `[rows, 2·width]`: gate, then up (arXiv 2002.05202).
#[derive(Clone, Copy, Debug)]
pub struct Gated<'a> {
    /// Read, `[rows, 2·width]`.
    pub x: View<'a>,
    /// Written, `[rows, width]`.
    pub out: View<'a>,
    /// The function of the gate.
    pub gate: GateFunction,
    /// Tokens.
    pub rows: usize,
    /// Width of the MLP on this rank.
    pub width: usize,
}

/// The function of the gate of a gated linear unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    /// SwiGLU: `x · σ(x)`.
    Silu,
    /// GeGLU: GELU in its tanh form.
    Gelu,
}

impl GateFunction {
    /// The name of the unit, and of its kernels.
    pub fn unit(self) -> &'static str {
        match self {
            GateFunction::Silu => "swiglu",
            GateFunction::Gelu => "geglu",
        }
    }
}

/// Backward of [`Gated`].
#[derive(Clone, Copy, Debug)]
pub struct GatedBackward<'a> {
    /// Read, `[rows, width]`.
    pub dout: View<'a>,
    /// Read, `[rows, 2·width]`.
    pub x: View<'a>,
    /// Written, `[rows, 2·width]`. May be `x`.
    pub dx: View<'a>,
    /// The function of the gate.
    pub gate: GateFunction,
    /// Tokens.
    pub rows: usize,
    /// Width of the MLP on this rank.
    pub width: usize,
}

/// `out[row] = table[token[row] − first]`, or zero if the token is not in this rank's part of the vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a> {
    /// Read, `[rows]`, u32.
    pub tokens: View<'a>,
    /// Read, `[vocabulary, width]`: this rank's part.
    pub table: View<'a>,
    /// First token of this rank's part.
    pub first: usize,
    /// Written, `[rows, width]`.
    pub out: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Width.
    pub width: usize,
}

/// Backward of [`Embedding`]: rows are added in order, so the sum is deterministic.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingBackward<'a> {
    /// Read, `[rows]`, u32.
    pub tokens: View<'a>,
    /// Read, `[rows, width]`.
    pub dout: View<'a>,
    /// First token of this rank's part.
    pub first: usize,
    /// Written, `[vocabulary, width]`.
    pub dtable: Gradient<'a>,
    /// Tokens.
    pub rows: usize,
    /// Width.
    pub width: usize,
}

/// `x[row] += table[(first_row + row) mod sequence]`: learned positions.
#[derive(Clone, Copy, Debug)]
pub struct Positions<'a> {
    /// Read and written, `[rows, width]`.
    pub x: View<'a>,
    /// Read, `[≥ sequence, width]`.
    pub table: View<'a>,
    /// Index of the first row within the micro-batch (sequence parallel ranks hold a part of the rows).
    pub first_row: usize,
    /// Tokens per sample.
    pub sequence: usize,
    /// Tokens here.
    pub rows: usize,
    /// Width.
    pub width: usize,
}

/// Backward of [`Positions`]: `dtable[(first_row + row) mod sequence] (+)= dx[row]`.
#[derive(Clone, Copy, Debug)]
pub struct PositionsBackward<'a> {
    /// Read, `[rows, width]`.
    pub dx: View<'a>,
    /// Written, `[≥ sequence, width]`; positions that no row has become zero when not accumulating.
    pub dtable: Gradient<'a>,
    /// Index of the first row within the micro-batch.
    pub first_row: usize,
    /// Tokens per sample.
    pub sequence: usize,
    /// Tokens here.
    pub rows: usize,
    /// Width.
    pub width: usize,
}

/// For each row of this rank's logits: the maximum, `Σ exp(x − maximum)`, and the target's logit (−∞ if another rank
/// has the target).
#[derive(Clone, Copy, Debug)]
pub struct LossStatistics<'a> {
    /// Read, `[rows, columns]`.
    pub logits: View<'a>,
    /// Read, `[rows]`, u32.
    pub targets: View<'a>,
    /// First token of this rank's part of the vocabulary.
    pub first: usize,
    /// Columns that are real tokens. The rest is padding and ignored.
    pub valid: usize,
    /// Written, `[rows, 3]`, accumulator type.
    pub statistics: View<'a>,
    /// As in [`CrossEntropy`].
    pub soft_cap: Option<f64>,
    /// Tokens.
    pub rows: usize,
    /// Columns of the logits.
    pub columns: usize,
}

/// Cross-entropy from the statistics of all `parts` of the vocabulary. If there is one part, the operation computes the
/// statistics itself, as [`LossStatistics`] does, so that the logits need to be read only once.
///
/// `loss += Σ_rows (log Σ exp − target)`. If `scale` is given, the logits are overwritten by their gradient:
/// `(softmax − one_hot) · factor · scale`.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// Read, and written when `scale` is given, `[rows, columns]`.
    pub logits: View<'a>,
    /// Read, `[rows]`, u32.
    pub targets: View<'a>,
    /// First token of this rank's part of the vocabulary.
    pub first: usize,
    /// Columns that are real tokens. The gradient of the others is zero.
    pub valid: usize,
    /// `[parts, rows, 3]`, accumulator type. Read; written if there is one part.
    pub statistics: View<'a>,
    /// Parts of the vocabulary.
    pub parts: usize,
    /// Read and written, `[1]`, accumulator type.
    pub loss: View<'a>,
    /// Read, `[1]`: the loss scale, on the device. Without it only the loss is computed.
    pub scale: Option<View<'a>>,
    /// Constant factor of the gradient (one over the tokens of the global batch).
    pub factor: f64,
    /// Logits are bounded by `soft_cap · tanh(logit / soft_cap)`. The gradient is that of the logits before.
    pub soft_cap: Option<f64>,
    /// Coefficient z of `z · ln²(Σ exp x)`, whose gradient is added. The loss does not contain it.
    pub z_loss: f64,
    /// Tokens.
    pub rows: usize,
    /// Columns of the logits.
    pub columns: usize,
}

impl<'a> CrossEntropy<'a> {
    /// The statistics that the operation computes itself: those of a vocabulary in one part.
    pub fn own_statistics(&self) -> Option<LossStatistics<'a>> {
        let CrossEntropy { logits, targets, first, valid, statistics, soft_cap, rows, columns, .. } = *self;
        (self.parts == 1).then_some(LossStatistics {
            logits,
            targets,
            first,
            valid,
            statistics,
            soft_cap,
            rows,
            columns,
        })
    }
}
