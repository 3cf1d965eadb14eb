//! The families of models as data: each is a row of features.
//!
//! Parameters, layers, defaults and checks follow from the features. Nothing else compares families, so a new one is a row here
//! and its Hugging Face format in `crates/checkpoint/src/huggingface/families`.

use serde::{Deserialize, Serialize};

use crate::Activation;

/// What a family's models have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "features do not depend on each other")]
pub struct Features {
    /// How a token's position enters the model.
    pub positions: Positions,
    /// The kind of every norm.
    pub norm: NormKind,
    /// Where a layer has norms.
    pub norms: NormPlacement,
    /// Whether the embedding of a token is multiplied by the root of the hidden width.
    pub scaled_embeddings: bool,
    /// Which linear layers have biases.
    pub biases: Biases,
    /// Whether queries and keys are normalised before they are rotated.
    pub query_key_norm: Option<QueryKeyNorm>,
    /// The non-linearities that the MLP may have. The first is the default.
    pub activations: &'static [Activation],
    /// Whether attention and MLP may both start from the layer's input; then they do by default.
    pub parallel_residual: bool,
    /// Whether the output matrix is the token table by default.
    pub tied: bool,
    /// The default share of each head that is rotated.
    pub rotary_fraction: f64,
    /// Whether rotary frequencies may be scaled.
    pub rotary_scaling: bool,
    /// If some layers do not rotate: every layer whose number, from 1, is a multiple of this, by default.
    pub no_rotary_every: Option<usize>,
    /// Whether attention may be limited to the last tokens.
    pub sliding_window: bool,
    /// If some layers have no window by default: every layer whose number, from 1, is a multiple of this.
    pub full_attention_every: Option<usize>,
    /// If scores and logits have soft caps: the default ones.
    pub soft_caps: Option<SoftCaps>,
}

/// The bounds of magnitudes: `cap · tanh(x / cap)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftCaps {
    /// Of attention scores.
    pub scores: f64,
    /// Of logits.
    pub logits: f64,
}

/// How a token's position enters the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// A learned vector is added to the token's embedding.
    Learned,
    /// Queries and keys are rotated (arXiv 2104.09864).
    Rotary,
}

/// The kind of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// LayerNorm, with a bias.
    Layer,
    /// RMSNorm (arXiv 1910.07467), without a bias.
    Rms,
}

/// Where a layer has norms. The residual stream has none but the final one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and before the MLP.
    Before,
    /// After each of them.
    After,
    /// Before and after each of them.
    Around,
}

impl NormPlacement {
    /// Whether the output of attention, and that of the MLP, is normalised before it is added to the residual stream.
    pub fn has_after(self) -> bool {
        self != NormPlacement::Before
    }

    /// Whether the inputs of attention and of the MLP are normalised.
    pub fn has_before(self) -> bool {
        self != NormPlacement::After
    }
}

/// What a norm of queries, and one of keys, spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// Every head by itself, with a weight that all heads share.
    Head,
    /// All heads of a token together.
    AllHeads,
}

/// Which linear layers have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Biases {
    /// Query, key and value.
    pub qkv: bool,
    /// The output of attention.
    pub attention_out: bool,
    /// All matrices of the MLP.
    pub mlp: bool,
}

impl Features {
    /// Llama's, from which many families differ in a few features.
    const LLAMA: Features = Features {
        positions: Positions::Rotary,
        norm: NormKind::Rms,
        norms: NormPlacement::Before,
        scaled_embeddings: false,
        biases: Biases::NONE,
        query_key_norm: None,
        activations: &[Activation::Swiglu, Activation::Gelu, Activation::ExactGelu],
        parallel_residual: false,
        tied: false,
        rotary_fraction: 1.0,
        rotary_scaling: true,
        no_rotary_every: None,
        sliding_window: false,
        full_attention_every: None,
        soft_caps: None,
    };

    /// The same with SwiGLU only.
    const LLAMA_LIKE: Features = Features { activations: &[Activation::Swiglu], ..Features::LLAMA };

