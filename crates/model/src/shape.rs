//! The sizes of one rank's blocks.

use kintsugi_plan::{
    AttentionKind, Compute, ContextAttention, Coordinate, GradientType, Plan, Products, Recompute, Unit,
};
use kintsugi_spec::{Activation, FrequencyScaling, QueryKeyNorm};
use kintsugi_tensor::DType;
use kintsugi_tensor::ops::{AttentionShape, Scores, Slices};

/// The most chunks of rows into which products and transfers are cut.
pub(crate) const MAX_CHUNKS: usize = 4;

/// The sizes and options of a rank's blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Whether attention and MLP both use the layer's input.
    pub parallel_residual: bool,
    /// MLP non-linearity.
    pub activation: Activation,
    /// Tokens of a micro-batch that this rank has.
    pub rows: usize,
    /// Tokens of a micro-batch between the tensor-parallel regions: `rows / tp` with sequence parallelism.
    pub own_rows: usize,
    /// Tokens per sample, over all ranks of cp.
    pub sequence: usize,
    /// Which of them this rank has.
    pub slices: Slices,
    /// How attention reaches the keys and values of the other ranks of cp.
    pub context_attention: ContextAttention,
    /// Type of gradients, which those of keys and values travel in.
    pub gradients: GradientType,
    /// Width of the residual stream.
    pub hidden: usize,
    /// This rank's attention heads.
    pub attention: AttentionShape,
    /// This rank's width of the MLP.
    pub ffn: usize,
    /// This rank's part of the padded vocabulary.
    pub vocab: usize,
    /// First token of that part.
    pub first_token: usize,
    /// Tokens of that part without padding.
    pub valid_tokens: usize,
    /// The rows whose logits are in memory at a time.
    pub head_rows: usize,
    /// Type of weights and activations.
    pub compute: DType,
    /// How the products of layers are computed.
    pub products: Products,
    /// Whether rows are split over tp between the tensor-parallel regions.
    pub sequence_parallel: bool,
    /// Whether transfers inside a tensor-parallel region run beside its products.
    pub overlap: bool,
    /// Chunks of rows into which products and transfers are cut. 1 without overlap.
    pub chunks: usize,
    /// Activation recomputation.
    pub recompute: Recompute,
    /// Attention algorithm.
    pub attention_kind: AttentionKind,
    /// Epsilon of the norms.
    pub epsilon: f64,
    /// Rotated dims of each head; 0 for none.
    pub rotary_dims: usize,
    /// Base of the rotary frequencies.
    pub rotary_base: f64,
    /// How low rotary frequencies are scaled.
    pub rotary_scaling: FrequencyScaling,
    /// Which layers do not rotate: those whose number, from 1, is a multiple of this.
    pub no_rotary_every: Option<usize>,
    /// The windows of layers, `None` for a layer that attends to all tokens before.
    pub windows: Vec<Option<usize>>,
    /// What the norms of queries and keys span, if there are any.
    pub query_key_norm: Option<QueryKeyNorm>,
    /// What embeddings are multiplied by.
    pub embedding_scale: Option<f64>,
    /// The soft cap of logits.
    pub logit_soft_cap: Option<f64>,
    /// Tokens of the global batch. The loss is the mean over them.
    pub tokens_per_step: usize,
    /// Coefficient of the z-loss.
    pub z_loss: f64,
}

impl Shape {
    /// The same for a layer whose weights are frozen. What selective recomputation does not save are factors of gradients of weights,
    /// which a frozen layer never computes.
    #[must_use]
    pub fn frozen(&self) -> Shape {
        let recompute = match self.recompute {
            Recompute::None | Recompute::Selective => Recompute::Selective,
            Recompute::Full => Recompute::Full,
        };
        Shape { recompute, ..self.clone() }
    }

