//! The operations of training as values: what each reads and writes, and how many elements that is.
//!
//! All matrices are row-major. `rows` are tokens. A backend may assume that [`Check::check`] has passed.

use crate::{DType, View};

/// Where a gradient goes: over what is there, or added to it (later micro-batches).
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// The gradient's memory.
    pub view: View<'a>,
    /// Add to it instead of overwriting it.
    pub accumulate: bool,
}

/// `out = x · weightᵀ + bias`, and with `gelu`: `gelu = out` (the pre-activation), `out = GELU(gelu)`.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// Read, `[rows, inputs]`.
    pub x: View<'a>,
    /// Read, `[outputs, inputs]`.
    pub weight: View<'a>,
    /// Read, `[outputs]`.
    pub bias: Option<View<'a>>,
    /// Written, `[rows, outputs]`: the value before GELU.
    pub gelu: Option<View<'a>>,
    /// Written, `[rows, outputs]`.
    pub out: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
}

/// `dx = dy · weight`, and with `gelu`: `dx = dx ∘ GELU'(gelu)`.
#[derive(Clone, Copy, Debug)]
pub struct LinearBackwardInput<'a> {
    /// Read, `[rows, outputs]`.
    pub dy: View<'a>,
    /// Read, `[outputs, inputs]`.
    pub weight: View<'a>,
    /// Read, `[rows, inputs]`: the pre-activation that made this layer's input.
    pub gelu: Option<View<'a>>,
    /// Written, `[rows, inputs]`.
    pub dx: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Input features.
    pub inputs: usize,
    /// Output features.
    pub outputs: usize,
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

/// `LayerNorm` (with a bias) or `RMSNorm` (without): `out = (x − mean) · rstd · weight + bias`.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Read, `[rows, width]`.
    pub x: View<'a>,
    /// Read, `[width]`.
    pub weight: View<'a>,
    /// Read, `[width]`. With it this is `LayerNorm`; without it `RMSNorm`, which subtracts no mean.
    pub bias: Option<View<'a>>,
    /// Written, `[rows, width]`.
    pub out: View<'a>,
    /// Written, `[rows, 2]` in the accumulator type: mean (0 for `RMSNorm`) and 1/σ.
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
    /// Read, `[rows, width]`: the gradient that reaches `x` past the norm.
    pub residual: Option<View<'a>>,
    /// Written, `[rows, width]`.
    pub dx: View<'a>,
    /// Written, `[width]`.
    pub dweight: Gradient<'a>,
    /// Written, `[width]`; present exactly for `LayerNorm`.
    pub dbias: Option<Gradient<'a>>,
    /// Tokens.
    pub rows: usize,
    /// Width.
    pub width: usize,
}

/// The shape of causal self-attention over interleaved projections.
///
/// `qkv` is `[batch, sequence, heads + 2·kv_heads, head_dim]`: query heads, then key heads, then value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

impl AttentionShape {
    /// Elements of one row of `qkv`.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Tokens.
    pub fn rows(&self) -> usize {
        self.batch * self.sequence
    }

    /// Scores in the whole square, every head and sample: `batch · heads · sequence²`.
    pub fn scores(&self) -> usize {
        self.batch * self.heads * self.sequence * self.sequence
    }
}

/// `out = softmax(q·kᵀ / √head_dim, causal) · v`.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Read, as [`AttentionShape`] says.
    pub qkv: View<'a>,
    /// Written, `[batch, sequence, heads, head_dim]`.
    pub out: View<'a>,
    /// What is kept for the backward, and so which algorithm runs.
    pub saved: AttentionSaved<'a>,
    /// Shape.
    pub shape: AttentionShape,
}

