//! The shape of a transformer language model.

use serde::{Deserialize, Serialize};

use crate::{Family, Features, Positions, RotaryScaling};

/// The non-linearity of the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// GELU in its tanh form, one input matrix.
    Gelu,
    /// GELU by the error function, one input matrix.
    #[serde(rename = "gelu-exact")]
    ExactGelu,
    /// SwiGLU: `silu(gate) * up`, two input matrices.
    Swiglu,
    /// GeGLU: `gelu(gate) * up` with the tanh form of GELU, two input matrices.
    Geglu,
}

impl Activation {
    /// Whether the MLP has a gate, a second input matrix.
    pub fn is_gated(self) -> bool {
        matches!(self, Activation::Swiglu | Activation::Geglu)
    }

    /// The word in configurations and manifests.
    pub fn name(self) -> &'static str {
        match self {
            Activation::Gelu => "gelu",
            Activation::ExactGelu => "gelu-exact",
            Activation::Swiglu => "swiglu",
            Activation::Geglu => "geglu",
        }
    }
}

/// The shape of a model, fully resolved: no field is left to a default.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelSpec {
    /// `model.name`: by default the preset's name, or `"custom"`.
    pub name: String,
    /// The family, which decides the features.
    pub family: Family,
    /// Number of transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; equal to `heads` without grouped-query attention.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width of the MLP.
    pub ffn: usize,
    /// Tokens in the vocabulary, before padding.
    pub vocab: usize,
    /// The padded vocabulary is a multiple of this times tp.
    pub vocab_multiple: usize,
    /// The longest sequence that the model supports: a limit for learned positions, otherwise only information.
    pub positions: usize,
    /// Whether the output matrix is the token table.
    pub tied: bool,
    /// Whether attention and MLP both start from the layer's input (only families with `parallel_residual`).
    pub parallel_residual: bool,
    /// MLP non-linearity.
    pub activation: Activation,
    /// Epsilon inside the norms.
    pub norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rotary_base: f64,
    /// Share of each head that is rotated.
    pub rotary_fraction: f64,
    /// The scaling of low rotary frequencies, if there is one (only families with `rotary_scaling`).
    pub rotary_scaling: Option<RotaryScaling>,
    /// Layers whose number, from 1, is a multiple of this do not rotate (only families with `no_rotary_every`).
    pub no_rotary_every: Option<usize>,
    /// A token attends to itself and to the tokens before it in a window of this size (only families with `sliding_window`).
    pub sliding_window: Option<usize>,
    /// Layers whose number, from 1, is a multiple of this have no window.
    pub full_attention_every: Option<usize>,
    /// So many of the first layers have no window.
    pub full_attention_first: Option<usize>,
    /// Scores are divided by the root of this instead of that of `head_dim` (only families with `soft_caps`).
    pub score_width: Option<usize>,
    /// The soft cap of scores (only families with `soft_caps`).
    pub score_soft_cap: Option<f64>,
    /// The soft cap of logits (only families with `soft_caps`).
    pub logit_soft_cap: Option<f64>,
    /// Standard deviation of initial weights.
    pub init_std: f64,
}

/// The default standard deviation of initial weights, as in GPT-2.
pub const DEFAULT_INIT_STD: f64 = 0.02;

impl ModelSpec {
    /// The vocabulary, padded so that all `tp` shards have the same size, a multiple of `vocab_multiple`.
    pub fn padded_vocab(&self, tp: usize) -> usize {
        self.vocab.next_multiple_of(self.vocab_multiple * tp)
    }

    /// The number of rotated dims of each head (always even).
    pub fn rotary_dims(&self) -> usize {
        let dims = (self.head_dim as f64 * self.rotary_fraction).round() as usize;
        dims - dims % 2
    }

    /// What the model has in common with its family.
    pub fn features(&self) -> &'static Features {
        self.family.features()
    }

    /// The most tokens of a text, if there is a limit: that of learned positions.
    pub fn max_tokens(&self) -> Option<usize> {
        self.has_learned_positions().then_some(self.positions)
    }

    /// The number of tokens that a token attends to at most in a layer, itself included; `None` if it attends to all before it.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let is_full = self.full_attention_every.is_some_and(|every| (layer + 1).is_multiple_of(every))
            || layer < self.full_attention_first.unwrap_or(0);
        self.sliding_window.filter(|_| !is_full)
    }

    /// Whether positions are learned, and so parameters that limit the length of a sample.
    pub fn has_learned_positions(&self) -> bool {
        self.features().positions == Positions::Learned
    }
}
