//! Which models `config.json` files describe, and which files are refused.

use std::fs;

use kintsugi_checkpoint::huggingface::HuggingFaceFolder;
use kintsugi_spec::{Activation, Family, ModelSpec, RotaryScaling};
use serde_json::{Value, json};

use crate::support::{change, copy, fixture, fixtures, refusal};

#[test]
fn a_description_is_a_model() {
    let model = |name: &str| HuggingFaceFolder::read_model(&fixture(name)).unwrap();
    let gpt2 = model("gpt2");
    let expected = ModelSpec {
        name: "custom".into(),
        family: Family::Gpt,
        layers: 2,
        hidden: 24,
        heads: 4,
        kv_heads: 4,
        head_dim: 6,
        ffn: 40,
        vocab: 130,
        vocab_multiple: 1,
        positions: 24,
        tied: true,
        parallel_residual: false,
        activation: Activation::Gelu,
        norm_eps: 1e-5,
        rotary_base: 10000.0,
        rotary_fraction: 0.0,
        rotary_scaling: None,
        no_rotary_every: None,
        sliding_window: None,
        full_attention_every: None,
        full_attention_first: None,
        score_width: None,
        score_soft_cap: None,
        logit_soft_cap: None,
        init_std: 0.02,
    };
    assert_eq!(gpt2, expected);

    let neox = model("neox");
    assert_eq!((neox.family, neox.activation), (Family::Neox, Activation::ExactGelu));
    assert_eq!((neox.parallel_residual, neox.rotary_dims(), neox.tied), (true, 2, false));
    let sequential = model("neox-sequential");
    assert_eq!((sequential.parallel_residual, sequential.rotary_dims()), (false, 8));
    assert_eq!(sequential.activation, Activation::Gelu);

    let llama = model("llama");
    assert_eq!((llama.family, llama.activation), (Family::Llama, Activation::Swiglu));
    assert_eq!((llama.heads, llama.kv_heads, llama.head_dim, llama.tied), (4, 2, 6, false));
    let tied = model("llama-tied");
    assert_eq!((tied.kv_heads, tied.head_dim, tied.tied), (1, 8, true));

    assert_eq!((model("mistral").sliding_window, model("phi3").sliding_window), (Some(5), None));
    assert_eq!((model("phi3").rotary_dims(), model("phi3").head_dim), (4, 8));
    let windows = |name: &str| {
        let model = model(name);
        (0..model.layers).map(|layer| model.window(layer)).collect::<Vec<_>>()
    };
    assert_eq!(windows("qwen2-window"), [None, Some(6)]);
    let gemma2 = model("gemma2");
    assert_eq!((windows("gemma2"), gemma2.score_width), (vec![Some(7), None], Some(12)));
    assert_eq!((gemma2.score_soft_cap, gemma2.logit_soft_cap, gemma2.tied), (Some(2.0), Some(1.5), true));
    assert_eq!(model("smollm3").no_rotary_every, Some(2));
    let scaling = RotaryScaling { low: 0.5, high: Some(2.0), positions: 16, ..RotaryScaling::default() };
    assert_eq!(model("llama-scaled").rotary_scaling, Some(scaling));
}

#[test]
fn older_descriptions_mean_the_same() {
    for (name, older) in [
        ("neox", json!({ "rotary_pct": 0.25, "rotary_emb_base": 10000 })),
        ("llama", json!({ "rope_theta": 10000.0, "rope_scaling": null })),
        (
            "llama-scaled",
            json!({
                "rope_theta": 100.0,
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 0.5,
                    "high_freq_factor": 2.0,
                    "original_max_position_embeddings": 16,
                },
            }),
        ),
    ] {
        let folder = copy(name, &format!("older-{name}"));
        change(&folder, |config| {
            config.remove("rope_parameters");
            config.extend(older.as_object().unwrap().clone());
        });
        let (now, before) = (HuggingFaceFolder::open(&folder).unwrap(), fixture(name));
        assert_eq!(now.model(), &HuggingFaceFolder::read_model(&before).unwrap());
    }
    let folder = copy("llama", "older-theta");
    change(&folder, |config| {
        config.remove("rope_parameters");
        config.insert("rope_theta".into(), json!(5e5));
    });
    assert!((HuggingFaceFolder::read_model(&folder).unwrap().rotary_base - 5e5).abs() < 1e-9);
}