/// What attention keeps for its backward.
#[derive(Clone, Copy, Debug)]
pub enum AttentionSaved<'a> {
    /// Flash: the natural log of each row's sum of exponentials, `[batch, heads, sequence]`, accumulator type.
    /// No `sequence × sequence` tensor exists.
    LogSumExp(View<'a>),
    /// Plain: the probabilities, `[batch, heads, sequence, sequence]`, compute type.
    Probabilities(View<'a>),
}

/// Backward of [`Attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward<'a> {
    /// Read, as the forward's.
    pub qkv: View<'a>,
    /// Read: the forward's output.
    pub out: View<'a>,
    /// Read: the gradient of the output.
    pub dout: View<'a>,
    /// Read.
    pub saved: AttentionSaved<'a>,
    /// Written, like `qkv`.
    pub dqkv: View<'a>,
    /// Shape.
    pub shape: AttentionShape,
}

/// Rotates the first `dims` dims of every query and key head in place, by position (arXiv 2104.09864).
///
/// Dim `i` is paired with dim `i + dims/2`, as Hugging Face's checkpoints expect; the angle of pair `i` at position
/// `t` is `t · base^(−2i/dims)`.
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'a> {
    /// Read and written, as [`AttentionShape`] says.
    pub qkv: View<'a>,
    /// Shape.
    pub shape: AttentionShape,
    /// Dims of each head that are rotated; even.
    pub dims: usize,
    /// Base of the frequencies.
    pub base: f64,
    /// Rotate back: the backward of the rotation.
    pub inverse: bool,
}

/// `out = silu(gate) ∘ up` where `x` is `[rows, 2·width]`: gate, then up.
#[derive(Clone, Copy, Debug)]
pub struct Swiglu<'a> {
    /// Read, `[rows, 2·width]`.
    pub x: View<'a>,
    /// Written, `[rows, width]`.
    pub out: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Width of the MLP on this rank.
    pub width: usize,
}

/// Backward of [`Swiglu`].
#[derive(Clone, Copy, Debug)]
pub struct SwigluBackward<'a> {
    /// Read, `[rows, width]`.
    pub dout: View<'a>,
    /// Read, `[rows, 2·width]`.
    pub x: View<'a>,
    /// Written, `[rows, 2·width]`. May be `x`.
    pub dx: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Width of the MLP on this rank.
    pub width: usize,
}

/// `out[row] = table[token[row] − first]`, or zero where the token is not in this rank's part of the vocabulary.
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

/// What each row of this rank's logits contributes to the softmax: maximum, `Σ exp(x − maximum)`, and the target's
/// logit (or −∞ if the target is elsewhere).
#[derive(Clone, Copy, Debug)]
pub struct LossStatistics<'a> {
    /// Read, `[rows, columns]`.
    pub logits: View<'a>,
    /// Read, `[rows]`, u32.
    pub targets: View<'a>,
    /// First token of this rank's part of the vocabulary.
    pub first: usize,
    /// Columns that are real tokens; the rest is padding and takes no part.
    pub valid: usize,
    /// Written, `[rows, 3]`, accumulator type.
    pub statistics: View<'a>,
    /// Tokens.
    pub rows: usize,
    /// Columns of the logits.
    pub columns: usize,
}

/// Cross-entropy from the statistics of all `parts` of the vocabulary.
///
/// `loss += Σ_rows (log Σ exp − target)`, and if `scale` is given the logits become their own gradient:
/// `(softmax − one_hot) · factor · scale`.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// Read, and written when `scale` is given, `[rows, columns]`.
    pub logits: View<'a>,
    /// Read, `[rows]`, u32.
    pub targets: View<'a>,
    /// First token of this rank's part of the vocabulary.
    pub first: usize,
    /// Columns that are real tokens; the gradient of the rest is zero.
    pub valid: usize,
    /// Read, `[parts, rows, 3]`.
    pub statistics: View<'a>,
    /// Parts of the vocabulary.
    pub parts: usize,
    /// Read and written, `[1]`, accumulator type.
    pub loss: View<'a>,
    /// Read, `[1]`: the loss scale, on the device. Without it only the loss is wanted.
    pub scale: Option<View<'a>>,
    /// Constant factor of the gradient (one over the tokens of the global batch).
    pub factor: f64,
    /// Tokens.
    pub rows: usize,
    /// Columns of the logits.
    pub columns: usize,
}