    /// GPT-2's.
    const GPT: Features = Features {
        positions: Positions::Learned,
        norm: NormKind::Layer,
        biases: Biases::ALL,
        activations: &[Activation::Gelu, Activation::ExactGelu],
        tied: true,
        rotary_fraction: 0.0,
        rotary_scaling: false,
        ..Features::LLAMA
    };
}

impl Biases {
    const ALL: Biases = Biases { qkv: true, attention_out: true, mlp: true };
    const NONE: Biases = Biases { qkv: false, attention_out: false, mlp: false };
}

/// Declares the families: a name, a variant, and its features.
macro_rules! families {
    ($($(#[doc = $doc:literal])+ $name:literal $variant:ident: $features:expr;)+) => {
        /// A family of models.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Family {$(
            $(#[doc = $doc])+
            #[serde(rename = $name)]
            $variant,
        )+}

        impl Family {
            /// Every family.
            pub const ALL: &'static [Family] = &[$(Family::$variant),+];

            /// The name in configurations and manifests.
            pub fn name(self) -> &'static str {
                match self {
                    $(Family::$variant => $name),+
                }
            }

            /// What the family's models have in common.
            pub fn features(self) -> &'static Features {
                match self {
                    $(Family::$variant => const { &$features }),+
                }
            }
        }
    };
}

families! {
    /// GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases.
    "gpt" Gpt: Features::GPT;
    /// GPT-NeoX: partial rotary positions, parallel or sequential attention and MLP, biases.
    "neox" Neox: Features {
        positions: Positions::Rotary,
        parallel_residual: true,
        tied: false,
        rotary_fraction: 0.25,
        ..Features::GPT
    };
    /// Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.
    "llama" Llama: Features::LLAMA;
    /// Mistral: Llama with a sliding window.
    "mistral" Mistral: Features { sliding_window: true, ..Features::LLAMA_LIKE };
    /// Qwen2 and Qwen2.5: Llama with biases of query, key and value.
    "qwen2" Qwen2: Features {
        biases: Biases { qkv: true, ..Biases::NONE },
        sliding_window: true,
        ..Features::LLAMA_LIKE
    };
    /// Qwen3: Llama with a norm of every query and key head.
    "qwen3" Qwen3: Features { query_key_norm: Some(QueryKeyNorm::Head), sliding_window: true, ..Features::LLAMA_LIKE };
    /// SmolLM3: Llama with a tied head, and no rotation in every fourth layer.
    "smollm3" Smollm3: Features { tied: true, no_rotary_every: Some(4), ..Features::LLAMA_LIKE };
    /// Phi-3 and Phi-4: Llama with a sliding window, or with partial rotary positions.
    "phi3" Phi3: Features { sliding_window: true, rotary_scaling: false, ..Features::LLAMA_LIKE };
    /// Gemma 1: Llama with GeGLU, scaled embeddings and a tied head.
    "gemma" Gemma: Features {
        scaled_embeddings: true,
        activations: &[Activation::Geglu],
        tied: true,
        ..Features::LLAMA_LIKE
    };
    /// Gemma 2: norms around attention and MLP, GeGLU, soft caps, scaled embeddings, a tied head, and a sliding window in every
    /// other layer.
    "gemma2" Gemma2: Features {
        norms: NormPlacement::Around,
        scaled_embeddings: true,
        activations: &[Activation::Geglu],
        tied: true,
        sliding_window: true,
        full_attention_every: Some(2),
        soft_caps: Some(SoftCaps { scores: 50.0, logits: 30.0 }),
        ..Features::LLAMA_LIKE
    };
    /// OLMo 2: Llama with norms after attention and MLP instead of before them, and norms over all queries and over all keys.
    "olmo2" Olmo2: Features {
        norms: NormPlacement::After,
        query_key_norm: Some(QueryKeyNorm::AllHeads),
        ..Features::LLAMA_LIKE
    };
    /// StarCoder2: GPT-2 with rotary positions, grouped-query attention and a sliding window.
    "starcoder2" Starcoder2: Features {
        positions: Positions::Rotary,
        rotary_fraction: 1.0,
        sliding_window: true,
        ..Features::GPT
    };
}