    /// The shape of the rank at `at` of a plan.
    pub fn new(plan: &Plan, at: Coordinate) -> Self {
        let (model, tp) = (&plan.model, plan.mesh.tp());
        let vocab = model.padded_vocab(tp) / tp;
        let first_token = at.tp() * vocab;
        let sequence_parallel = plan.sequence_parallel && tp > 1;
        let own_rows = if sequence_parallel { plan.rows() / tp } else { plan.rows() };
        let overlap = plan.overlap_tp && tp > 1;
        Shape {
            parallel_residual: model.parallel_residual,
            activation: model.activation,
            rows: plan.rows(),
            own_rows,
            sequence: plan.batch.sequence,
            slices: Slices { parts: plan.mesh.cp(), part: at.cp() },
            context_attention: plan.cp_attention,
            gradients: plan.precision.gradients,
            hidden: model.hidden,
            attention: AttentionShape {
                batch: plan.batch.micro,
                sequence: plan.own_sequence(),
                heads: model.heads / tp,
                kv_heads: model.kv_heads / tp,
                head_dim: model.head_dim,
                scores: Scores { width: model.score_width, soft_cap: model.score_soft_cap, window: None },
            },
            ffn: model.ffn / tp,
            vocab,
            first_token,
            valid_tokens: model.vocab.saturating_sub(first_token).min(vocab),
            head_rows: plan.head_rows(),
            compute: compute_type(plan.precision.compute),
            products: plan.precision.products,
            sequence_parallel,
            overlap,
            chunks: if overlap { chunks(own_rows) } else { 1 },
            recompute: plan.memory.recompute,
            attention_kind: plan.memory.attention,
            epsilon: model.norm_eps,
            rotary_dims: if model.has_learned_positions() { 0 } else { model.rotary_dims() },
            rotary_base: model.rotary_base,
            rotary_scaling: FrequencyScaling::new(
                model.rotary_scaling,
                model.rotary_base,
                model.rotary_dims(),
            ),
            no_rotary_every: model.no_rotary_every,
            windows: (0..model.layers).map(|layer| model.window(layer)).collect(),
            query_key_norm: model.features().query_key_norm,
            embedding_scale: model.features().scaled_embeddings.then(|| (model.hidden as f64).sqrt()),
            logit_soft_cap: model.logit_soft_cap,
            tokens_per_step: plan.tokens_per_step(),
            z_loss: plan.optimizer.z_loss,
        }
    }

    /// The same shape for `tokens` new tokens of each of `samples` samples, for generation. Every tp rank holds all rows, since
    /// a single token cannot be split.
    #[must_use]
    pub fn with_new_tokens(&self, samples: usize, tokens: usize) -> Shape {
        let rows = samples * tokens;
        let attention = AttentionShape { batch: samples, sequence: tokens, ..self.attention };
        Shape {
            rows,
            own_rows: rows,
            sequence: tokens,
            slices: Slices::WHOLE,
            attention,
            sequence_parallel: false,
            overlap: false,
            chunks: 1,
            // A few rows are no multiple of what products in 8 bits need.
            products: Products::Compute,
            ..self.clone()
        }
    }

    /// The type in which gradients of keys and values travel between the ranks of cp.
    pub fn key_gradients(&self) -> DType {
        match self.gradients {
            GradientType::Fp32 => self.compute.accumulator(),
            GradientType::Compute => self.compute,
        }
    }

    /// Whether a layer rotates queries and keys.
    pub fn rotates(&self, unit: Unit) -> bool {
        let is_skipped = |every| matches!(unit, Unit::Layer(layer) if (layer + 1).is_multiple_of(every));
        self.rotary_dims > 0 && !self.no_rotary_every.is_some_and(is_skipped)
    }

    /// Whether logits are computed some rows at a time, and again in the backward.
    pub fn divides_head(&self) -> bool {
        self.head_rows < self.rows
    }

    /// The attention of a layer over samples that are not longer than in training.
    pub fn attention_of(&self, unit: Unit) -> AttentionShape {
        let window = self.window(unit).filter(|&window| window < self.sequence);
        AttentionShape { scores: Scores { window, ..self.attention.scores }, ..self.attention }
    }

    /// The attention of a layer over a cache of any length.
    pub fn cached_attention_of(&self, unit: Unit) -> AttentionShape {
        let window = self.window(unit);
        AttentionShape { scores: Scores { window, ..self.attention.scores }, ..self.attention }
    }

    fn window(&self, unit: Unit) -> Option<usize> {
        if let Unit::Layer(layer) = unit { self.windows[layer] } else { None }
    }

    /// Columns of the first MLP product: gate and up, if there is a gate.
    pub fn mlp_in_width(&self) -> usize {
        if self.activation.is_gated() { 2 * self.ffn } else { self.ffn }
    }

    /// Columns of this rank's attention output.
    pub fn attention_width(&self) -> usize {
        self.attention.heads * self.attention.head_dim
    }
}

/// The chunks of a rank's rows if transfers overlap. More chunks hide more of a transfer, but their products are smaller.
fn chunks(rows: usize) -> usize {
    (1..=MAX_CHUNKS).rev().find(|&count| rows.is_multiple_of(count)).unwrap_or(1)
}

/// The element type of a configured precision.
pub fn compute_type(compute: Compute) -> DType {
    match compute {
        Compute::Fp32 => DType::F32,
        Compute::Bf16 => DType::BF16,
        Compute::Fp16 => DType::F16,
    }
}