/// One parameter group for [`AdamW`]: a contiguous run with one decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// First element.
    pub start: usize,
    /// Elements.
    pub len: usize,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// One `AdamW` update (arXiv 1711.05101) of a flat run of parameters, skipped where the control says so.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<'a> {
    /// Read, `[len]`, gradients' type.
    pub gradient: View<'a>,
    /// Read and written, `[len]`, accumulator type: the master weights (the weights themselves in fp32).
    pub master: View<'a>,
    /// Read and written, `[len]`.
    pub first_moment: View<'a>,
    /// Read and written, `[len]`.
    pub second_moment: View<'a>,
    /// Written, `[len]`: the copy in the compute type, where it is not the master itself.
    pub weights: Option<View<'a>>,
    /// Runs with and without decay.
    pub segments: &'a [Segment],
    /// Read: learning rate, gradient factor, bias corrections, skip flag ([`crate::ops::control`]).
    pub control: View<'a>,
    /// β₁, β₂.
    pub betas: (f64, f64),
    /// ε.
    pub epsilon: f64,
    /// Decay λ.
    pub weight_decay: f64,
}

/// Decides, on the device, what the step does: clip factor, skip, loss scale, learning rate.
#[derive(Clone, Copy, Debug)]
pub struct UpdateControl<'a> {
    /// Read and written, [`control::LEN`] elements, accumulator type.
    pub control: View<'a>,
    /// Read: the global sum of squares of the gradients (still multiplied by the squared loss scale).
    pub sum_of_squares: View<'a>,
    /// Read: the sum of the losses of all tokens.
    pub loss_sum: View<'a>,
    /// Tokens in the global batch.
    pub tokens: f64,
    /// Largest allowed norm; 0 for none.
    pub clip: f64,
    /// Learning rate schedule.
    pub rate: LearningRate,
    /// β₁, β₂, for the bias corrections.
    pub betas: (f64, f64),
    /// How the loss scale moves; `None` keeps it.
    pub scaler: Option<LossScaler>,
}

/// Warm-up from zero, then cosine from `peak` to `floor` (or constant).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// Highest rate.
    pub peak: f64,
    /// Rate at the end.
    pub floor: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// Steps in all.
    pub steps: u64,
    /// Cosine decay; otherwise constant after the warm-up.
    pub cosine: bool,
}

impl LearningRate {
    /// The rate of 0-based step `step`.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        if !self.cosine {
            return self.peak;
        }
        let span = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let progress = ((step - self.warmup) as f64 / span).min(1.0);
        self.floor + (self.peak - self.floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
    }
}

/// Dynamic loss scaling: halve on overflow, double after `window` good steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    /// Good steps before the scale doubles.
    pub window: u64,
    /// Largest scale.
    pub largest: f64,
}

/// The slots of the control buffer: what a step needs to know and the host reads afterwards.
pub mod control {
    /// Steps done, skipped ones included.
    pub const STEP: usize = 0;
    /// Updates made (for the bias corrections).
    pub const UPDATES: usize = 1;
    /// Loss scale of the running step.
    pub const LOSS_SCALE: usize = 2;
    /// Good steps since the scale last moved.
    pub const GOOD_STEPS: usize = 3;
    /// 1 if this step is skipped.
    pub const SKIP: usize = 4;
    /// Steps skipped in a row.
    pub const SKIPPED_IN_A_ROW: usize = 5;
    /// Global gradient norm, unscaled, before clipping.
    pub const NORM: usize = 6;
    /// What gradients are multiplied with: 1/loss scale and clipping.
    pub const FACTOR: usize = 7;
    /// Learning rate of this step.
    pub const RATE: usize = 8;
    /// 1 − β₁ᵗ.
    pub const CORRECTION_1: usize = 9;
    /// 1 − β₂ᵗ.
    pub const CORRECTION_2: usize = 10;
    /// Mean loss of this step.
    pub const LOSS: usize = 11;
    /// Number of slots.
    pub const LEN: usize = 12;
}

