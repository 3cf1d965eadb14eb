//! What users of other trainers look for and Kintsugi does not have: such keys and words are answered with what to do instead.

/// Something that is not available.
struct Feature {
    /// What it is called. A name with `_` or `.` is a part of a key; any other name is a whole word of a key or value.
    names: &'static [&'static str],
    /// What is missing, and what to do instead.
    reason: &'static str,
}

/// The features, most specific first: the names of Megatron-LM, DeepSpeed, torchtitan and transformers.
const FEATURES: [Feature; 5] = [
    Feature {
        names: &["ep", "expert_parallel", "expert_model_parallel", "expert_tensor_parallel"],
        reason: "Kintsugi has no expert parallelism, because it has no mixture-of-experts models; remove the key",
    },
    Feature {
        names: &["moe", "expert", "experts", "router", "mixtral"],
        reason: "Kintsugi has no mixture-of-experts models; train a dense model, whose MLP is as wide as model.ffn says",
    },
    Feature {
        names: &["fp8", "float8", "mxfp8", "fp4", "nvfp4"],
        reason: "Kintsugi has no such type of weights and activations; precision.compute = \"bf16\" is the narrowest, and \
                 precision.products = \"fp8\" computes products in 8 bits",
    },
    Feature {
        names: &["lora", "qlora", "dora", "peft", "adapter", "adapters"],
        reason: "Kintsugi has no low-rank adapters and trains all weights; remove the key. model.init starts from trained \
                 weights, and sharding.zero = 3 and memory.recompute save memory",
    },
    Feature {
        names: &["dropout", "pdrop"],
        reason: "Kintsugi has no dropout, because a pretraining run sees its data about once; remove the key. \
                 optimizer.weight_decay regularises",
    },
];

/// Why a key or a word is not available, if it belongs to a feature that Kintsugi does not have.
pub(super) fn reason(text: &str) -> Option<&'static str> {
    let text = text.to_lowercase().replace('-', "_");
    let is_word = |name: &str| text.split(|c: char| !c.is_alphanumeric()).any(|word| word == name);
    let is_named = |name: &&str| if name.contains(['_', '.']) { text.contains(name) } else { is_word(name) };
    FEATURES.iter().find(|feature| feature.names.iter().any(is_named)).map(|feature| feature.reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_trainers_are_recognised_and_similar_ones_are_not() {
        let begins = |text: &str, words: &str| {
            let found = reason(text).unwrap_or_else(|| panic!("{text}"));
            assert!(found.starts_with(&format!("Kintsugi has no {words}")), "{text}: {found}");
        };
        for key in ["parallel.ep", "parallel.expert_model_parallel_size", "parallel.expert_parallel_degree"] {
            begins(key, "expert parallelism");
        }
        for key in ["model.experts", "model.num_experts_per_tok", "moe", "model.moe_router_topk", "mixtral"] {
            begins(key, "mixture-of-experts models");
        }
        for key in ["precision.fp8", "mxfp8", "fp8", "float8"] {
            begins(key, "such type of weights and activations");
        }
        for key in ["lora", "model.lora_rank", "optimizer.lora_alpha", "peft"] {
            begins(key, "low-rank adapters");
        }
        for key in ["model.dropout", "model.attention-dropout", "model.resid_pdrop", "run.hidden_dropout"] {
            begins(key, "dropout");
        }
        for key in ["model.context_length", "parallel.tpp", "run.epochs", "fp16", "steps", "parallel.cpu"] {
            assert_eq!(reason(key), None, "{key}");
        }
    }
}
