//! Layouts that agree, and injected faults that are detected.

use std::fs;

use kintsugi_engine::verify::Fault;
use serde_json::Value;

use crate::support::{folder, kintsugi, limited};

/// Four layers, so that few layouts are skipped; everything else as small as possible.
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

/// The layouts in fp32 that failed. With so few tokens, fewer bits may be too coarse for the bounds.
fn failed(answer: &Value) -> Vec<&str> {
    let failed = answer["failed"].as_array().unwrap().iter().map(|failed| failed["layout"].as_str().unwrap());
    failed.filter(|layout| !layout.contains("16: ") && !layout.contains("fp8: ")).collect()
}

#[test]
fn layouts_agree_and_those_that_cannot_be_had_are_skipped() {
    let (code, answer) = verify("verify-agree", &["--set", "model.layers=3"]);
    assert!(failed(&answer).is_empty(), "{answer}");
    // With so few tokens, 16 bits may be too coarse for the bounds, so layouts in 16 bits may fail.
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

/// The layouts that were skipped with a file, and the whole answer. The model is too narrow for products in 8 bits.
fn ran(name: &str, file: &str, settings: &[&str]) -> (Vec<Value>, Value) {
    let folder = folder(name);
    fs::write(folder.join("given.toml"), file).unwrap();
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    let arguments: Vec<&str> =
        ["verify", "given.toml", "--json", "--steps", "1"].into_iter().chain(settings).collect();
    let output = kintsugi(&folder, &arguments);
    assert_ne!(output.status.code(), Some(2), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(failed(&answer).is_empty(), "{answer}");
    let is_wide = |skipped: &&Value| !skipped["layout"].as_str().unwrap().starts_with("fp8: ");
    (answer["skipped"].as_array().unwrap().iter().filter(is_wide).cloned().collect(), answer)
}

#[test]
fn nothing_of_the_given_layout_is_left_in_the_layouts() {
    let (plainly_skipped, plain) = ran("verify-plain", SMALL, &[]);
    assert!(plainly_skipped.is_empty(), "{plain}");
    let own = "
[parallel]
pp = 2
dp = 2
layers_per_stage = [1, 3]
sequence_parallel = true
[sharding]
weights = \"cluster\"
gradients = \"cluster\"
states = \"cluster\"
reduce = \"micro-batch\"
[memory]
recompute = \"full\"
attention = \"plain\"
";
    let (_, answer) = ran("verify-own-layout", &format!("{SMALL}{own}"), &[]);
    assert_eq!(answer, plain, "the layouts are the same, so the differences are, bit for bit");
    let settings = ["parallel.pp=2", "parallel.dp=2", "parallel.layers_per_stage=[1,3]", "sharding.zero=2"];
    assert_eq!(ran("verify-set-layout", SMALL, &settings).1, plain);
}

#[test]
fn a_batch_that_is_not_given_is_that_of_the_given_layout() {
    let small = SMALL.replace("global = 8\n", "");
    let (skipped, answer) = ran("verify-batch", &small, &["parallel.dp=8"]);
    assert!(skipped.is_empty(), "{answer}");
}

#[test]
fn settings_that_the_quick_demo_cannot_have_are_used_as_they_are() {
    let folder = folder("verify-settings");
    // batch.global = 8 would not be a multiple of this; the demo's own 32 is.
    let settings = ["--set", "batch.micro=16", "--set", "model.hidden=16", "--set", "batch.sequence=8"];
    let output = kintsugi(&folder, &[&["verify", "--steps", "1"], &settings[..]].concat());
    assert_ne!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn what_this_machine_cannot_hold_is_refused_before_anything_runs() {
    let folder = folder("verify-misfit");
    let arguments = ["verify", "--set", "model.hidden=2048", "--set", "model.layers=8"];
    let output = limited(&folder, &arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("error: the layout \"") && said.contains(" for the comparison, "), "{said}");
    assert!(said.ends_with("left of this process's address space, ulimit -v\n"), "{said}");
}

#[test]
fn a_mistake_is_noticed_where_it_matters() {
    let (code, answer) = verify("verify-inject", &["--inject", "missing-average"]);
    assert_eq!(code, Some(1), "{answer}");
    assert!(failed(&answer).contains(&"dp 2"), "{answer}");
    let replicated = |layout: &&str| layout.contains("dp ") || layout.contains("cp ");
    assert!(failed(&answer).iter().all(replicated), "{answer}");
}

/// With this seed one element of a bias has almost no gradient in the first steps. Its weight differs by more than 1e-4 of its
/// bias, and AdamW makes that of gradients that differ by 1e-6.
#[test]
fn a_weight_that_follows_from_rounding_of_its_gradients_agrees() {
    let (_, answer) = verify("verify-amplified", &["--set", "run.seed=27", "--layouts", "tp 4"]);
    assert!(failed(&answer).is_empty(), "{answer}");
    let [weight, gradient] = ["worst_weight", "worst_gradient"].map(|worst| answer[worst].as_f64().unwrap());
    assert!(weight > 1e-4 && gradient < 2e-6, "{answer}");
}

#[test]
fn two_steps_are_enough_for_every_fault() {
    // Sequence parallelism and a tied table on two stages, and copies over dp.
    let layouts = ["--layouts", "selective,states over the node"];
    let (_, answer) = verify("verify-no-fault", &layouts);
    assert!(failed(&answer).is_empty(), "{answer}");
    for (fault, _) in Fault::ALL {
        let (code, answer) =
            verify(&format!("verify-{fault}"), &[&layouts[..], &["--inject", fault]].concat());
        assert!(code == Some(1) && !failed(&answer).is_empty(), "{fault}: {answer}");
    }
}