#[test]
fn every_family_has_a_fixture_and_an_unknown_one_is_told_all() {
    let model_type = |name: String| {
        let config = fs::read(fixture(&name).join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        config["model_type"].as_str().unwrap().to_owned()
    };
    let mut types: Vec<String> = fixtures().into_iter().map(model_type).collect();
    types.sort();
    types.dedup();
    assert_eq!(types.len(), Family::ALL.len(), "{types:?}");
    let folder = copy("llama", "unknown-family");
    change(&folder, |config| _ = config.insert("model_type".into(), json!("mamba")));
    let error = HuggingFaceFolder::read_model(&folder).unwrap_err().to_string();
    let (_, known) =
        error.split_once("model_type = \"mamba\" is not supported; use ").expect("it says which are");
    let mut known: Vec<&str> =
        known.split(['"', ',', ' ']).filter(|word| !word.is_empty() && *word != "or").collect();
    known.sort_unstable();
    assert_eq!(known, types);
}

#[test]
fn what_would_compute_something_else_is_refused() {
    let scaled = json!({ "rope_type": "dynamic", "factor": 8.0 });
    let cases: &[(&str, &str, Value, &str)] = &[
        (
            "llama",
            "rope_scaling",
            scaled.clone(),
            "is not supported; only the rope_type \"default\", \"llama3\", \"yarn\" or \"linear\" is",
        ),
        ("neox", "rope_parameters", scaled, "is not supported; only the rope_type \"default\" is"),
        ("llama", "attention_bias", json!(true), "is not supported; only false is"),
        ("llama", "mlp_bias", json!(true), "is not supported; only false is"),
        ("llama", "hidden_act", json!("gelu"), "is not supported; only \"silu\" is"),
        ("llama", "num_key_value_heads", json!(3), "does not divide num_attention_heads = 4"),
        ("llama", "hidden_size", json!(-1), "must be a whole number from 1 to 1048576"),
        ("llama", "rms_norm_eps", json!("small"), "must be a number from 1e-30 to 1e0"),
        ("llama", "quantization_config", json!({"bits": 4}), "is not supported; only plain weights are"),
        ("neox", "attention_bias", json!(false), "is not supported; only true is"),
        ("smollm3", "use_sliding_window", json!(true), "is not supported; only false is"),
        (
            "llama",
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "is not supported; only \"full_attention\" in all layers is",
        ),
        (
            "mistral",
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "is not supported for this model_type; only the same attention in all layers is",
        ),
        (
            "gemma2",
            "layer_types",
            json!(["sliding_attention"]),
            "must be \"full_attention\" or \"sliding_attention\" for each of 2 layers",
        ),
        ("gemma2", "final_logit_softcapping", json!(null), "is not supported; only a number is"),
        ("gemma2", "hidden_activation", json!("gelu"), "is not supported; only \"gelu_pytorch_tanh\" is"),
        (
            "smollm3",
            "no_rope_layers",
            json!([0, 0]),
            "is not supported; only layers without rotation at every multiple of 2 are",
        ),
        ("mistral", "sliding_window", json!("wide"), "must be a whole number from 1 to 16777216"),
        ("starcoder2", "use_bias", json!(false), "is not supported; only true is"),
        ("neox", "num_attention_heads", json!(5), "does not divide the hidden width of 32"),
        (
            "gpt2",
            "activation_function",
            json!("relu"),
            "is not supported; use \"gelu\", \"gelu_new\", \"gelu_fast\" or \"gelu_pytorch_tanh\"",
        ),
        ("gpt2", "scale_attn_weights", json!(false), "is not supported; only true is"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true), "is not supported; only false is"),
        ("gpt2", "add_cross_attention", json!(1), "must be true or false"),
    ];
    for (name, field, value, rule) in cases {
        let folder = copy(name, "refused");
        change(&folder, |config| {
            config.insert((*field).to_owned(), value.clone());
        });
        assert_eq!(refusal(&folder), format!("{field} = {value} {rule}"));
    }
    let folder = copy("gpt2", "missing-field");
    change(&folder, |config| {
        config.remove("n_layer");
    });
    assert_eq!(refusal(&folder), "n_layer is missing");
}

#[test]
fn an_odd_share_of_a_head_is_refused() {
    let folder = copy("neox", "odd");
    change(&folder, |config| {
        config["rope_parameters"]["partial_rotary_factor"] = json!(0.4);
    });
    assert!(refusal(&folder).ends_with("is not an even number of dims, which rotary positions need"));
}
