//! Layouts that agree, and mistakes that are noticed.

use std::fs;

use serde_json::Value;

use crate::support::{folder, kintsugi};

/// Four layers, so that few layouts are skipped; the rest as small as can be.
const SMALL: &str = "
[model]
family = \"gpt\"
layers = 4
hidden = 16
heads = 4
vocab = 128
[batch]
sequence = 8
micro = 1
global = 8
[run]
eval_every = 0
";

fn verify(name: &str, arguments: &[&str]) -> (Option<i32>, Value) {
    let folder = folder(name);
    fs::write(folder.join("small.toml"), SMALL).unwrap();
    let output =
        kintsugi(&folder, &[&["verify", "small.toml", "--json", "--steps", "2"], arguments].concat());
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
}

/// The layouts in fp32 that failed.
fn failed(answer: &Value) -> Vec<&str> {
    let failed = answer["failed"].as_array().unwrap().iter().map(|failed| failed["layout"].as_str().unwrap());
    failed.filter(|layout| !layout.contains("16: ")).collect()
}

#[test]
fn layouts_agree_and_those_that_cannot_be_had_are_skipped() {
    let (code, answer) = verify("verify-agree", &["--set", "model.layers=3"]);
    assert!(failed(&answer).is_empty(), "{answer}");
    // With so few tokens 16 bits may be too coarse for the bounds; the exit code tells.
    let any_failed = !answer["failed"].as_array().unwrap().is_empty();
    assert_eq!(code, Some(i32::from(any_failed)), "{answer}");
    let skipped = answer["skipped"].as_array().unwrap();
    assert!(skipped.iter().any(|skipped| skipped["layout"] == "pp 4, 1F1B"), "{answer}");
    assert!(answer["layouts"].as_u64().unwrap() >= 20, "{answer}");
    for worst in ["worst_loss", "worst_norm", "worst_gradient", "worst_weight"] {
        assert!(answer[worst].as_f64().unwrap() < 1e-4, "{answer}");
        assert!(answer["bf16"][worst].is_f64() && answer["fp16"][worst].is_f64(), "{answer}");
    }
}

#[test]
fn a_mistake_is_noticed_where_it_matters() {
    let (code, answer) = verify("verify-inject", &["--inject", "missing-average"]);
    assert_eq!(code, Some(1), "{answer}");
    assert!(failed(&answer).contains(&"dp 2"), "{answer}");
    assert!(failed(&answer).iter().all(|layout| layout.contains("dp ")), "{answer}");
}