/// Shapes of an operation, checked before it is run on any backend.
pub trait Check {
    /// Panics if a view does not have the elements or the type that the operation needs.
    fn check(&self);
}

fn expect(name: &str, view: View, len: usize) {
    assert_eq!(view.len(), len, "{name} has the wrong number of elements");
}

fn expect_type(name: &str, view: View, dtype: DType) {
    assert_eq!(view.dtype(), dtype, "{name} has the wrong type");
}

impl Check for Linear<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.inputs);
        expect("weight", self.weight, self.outputs * self.inputs);
        expect("out", self.out, self.rows * self.outputs);
        if let Some(bias) = self.bias {
            expect("bias", bias, self.outputs);
        }
        if let Some(gelu) = self.gelu {
            expect("gelu", gelu, self.rows * self.outputs);
        }
    }
}

impl Check for LinearBackwardInput<'_> {
    fn check(&self) {
        expect("dy", self.dy, self.rows * self.outputs);
        expect("weight", self.weight, self.outputs * self.inputs);
        expect("dx", self.dx, self.rows * self.inputs);
        if let Some(gelu) = self.gelu {
            expect("gelu", gelu, self.rows * self.inputs);
        }
    }
}

impl Check for LinearBackwardWeight<'_> {
    fn check(&self) {
        expect("dy", self.dy, self.rows * self.outputs);
        expect("x", self.x, self.rows * self.inputs);
        expect("dweight", self.dweight.view, self.outputs * self.inputs);
        if let Some(dbias) = self.dbias {
            expect("dbias", dbias.view, self.outputs);
        }
    }
}

impl Check for Residual<'_> {
    fn check(&self) {
        let len = self.rows * self.width;
        expect("x", self.x, len);
        expect("out", self.out, len);
        self.addends.iter().for_each(|&a| expect("addend", a, len));
        self.biases.iter().for_each(|&b| expect("bias", b, self.width));
    }
}

impl Check for ColumnSum<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.width);
        expect("out", self.out.view, self.width);
    }
}

impl Check for Norm<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.width);
        expect("out", self.out, self.rows * self.width);
        expect("weight", self.weight, self.width);
        expect("statistics", self.statistics, self.rows * 2);
        expect_type("statistics", self.statistics, self.x.dtype().accumulator());
        if let Some(bias) = self.bias {
            expect("bias", bias, self.width);
        }
    }
}

impl Check for NormBackward<'_> {
    fn check(&self) {
        let len = self.rows * self.width;
        expect("dy", self.dy, len);
        expect("x", self.x, len);
        expect("dx", self.dx, len);
        expect("statistics", self.statistics, self.rows * 2);
        expect("weight", self.weight, self.width);
        expect("dweight", self.dweight.view, self.width);
        if let Some(residual) = self.residual {
            expect("residual", residual, len);
        }
        if let Some(dbias) = self.dbias {
            expect("dbias", dbias.view, self.width);
        }
    }
}

impl AttentionSaved<'_> {
    fn check(&self, shape: AttentionShape, compute: DType) {
        match *self {
            AttentionSaved::LogSumExp(view) => {
                expect("log-sum-exp", view, shape.rows() * shape.heads);
                expect_type("log-sum-exp", view, compute.accumulator());
            }
            AttentionSaved::Probabilities(view) => {
                expect("probabilities", view, shape.scores());
                expect_type("probabilities", view, compute);
            }
        }
    }
}

impl Check for Attention<'_> {
    fn check(&self) {
        expect("qkv", self.qkv, self.shape.rows() * self.shape.qkv_width());
        expect("out", self.out, self.shape.rows() * self.shape.heads * self.shape.head_dim);
        self.saved.check(self.shape, self.qkv.dtype());
    }
}

impl Check for AttentionBackward<'_> {
    fn check(&self) {
        let out = self.shape.rows() * self.shape.heads * self.shape.head_dim;
        expect("qkv", self.qkv, self.shape.rows() * self.shape.qkv_width());
        expect("dqkv", self.dqkv, self.qkv.len());
        expect("out", self.out, out);
        expect("dout", self.dout, out);
        self.saved.check(self.shape, self.qkv.dtype());
    }
}

impl Check for Rotary<'_> {
    fn check(&self) {
        expect("qkv", self.qkv, self.shape.rows() * self.shape.qkv_width());
        assert!(self.dims.is_multiple_of(2) && self.dims <= self.shape.head_dim, "{} rotary dims", self.dims);
    }
}

impl Check for Swiglu<'_> {
    fn check(&self) {
        expect("x", self.x, 2 * self.rows * self.width);
        expect("out", self.out, self.rows * self.width);
    }
}

impl Check for SwigluBackward<'_> {
    fn check(&self) {
        expect("dout", self.dout, self.rows * self.width);
        expect("x", self.x, 2 * self.rows * self.width);
        expect("dx", self.dx, 2 * self.rows * self.width);
    }
}

impl Check for Embedding<'_> {
    fn check(&self) {
        expect("tokens", self.tokens, self.rows);
        expect_type("tokens", self.tokens, DType::U32);
        expect("out", self.out, self.rows * self.width);
        assert!(self.table.len().is_multiple_of(self.width), "table is not whole rows");
    }
}

impl Check for EmbeddingBackward<'_> {
    fn check(&self) {
        expect("tokens", self.tokens, self.rows);
        expect_type("tokens", self.tokens, DType::U32);
        expect("dout", self.dout, self.rows * self.width);
        assert!(self.dtable.view.len().is_multiple_of(self.width), "table is not whole rows");
    }
}

impl Check for Positions<'_> {
    fn check(&self) {
        expect("x", self.x, self.rows * self.width);
        assert!(self.table.len() >= self.sequence * self.width, "the table has too few positions");
    }
}

impl Check for PositionsBackward<'_> {
    fn check(&self) {
        expect("dx", self.dx, self.rows * self.width);
        assert!(self.dtable.view.len() >= self.sequence * self.width, "the table has too few positions");
    }
}

impl Check for LossStatistics<'_> {
    fn check(&self) {
        expect("logits", self.logits, self.rows * self.columns);
        expect("targets", self.targets, self.rows);
        expect_type("targets", self.targets, DType::U32);
        expect("statistics", self.statistics, self.rows * 3);
        expect_type("statistics", self.statistics, self.logits.dtype().accumulator());
        assert!(self.valid <= self.columns, "{} valid of {} columns", self.valid, self.columns);
    }
}

impl Check for CrossEntropy<'_> {
    fn check(&self) {
        expect("logits", self.logits, self.rows * self.columns);
        expect("targets", self.targets, self.rows);
        expect("statistics", self.statistics, self.parts * self.rows * 3);
        expect("loss", self.loss, 1);
        if let Some(scale) = self.scale {
            expect("scale", scale, 1);
        }
    }
}

impl Check for AdamW<'_> {
    fn check(&self) {
        let len = self.gradient.len();
        expect("master", self.master, len);
        expect("first moment", self.first_moment, len);
        expect("second moment", self.second_moment, len);
        expect("control", self.control, control::LEN);
        if let Some(weights) = self.weights {
            expect("weights", weights, len);
        }
        assert!(self.segments.iter().all(|s| s.start + s.len <= len), "a segment lies outside");
    }
}

impl Check for UpdateControl<'_> {
    fn check(&self) {
        expect("control", self.control, control::LEN);
        expect("sum of squares", self.sum_of_squares, 1);
        expect("loss sum", self.loss_sum, 1);
    }
}
